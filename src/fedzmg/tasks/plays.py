"""``plays``: the next character of Shakespeare's plays; every speaking role is a client."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedzmg.data.embedded import load_plays
from fedzmg.data.federated import FederatedData, examples
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.networks import CharGRU
from fedzmg.tasks.task import Protocol, Task
from fedzmg.tasks.tuned import tuned

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
CHARACTERS = "".join(sorted("\n !$&',-.3:;?" + LETTERS))
VOCABULARY = len(CHARACTERS) + 1
"""65 known characters, and one id for every other."""
LENGTH = 40
TEST_EVERY = 8
"""Of a role's sequences every eighth is kept for evaluation."""


def encode(text: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Character codes to ids; what is not in the vocabulary gets the last id."""
    table = np.full(256, VOCABULARY - 1, dtype=np.int64)
    table[np.frombuffer(CHARACTERS.encode(), dtype=np.uint8)] = np.arange(len(CHARACTERS))
    return table[text]


def plays() -> Task:
    """Roles with at least eight sequences of 40 characters; a GRU of 64 units."""
    data = load_plays()
    ids = encode(data.text)
    rows: list[npt.NDArray[np.int64]] = []
    owners: list[npt.NDArray[np.int64]] = []
    for role, (first, last) in enumerate(zip(data.offsets[:-1], data.offsets[1:], strict=True)):
        sequences = (last - first) // (LENGTH + 1)
        if sequences >= TEST_EVERY:
            cut = ids[first : first + sequences * (LENGTH + 1)]
            rows.append(cut.reshape(-1, LENGTH + 1))
            owners.append(np.full(sequences, role))
    tokens, owner = np.concatenate(rows), np.concatenate(owners)
    place = np.concatenate([np.arange(len(r)) for r in rows])
    held = place % TEST_EVERY == TEST_EVERY - 1
    # Evaluating on every held-out sequence would cost more than training on a small machine.
    half = np.flatnonzero(held)[::6], np.flatnonzero(held)[3::6]
    train = tokens[~held]
    return Task(
        name="plays",
        model=FunctionalModel(CharGRU(VOCABULARY, 16, 64)),
        train=FederatedData.from_arrays(
            train[:, :-1], train[:, 1:], [data.roles[i] for i in owner[~held]]
        ),
        tune=examples(tokens[half[0], :-1], tokens[half[0], 1:]),
        test=examples(tokens[half[1], :-1], tokens[half[1], 1:]),
        init="keras",
        protocol=Protocol(rounds=100, cohort=10, batch_size=8, eval_every=5, threshold=0.35),
        options=tuned("plays"),
    )
