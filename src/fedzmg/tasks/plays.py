"""``plays``: the next character of Shakespeare's plays; every speaking role is a client."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import nn

from fedzmg.data.embedded import load_plays
from fedzmg.data.federated import FederatedData, examples
from fedzmg.data.text import VOCABULARY, encode, sequences
from fedzmg.models.networks import CharGRU
from fedzmg.tasks.preset import Preset
from fedzmg.tasks.task import Protocol, Task

LENGTH = 40
TEST_EVERY = 8
"""Of a role's sequences every eighth is kept for evaluation."""


@dataclass(frozen=True)
class Plays(Preset):
    """Roles with at least eight sequences of 40 characters; a GRU of 64 units."""

    @property
    def clients(self) -> int:
        return 875

    @property
    def protocol(self) -> Protocol:
        return Protocol(rounds=100, cohort=10, batch_size=8, eval_every=5, threshold=0.35)

    def network(self) -> nn.Module:
        return CharGRU(VOCABULARY, 16, 64)

    def build(self) -> Task:
        data = load_plays()
        cut = sequences(*encode(data.text, data.offsets), LENGTH)
        counts = np.diff(cut.offsets)
        role = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(role)) - cut.offsets[role]
        used = counts[role] >= TEST_EVERY
        last = place % TEST_EVERY == TEST_EVERY - 1
        train, held = np.flatnonzero(used & ~last), np.flatnonzero(used & last)
        x, y = cut.inputs.astype(np.int64), cut.targets
        # Evaluating on every held-out sequence would cost more than training on a small machine.
        tune, test = held[::6], held[3::6]
        return self.assembled(
            FederatedData.from_arrays(x[train], y[train], [data.roles[i] for i in role[train]]),
            tune=examples(x[tune], y[tune]),
            test=examples(x[test], y[test]),
            init="keras",
        )
