"""What both engines are given for a round, and what they give back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedzmg.contract import ClientRule, State
from fedzmg.data.federated import Examples, FederatedData
from fedzmg.data.plan import ClientBatch
from fedzmg.engine.local import Outcome
from fedzmg.models.objective import Objective, PrepareFunction
from fedzmg.tree import Tree


@dataclass(frozen=True)
class Program:
    """Everything about local training that does not change from round to round.

    ``rule`` carries the structure; its numbers arrive per trial, as tensors.
    """

    rule: ClientRule
    objective: Objective
    data: FederatedData
    prepare: PrepareFunction
    dtype: torch.dtype
    device: torch.device
    full_pass_size: int = 256
    longest: int = 0
    """Steps of the longest stream that any client can have."""

    def batch_inputs(self, indices: Tensor) -> Examples:
        """Gather examples by position and turn stored inputs into what the model reads."""
        x, y = self.data.examples
        return Examples(self.prepare(x[indices], self.dtype), y[indices])


class Broadcast(NamedTuple):
    """What every trial sends to its clients; first axis trials."""

    params: Tree
    shared: State
    numbers: Mapping[str, Tensor]
    round: Tensor


class Chunk(NamedTuple):
    """Outcomes of some entries of a round; ``rows[i]`` is where entry ``entries[i]`` lies."""

    entries: list[int]
    rows: list[int]
    outcomes: Outcome
    computed: int
    """Client steps computed for it, those of clients that were done already included."""


class Engine(Protocol):
    """Runs local training for the entries of a round."""

    def train(self, entries: list[ClientBatch], sent: Broadcast, memory: State) -> Iterator[Chunk]:
        """Yield outcomes, every entry exactly once; ``memory`` has one row per entry."""
        ...
