"""Random numbers for rules, as functions of a key: the same bits in every engine.

A client's key is ``context.key``, a server's ``cohort.key``. Numbers differ between keys, and
:func:`fold` makes further keys, for example one per step.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fedzmg.kernels.layers import RANGE, draws
from fedzmg.tree import Tree

T = TypeVar("T", Tensor, Tree)


def fold(key: Tensor, number: Tensor | int) -> Tensor:
    """Return a new key for a number below this key."""
    salted = key ^ (number * 0x9E3779B97F4A7C1 & 0x7FFFFFFFFFFFFFFF)
    low, high = draws(salted, 0, 1, 2, None).unbind(-1)
    return (high << 31) ^ low


def uniform(key: Tensor, like: T) -> T:
    """Draw numbers above 0 and below 1 of the shape and type of a tensor or tree."""

    def below_one(key: Tensor, number: int, leaf: Tensor) -> Tensor:
        largest = 1 - torch.finfo(leaf.dtype).eps / 2  # anything between rounds to 1
        return _uniform(key, number, leaf).clamp(max=largest)

    return _each(key, like, below_one)


def normal(key: Tensor, like: T) -> T:
    """Draw standard normal numbers of the shape and type of a tensor or tree."""
    return _each(key, like, lambda *place: torch.special.ndtri(_uniform(*place)))


def _each(key: Tensor, like: T, draw: Callable[[Tensor, int, Tensor], Tensor]) -> T:
    if not isinstance(key, Tensor):
        raise TypeError(f"key = {key!r}: add needs = frozenset({{'key'}}) to the rule")
    if isinstance(like, Tensor):
        return draw(key, 0, like).to(like.dtype)
    named = enumerate(like.items())
    return Tree({name: draw(key, i, leaf).to(leaf.dtype) for i, (name, leaf) in named})


def _uniform(key: Tensor, number: int, like: Tensor) -> Tensor:
    bits = draws(key, number, 0, like.numel(), None).reshape(like.shape)
    return (bits.double() + 0.5) / RANGE
