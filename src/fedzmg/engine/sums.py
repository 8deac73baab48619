"""Sums over the clients of a cohort, or of a part of it."""

from typing import NamedTuple

from torch import Tensor

from fedzmg.messages import Upload
from fedzmg.tree import State


class Sums(NamedTuple):
    """Sums over clients, one row per trial."""

    averaged: Tensor  # weight times (delta, average), flat
    total: Tensor
    weight: Tensor
    clients: Tensor  # uploads merged
    dropped: Tensor  # uploads rejected: not finite, outliers, or too few for an aggregator
    steps: Tensor
    loss: Tensor


class MergedPart(NamedTuple):
    """Merged uploads of some clients of a cohort, and what is known of each."""

    sums: Sums
    upload: Upload  # upload of one client, for its size
    order: list[int]
    facts: list[Tensor]
    each: list[State]
    accepted: list[Tensor]
    computed: int
