"""Aggregators that choose updates near many others: Krum, Multi-Krum and Bulyan.

With n updates, f of them bad, the score of an update is the sum of squared distances to its
n - f - 2 nearest others. Krum (Blanchard et al. 2017) takes the update with the lowest score,
Multi-Krum the mean of the n - f lowest. Bulyan (El Mhamdi et al. 2018) takes n - 2f winners of Krum
one after another, each among the updates left, and then for every parameter the mean of the n - 4f
values nearest to their median. Of equal scores the client with the lowest number wins.

Clients are counted, so weights are not used.
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from fedzmg.aggregators.rows import by_columns, combine, middle, present, squared_distances
from fedzmg.contract import Aggregator, choice, flag, rule_class, whole
from fedzmg.messages import Rows
from fedzmg.tree import State

BYZANTINE = "bad clients of a cohort that are tolerated (f)"
NEIGHBOURS = "others in a score: as in the paper, or one more as in byzfl"


def krum_scores(squared: Tensor, exists: Tensor, neighbours: Tensor) -> Tensor:
    """Sum the squared distances to the nearest neighbours; infinite for absent rows."""
    positions = torch.arange(len(squared), device=squared.device)
    scores = torch.where(positions < neighbours, squared.sort(1).values, 0.0).sum(1)
    return torch.where(exists, scores, inf)


def lowest(scores: Tensor, number: Tensor | int) -> Tensor:
    """Flag the rows with the lowest scores; of equal ones the first."""
    return scores.argsort(stable=True).argsort() < number


@dataclass(frozen=True)
class _Krum(Aggregator):
    """Base of rules that rank updates by Krum's score."""

    byzantine: int = whole(1, doc=BYZANTINE)
    neighbours: str = choice("n-f-2", "n-f-1", doc=NEIGHBOURS)

    @property
    def fewest(self) -> int:
        return 2 * self.byzantine + 3

    def _chosen(self, rows: Rows, number: Tensor | int) -> Tensor:
        exists = present(rows)
        others = exists.sum() - self.byzantine - int(self.neighbours[-1])
        scores = krum_scores(squared_distances(rows), exists, others.clamp(min=1))
        return combine(lowest(scores, number).double() / number, rows.deltas)


@rule_class
class Krum(_Krum):
    """Update with the lowest sum of squared distances to its neighbours."""

    def aggregate(self, rows: Rows, state: State) -> tuple[Tensor, State]:
        return self._chosen(rows, 1), state


@rule_class
class MultiKrum(_Krum):
    """Mean of the updates with the lowest scores of Krum."""

    selected: int | None = whole(None, low=1, doc="updates averaged; absent: n - f")

    @property
    def fewest(self) -> int:
        return max(2 * self.byzantine + 3, self.selected or 0)

    def aggregate(self, rows: Rows, state: State) -> tuple[Tensor, State]:
        number = self.selected or present(rows).sum() - self.byzantine
        return self._chosen(rows, number), state


@rule_class
class Bulyan(Aggregator):
    """Winners of Krum, then for every parameter the values nearest to their median."""

    byzantine: int = whole(1, doc=BYZANTINE)
    one_shot: bool = flag(False, doc="choose all by one ranking instead of one after another")

    @property
    def fewest(self) -> int:
        return 4 * self.byzantine + 3

    def aggregate(self, rows: Rows, state: State) -> tuple[Tensor, State]:
        exists, bad = present(rows), self.byzantine
        number = exists.sum() - 2 * bad
        squared, chosen = squared_distances(rows), torch.zeros_like(exists)
        if self.one_shot:
            others = (exists.sum() - bad - 2).clamp(min=1)
            chosen = lowest(krum_scores(squared, exists, others), number)
        for done in range(0 if self.one_shot else len(exists) - 2 * bad):
            left = exists & ~chosen
            others = (left.sum() - bad - 2).clamp(min=1).minimum(left.sum() - 1)
            winner = lowest(krum_scores(torch.where(left[None, :], squared, inf), left, others), 1)
            chosen = chosen | (winner & (done < number))
        kept = (number - 2 * bad).clamp(min=1)
        ranks = torch.arange(len(exists), device=exists.device)[:, None]

        def mean(block: Tensor) -> Tensor:
            away = (block.double() - middle(block, chosen)).abs()
            order = torch.where(chosen[:, None], away, inf).sort(dim=0, stable=True).indices
            nearest = torch.take_along_dim(block.double(), order, 0)
            return torch.where(ranks < kept, nearest, 0.0).sum(0) / kept

        return by_columns(mean, rows.deltas), state
