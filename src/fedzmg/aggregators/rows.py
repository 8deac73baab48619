"""Operations on the updates of a cohort in which clients without an update do not exist.

A row whose weight is zero may be anywhere. Sums, norms and distances are computed in float64.
Columns are taken in blocks, which bounds the memory of copies.
"""

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from fedzmg.messages import Rows

BLOCK = 1 << 16


def present(rows: Rows) -> Tensor:
    """Flag the rows that exist."""
    return rows.weights > 0


def shares(rows: Rows, weighted: bool) -> Tensor:
    """Return weights that sum to one: those of the clients, or equal ones."""
    weights = rows.weights.double() if weighted else present(rows).double()
    return weights / weights.sum()


def by_columns(function: Callable[[Tensor], Tensor], deltas: Tensor) -> Tensor:
    """Apply a function of columns block by block."""
    return torch.cat([function(block) for block in torch.split(deltas, BLOCK, -1)], -1)


def combine(factors: Tensor, deltas: Tensor) -> Tensor:
    """Sum rows times factors."""
    return by_columns(lambda block: (factors[:, None] * block.double()).sum(0), deltas)


def distances(deltas: Tensor, point: Tensor) -> Tensor:
    """Compute the distance of every row to a point."""
    parts = zip(torch.split(deltas, BLOCK, -1), torch.split(point, BLOCK, -1), strict=True)
    squares = [(block.double() - own).square().sum(-1) for block, own in parts]
    return torch.stack(squares).sum(0).sqrt()


def at(ordered: Tensor, index: Tensor) -> Tensor:
    """Take the entry at one index, or one index per column, along the first axis."""
    return torch.take_along_dim(ordered, index.expand(1, *ordered.shape[1:]), 0)[0]


def middle(values: Tensor, exists: Tensor) -> Tensor:
    """Compute the median over the first axis, of two middle values their mean."""
    shaped = exists.reshape(-1, *[1] * (values.ndim - 1))
    ordered = torch.where(shaped, values, inf).sort(0).values
    last = exists.sum() - 1
    low, high = (at(ordered, i.clamp(min=0)).double() for i in (last // 2, (last + 1) // 2))
    return low + (high - low) / 2


def coordinate_median(rows: Rows, weighted: bool = False) -> Tensor:
    """Compute the median of every column."""
    if not weighted:
        return by_columns(lambda block: middle(block, present(rows)), rows.deltas)
    return by_columns(lambda block: _weighted_middle(block, rows.weights.double()), rows.deltas)


def _weighted_middle(values: Tensor, weights: Tensor) -> Tensor:
    """Return the value at which half of the weight is reached; the mean of two if exactly."""
    ordered, order = torch.where((weights > 0)[:, None], values, inf).sort(dim=0, stable=True)
    reached = 2 * weights[order].cumsum(0)
    first = (reached < weights.sum()).sum(0)
    last = len(values) - 1
    low, high = (at(ordered, i.clamp(max=last)).double() for i in (first, first + 1))
    exactly = at(reached, first.clamp(max=last)) == weights.sum()
    return torch.where(exactly & high.isfinite(), low + (high - low) / 2, low)


def squared_distances(rows: Rows) -> Tensor:
    """Compute squared distances between rows; infinite to themselves and to absent rows."""
    # They follow from products of rows. The median is subtracted first: products of updates near it
    # are then small, and exact however far others are away.
    exists = present(rows)
    products = rows.weights.new_zeros(2 * [len(exists)], dtype=torch.float64)
    for block in torch.split(rows.deltas, BLOCK, -1):
        centred = torch.where(exists[:, None], block.double() - middle(block, exists), 0.0)
        products = products + centred @ centred.T
    products = (products + products.T) / 2  # exactly symmetric: nearest pairs are exact ties
    squares = products.diagonal()
    found = (squares[:, None] + squares[None, :] - 2 * products).clamp(min=0)
    itself = torch.eye(len(found), dtype=torch.bool, device=found.device)
    return found.masked_fill(itself | ~exists[:, None] | ~exists[None, :], inf)
