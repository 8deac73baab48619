"""Aggregators by distances and norms: geometric median, centred clipping and norm bounds.

The geometric median, or RFA (Pillutla et al. 2022), has the smallest sum of distances. It is
approached by smoothed Weiszfeld steps from the mean of the updates. Three steps, as in the paper,
are near the limit but not there. It tolerates bad clients of less than half of the weight::

    b_k = p_k / max(nu, |z - x_k|)
    z  <- sum_k b_k x_k / sum_k b_k

Centred clipping (Karimireddy et al. 2021) moves a centre by the mean of clipped differences::

    v <- v + sum_k p_k (x_k - v) min(1, tau / |x_k - v|)

It starts from the aggregate of the last round, zero in the first; this is its state. A norm bound
(Sun et al. 2019) is the mean of updates whose norm is at most M::

    sum_k p_k x_k min(1, M / |x_k|)

M is the median of the round's norms, a fixed number, or adaptive: ``M <- M exp(-rate (b - q))``
with b the share of norms up to M (inferred from TensorFlow Federated's robust aggregator). It
limits the harm of a client but does not exclude any.
"""

import torch
from torch import Tensor

from fedzmg.aggregators.coordinates import WEIGHTED
from fedzmg.aggregators.rows import combine, coordinate_median, distances, middle, present, shares
from fedzmg.contract import Aggregator, Number, choice, flag, number, rule_class, whole
from fedzmg.messages import Rows
from fedzmg.tree import State, Tree


def _factors(norms: Tensor, bound: Number) -> Tensor:
    """Return factors that shorten norms to a bound; 1 for a norm of zero."""
    return torch.where(norms > bound, bound / norms, 1.0)


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


@rule_class
class CentredClipping(Aggregator):
    """Centre moved by the mean of clipped differences from it."""

    tau: Number = number(10.0, above=0, doc="largest norm of a difference, in units of updates")
    iterations: int = whole(1, low=1, doc="steps in a round")
    start: str = choice("previous", "zero", "median", doc="first centre: last aggregate, ...")
    weighted: bool = flag(False, doc=WEIGHTED)

    def init(self, params: Tree) -> State:
        if self.start != "previous":
            return ()
        return torch.cat([leaf.flatten() for leaf in params.values()]).zero_()

    def aggregate(self, rows: Rows, state: State) -> tuple[Tensor, State]:
        own = shares(rows, self.weighted)
        centre = combine(torch.zeros_like(own), rows.deltas)
        if self.start == "previous":
            centre = centre + state
        elif self.start == "median":
            centre = coordinate_median(rows)
        for _ in range(self.iterations):
            factors = own * _factors(distances(rows.deltas, centre), self.tau)
            centre = combine(factors, rows.deltas) + (1 - factors.sum()) * centre
        return centre, centre.to(rows.deltas.dtype) if self.start == "previous" else ()


@rule_class
class NormBound(Aggregator):
    """Mean of updates whose norms are bounded."""

    bound: str = choice("median", "fixed", "adaptive", doc="median of the norms, or by fields")
    norm: Number = number(1.0, above=0, doc="fixed bound, or the first adaptive one")
    quantile: Number = number(0.8, low=0, high=1, doc="share of norms below an adaptive bound")
    rate: Number = number(0.2, above=0, doc="rate of change of an adaptive bound")
    weighted: bool = flag(False, doc=WEIGHTED)

    def init(self, params: Tree) -> State:
        if self.bound != "adaptive":
            return ()
        return next(iter(params.values())).new_ones(()) * self.norm

    def aggregate(self, rows: Rows, state: State) -> tuple[Tensor, State]:
        own, exists = shares(rows, self.weighted), present(rows)
        norms = distances(rows.deltas, torch.zeros_like(rows.deltas[0]))
        limit = {"median": middle(norms, exists), "fixed": self.norm, "adaptive": state}[self.bound]
        merged = combine(own * _factors(norms, limit), rows.deltas)
        if self.bound != "adaptive":
            return merged, ()
        below = ((norms <= state) & exists).sum() / exists.sum()
        return merged, (state * torch.exp(-self.rate * (below - self.quantile))).to(state.dtype)
