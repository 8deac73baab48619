"""Shared code of rules that map operators over clients."""

from __future__ import annotations

from torch import Tensor


def clients_first(x: Tensor, axis: int) -> Tensor:
    """Move clients to the first axis; no view if they are there, which the compiler would copy."""
    return x if axis == 0 else x.movedim(axis, 0)
