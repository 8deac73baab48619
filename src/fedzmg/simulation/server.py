"""Models and servers of a pack of trials: their initial state, and the server step of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedzmg.contract import State
from fedzmg.engine.aggregate import Merger
from fedzmg.models.initial import initial_params
from fedzmg.simulation.trial import PackedRule
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree, stack, tree_map

DIVERGED_AFTER = 3
"""Rounds in a row that lose every upload before a trial counts as diverged."""


class Snapshot(NamedTuple):
    """Everything a later round depends on, one row per trial (client memory apart)."""

    params: Tree
    state: State
    alive: Tensor
    lost: Tensor
    """Rounds in a row that lost every upload."""
    traffic: Tensor
    """Bytes down and up of all rounds so far."""


def first_models(
    task: Task, seeds: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tree:
    """Make the initial weights of every trial, one row each."""
    starts = [
        initial_params(task.model, task.init, seed).map(lambda leaf: leaf.to(device, dtype))
        for seed in seeds
    ]
    found: Tree = stack(starts)
    return found


def first_snapshot(server: PackedRule, params: Tree, trials: int, device: torch.device) -> Snapshot:
    """Make the state before the first round from initial models, one row each."""
    state = server.map(lambda rule, p: rule.init(p), params)
    flags = torch.zeros(trials, dtype=torch.int64, device=device)
    return Snapshot(params, state, flags == 0, flags, torch.zeros_like(flags)[:, None].repeat(1, 2))


def next_snapshot(
    server: PackedRule, merger: Merger, population: int, stamp: Tensor, old: Snapshot
) -> Snapshot:
    """Apply the server step; a trial that lost every upload, or diverged, keeps its state."""
    cohort, sums = merger.cohort(population, stamp), merger.sums
    params, state = server.map(
        lambda rule, p, s, c: rule.update(p, s, c), old.params, old.state, cohort
    )
    moves = old.alive & (sums.clients > 0)

    def pick(new: Tensor, before: Tensor) -> Tensor:
        return torch.where(moves.reshape(-1, *[1] * (new.ndim - 1)), new, before)

    uploaded = sums.clients + sums.dropped > 0
    lost = torch.where((sums.clients == 0) & uploaded, old.lost + 1, torch.zeros_like(old.lost))
    return Snapshot(
        tree_map(pick, params, old.params),
        tree_map(pick, state, old.state),
        old.alive & (lost < DIVERGED_AFTER),
        lost,
        old.traffic,
    )
