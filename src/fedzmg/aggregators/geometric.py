"""The geometric median, or RFA (Pillutla et al. 2022): the smallest sum of distances.

It is approached by smoothed Weiszfeld steps::

    b_k = p_k / max(nu, |z - x_k|)
    z  <- sum_k b_k x_k / sum_k b_k

from the mean of the updates. Three steps, as in the paper, are near the limit but not there. It
tolerates bad clients of less than half of the weight.
"""

import torch
from torch import Tensor

from fedzmg.aggregators.coordinates import WEIGHTED
from fedzmg.aggregators.rows import combine, distances, shares
from fedzmg.contract import Aggregator, Number, choice, flag, number, rule_class, whole
from fedzmg.messages import Rows
from fedzmg.tree import State


@rule_class
class GeometricMedian(Aggregator):
    """Point with the smallest sum of distances to the updates."""

    iterations: int = whole(3, low=1, doc="steps")
    nu: Number = number(1e-6, above=0, doc="distance below which an update gains no more weight")
    start: str = choice("mean", "zero", doc="first point: the mean, or zero as in byzfl")
    weighted: bool = flag(False, doc=WEIGHTED)

    def aggregate(self, rows: Rows, state: State) -> tuple[Tensor, State]:
        own = shares(rows, self.weighted)
        point = combine(own if self.start == "mean" else torch.zeros_like(own), rows.deltas)
        for _ in range(self.iterations):
            factors = own / torch.clamp(distances(rows.deltas, point), min=self.nu)
            point = combine(factors / factors.sum(), rows.deltas)
        return point, state
