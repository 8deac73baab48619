"""Input and output of an engine."""

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
        """Gather examples by position and convert stored inputs to model inputs."""
        x, y = self.data.examples
        return Examples(self.prepare(x[indices], self.dtype), y[indices])


class Broadcast(NamedTuple):
    """Message of every trial to its clients; first axis trials."""

    params: Tree
    shared: State
    numbers: Mapping[str, Tensor]
    round: Tensor


class Chunk(NamedTuple):
    """Outcomes of some clients of a round; batch ``batches[i]`` has row ``rows[i]``."""

    batches: list[int]
    """Positions in the round's list of client batches."""
    rows: list[int]
    outcomes: Outcome
    computed: int
    """Client steps computed for it, padding included."""


class Engine(Protocol):
    """Runs local training for the clients of a round."""

    def train(
        self, batches: list[ClientBatch], broadcast: Broadcast, memory: State
    ) -> Iterator[Chunk]:
        """Yield the outcome of every batch exactly once; ``memory`` has one row per batch."""
        ...
