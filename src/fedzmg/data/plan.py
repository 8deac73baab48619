"""The batch plan of a round: the examples that each client sees at each local step.

This is the only module that knows that clients differ in size. Plans are plain NumPy arrays, a
function of (seed, round, client), made on the host before the round runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedzmg.errors import InputError
from fedzmg.seeds import step_keys, stream


@dataclass(frozen=True)
class Batching:
    """Rule by which a client cuts its examples into local steps."""

    size: int = 20
    epochs: int = 1
    straddle: bool = False
    """Let batches run across the border between two epochs."""
    keep_partial: bool = True
    """Keep a batch that is not full: the last one of an epoch, or of the stream if straddling."""

    def __post_init__(self) -> None:
        """Reject sizes that cannot be batched."""
        for name in ("size", "epochs"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InputError(f"batch {name} = {value!r}: expected a whole number of at least 1")

    def steps(self, count: int) -> int:
        """Count the local steps of a client with ``count`` examples."""
        runs, length = (1, count * self.epochs) if self.straddle else (self.epochs, count)
        return runs * (-(-length // self.size) if self.keep_partial else length // self.size)


@dataclass(frozen=True)
class Stream:
    """One client's local steps: example positions, number of real ones, ends of epochs."""

    indices: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    closes: npt.NDArray[np.bool_]
    keys: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.counts)

    def __getitem__(self, steps: slice) -> Stream:
        """Return some of the steps."""
        return Stream(*(getattr(self, field.name)[steps] for field in fields(self)))


class ClientBatch(NamedTuple):
    """One client's part in one trial's round."""

    trial: int
    client: int
    examples: int
    stream: Stream


def sample_cohort(
    seed: int, round_: int, population: int, size: int, *, replacement: bool
) -> npt.NDArray[np.int64]:
    """Sample the clients of a round, the same for every algorithm under this seed."""
    rng = stream(seed, "cohort", round_)
    return rng.choice(population, size=size, replace=replacement)


def local_stream(
    batching: Batching, seed: int, round_: int, client: int, occurrence: int, first: int, count: int
) -> Stream:
    """Plan the steps of one client, whose examples are ``first : first + count``."""
    address = (round_, client, occurrence)
    rng = stream(seed, "order", *address)
    epochs = [first + rng.permutation(count) for _ in range(batching.epochs)]
    if batching.straddle:
        epochs = [np.concatenate(epochs)] if epochs else []
    batches: list[npt.NDArray[np.int64]] = []
    closes: list[bool] = []
    for epoch in epochs:
        cut = [epoch[i : i + batching.size] for i in range(0, len(epoch), batching.size)]
        if cut and len(cut[-1]) < batching.size and not batching.keep_partial:
            cut.pop()
        batches += cut
        closes += [False] * (len(cut) - 1) + [True] * bool(cut)
    if batching.straddle and count:
        ends = np.arange(1, batching.epochs + 1) * count - 1
        closing = set((ends // batching.size).tolist())
        closes = [i in closing for i in range(len(batches))]
    counts = np.array([len(batch) for batch in batches], dtype=np.int64)
    # Padding repeats a real example; its weight is zero, so its value never matters.
    indices = np.full((len(batches), batching.size), first, dtype=np.int64)
    for row, batch in zip(indices, batches, strict=True):
        row[: len(batch)] = batch
    keys = step_keys(seed, "dropout", *address, steps=len(batches))
    return Stream(indices, counts, np.array(closes, dtype=np.bool_), keys)


def full_pass(size: int, first: int, count: int) -> Stream:
    """Plan one pass over all examples of a client, in order."""
    starts = range(0, count, size)
    indices = np.full((len(starts), size), first, dtype=np.int64)
    for row, start in zip(indices, starts, strict=True):
        real = min(size, count - start)
        row[:real] = np.arange(first + start, first + start + real)
    counts = np.array([min(size, count - start) for start in starts], dtype=np.int64)
    flags = np.zeros(len(counts), dtype=np.bool_)
    return Stream(indices, counts, flags, np.zeros(len(counts), dtype=np.int64))


class Padded(NamedTuple):
    """Streams of several clients as rectangles: ``[client, step, ...]``."""

    indices: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float64]
    """Weight of every example in its batch; a batch's weights sum to one (to zero past the end)."""
    closes: npt.NDArray[np.bool_]
    keys: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


def pad(streams: Sequence[Stream], *, per_example: bool = False) -> Padded:
    """Align streams of different length; ``per_example`` weights sum to one over a stream."""
    steps = max((len(s) for s in streams), default=0)
    size = streams[0].indices.shape[1]
    out = Padded(
        np.zeros((len(streams), steps, size), dtype=np.int64),
        np.zeros((len(streams), steps, size)),
        np.zeros((len(streams), steps), dtype=np.bool_),
        np.zeros((len(streams), steps), dtype=np.int64),
        np.array([len(s) for s in streams], dtype=np.int64),
    )
    for k, s in enumerate(streams):
        n = len(s)
        real = np.arange(size) < s.counts[:, None]
        divisor = s.counts.sum() if per_example else s.counts[:, None]
        out.indices[k, :n] = s.indices
        out.weights[k, :n] = real / np.maximum(divisor, 1)
        out.closes[k, :n] = s.closes
        out.keys[k, :n] = s.keys
    return out
