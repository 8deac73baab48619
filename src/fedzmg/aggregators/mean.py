"""The weighted mean: the default, which adds updates as they come and keeps none."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from fedzmg.aggregators.rows import combine, shares
from fedzmg.contract import Aggregator
from fedzmg.messages import Rows
from fedzmg.tree import State


@final
@dataclass(frozen=True)
class Mean(Aggregator):
    """Mean with the algorithm's weights of clients."""

    streams: ClassVar[bool] = True

    def aggregate(self, rows: Rows, state: State) -> tuple[Tensor, State]:
        return combine(shares(rows, weighted=True), rows.deltas), state
