"""Aggregators that treat every parameter on its own: mean, median, trimmed mean (Yin et al. 2018).

The weighted mean is the default: it adds updates as they come and keeps none.
With an even number of updates the median is the mean of the two middle values. The weighted median
is the smallest value at which half of the weight is reached. The trimmed mean leaves out the f
smallest and the f largest values of every parameter. Both tolerate fewer than half of the clients.
"""

from dataclasses import field
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from fedzmg.aggregators.rows import by_columns, combine, coordinate_median, present, shares
from fedzmg.contract import Aggregator, flag, rule_class, whole
from fedzmg.errors import InputError
from fedzmg.messages import Rows
from fedzmg.tree import State

WEIGHTED = "weight clients by the algorithm's weights (by default by their examples)"


@rule_class
class Mean(Aggregator):
    """Mean with the algorithm's weights of clients."""

    streams: ClassVar[bool] = True

    def aggregate(self, rows: Rows, state: State) -> tuple[Tensor, State]:
        return combine(shares(rows, weighted=True), rows.deltas), state


@rule_class
class Median(Aggregator):
    """Median of every parameter."""

    weighted: bool = flag(False, doc=WEIGHTED)

    def aggregate(self, rows: Rows, state: State) -> tuple[Tensor, State]:
        return coordinate_median(rows, self.weighted), state


@rule_class
class TrimmedMean(Aggregator):
    """Mean of every parameter without its smallest and its largest values."""

    byzantine: int = whole(1, doc="values left out on each side")
    fraction: float | None = field(default=None, metadata={"doc": "byzantine as a share of values"})

    def __post_init__(self) -> None:
        super().__post_init__()
        share = self.fraction
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if share is not None and not (is_number and 0 <= share < 0.5):
            raise InputError(f"fraction = {share!r}: expected a number >= 0 and < 0.5")

    @property
    def fewest(self) -> int:
        return 2 * self.byzantine + 1 if self.fraction is None else 1

    def aggregate(self, rows: Rows, state: State) -> tuple[Tensor, State]:
        exists = present(rows)
        number = exists.sum()
        trimmed: int | Tensor = self.byzantine
        if self.fraction is not None:
            trimmed = (self.fraction * number.double()).floor().long()
        positions = torch.arange(len(exists), device=exists.device)
        inside = (positions >= trimmed) & (positions < number - trimmed)

        def mean(block: Tensor) -> Tensor:
            ordered = torch.where(exists[:, None], block, inf).sort(0).values.double()
            return torch.where(inside[:, None], ordered, 0.0).sum(0) / inside.sum()

        return by_columns(mean, rows.deltas), state
