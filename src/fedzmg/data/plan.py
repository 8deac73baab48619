"""The batch plan of a round: the examples that each client sees at each local step.

This is the only module that knows that clients differ in size. Plans are plain NumPy arrays, a
function of (seed, round, client), made on the host before the round runs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Ids
from fedzmg.errors import InputError, brief
from fedzmg.participation import LARGEST_WORK, Participation, Work, function_name, is_number
from fedzmg.seeds import brief_stream, key, step_keys, stream


@dataclass(frozen=True)
class Batching:
    """Rule by which a client cuts its examples into local steps."""

    size: int = 20
    epochs: int = 1
    straddle: bool = False  # let batches run across the border between two epochs
    keep_partial: bool = True  # keep batches that are not full, at the end of an epoch or stream

    def steps(self, count: int) -> int:
        """Count the local steps of a client with ``count`` examples."""
        runs, length = (1, count * self.epochs) if self.straddle else (self.epochs, count)
        return runs * (-(-length // self.size) if self.keep_partial else length // self.size)


@dataclass(frozen=True)
class Stream:
    """One client's local steps: example positions, number of real ones, ends of epochs."""

    indices: Ids
    counts: Ids
    closes: npt.NDArray[np.bool_]
    key: int

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def keys(self) -> Ids:
        """Return a key for random numbers of each step."""
        own: Ids = step_keys(np.array([self.key]), len(self))[0]
        return own

    def __getitem__(self, first: slice) -> "Stream":
        return Stream(self.indices[first], self.counts[first], self.closes[first], self.key)


class ClientBatch(NamedTuple):
    """One client's part in one trial's round."""

    trial: int
    client: int
    examples: int
    stream: Stream
    address: tuple[int, int, int, int] = (0, 0, 0, 0)  # seed, round, client and occurrence

    @property
    def key(self) -> int:
        """Return the key for random numbers of rules."""
        seed, *place = self.address
        return key(seed, "rule", *place)


def sample_cohort(seed: int, round_: int, population: int, size: int, *, replacement: bool) -> Ids:
    """Sample the clients of a round, the same for every algorithm under this seed."""
    return brief_stream(seed, "cohort", round_).choice(population, size=size, replace=replacement)


class LocalWork:
    """Local work: epochs, or steps of a participation; whole steps, at least one if it has data."""

    def __init__(self, participation: Participation, batching: Batching, extra_epochs: int) -> None:
        steps = participation.steps
        self._amount: Work | None = participation.epochs if steps is None else steps
        self._in_steps, self._extra = steps is not None, extra_epochs
        self._batching = batching
        self._usual = replace(batching, epochs=batching.epochs + extra_epochs)

    def plan(self, seed: int, round_: int, client: int, count: int) -> tuple[Batching, int | None]:
        """Return the batching of a client with ``count`` examples, and its steps; None: all."""
        if self._amount is None:
            return self._usual, None
        return self._fitted(self._drawn(seed, round_, client, count), count)

    def batch(self, address: tuple[int, int, int, int], first: int, count: int) -> ClientBatch:
        """Plan the part of a client, by seed, round, client and occurrence, in a round."""
        batching, steps = self.plan(*address[:3], count)
        stream = local_stream(batching, *address, first, count)
        planned = stream if steps is None else stream[:steps]
        return ClientBatch(0, address[2], count, planned, address)

    def steps(self, count: int, choose: Callable[[tuple[float, ...]], float] = max) -> int:
        """Return the steps of a client, by default the most; of a user's function, a guess."""
        if self._amount is None or callable(self._amount):
            return self._usual.steps(count)
        bounds = self._amount if isinstance(self._amount, tuple) else (self._amount,)
        return self._fitted(choose(bounds), count)[1]

    def _fitted(self, amount: float, count: int) -> tuple[Batching, int]:
        """Return whole epochs that contain an amount of work, and the steps to take of them."""
        if not count:
            return self._batching, 0
        batching = self._batching
        single = replace(batching, epochs=1)
        once = count / batching.size if batching.straddle else single.steps(count)
        if not once:  # the only batch is not full
            batching, once = replace(batching, keep_partial=True), 1
        extra, is_whole = self._extra, not self._in_steps and amount == int(amount)
        wanted = amount + extra * once if self._in_steps else (amount + extra) * once
        # Rounding must not make three epochs four.
        epochs = int(amount) + extra if is_whole else math.ceil(wanted / once)
        whole = replace(batching, epochs=max(1, epochs))
        if not whole.steps(count):
            whole = replace(whole, keep_partial=True)
        most = whole.steps(count)
        if is_whole and epochs:
            return whole, most
        return whole, min(most, max(1, math.floor(wanted + 0.5)))

    def _drawn(self, seed: int, round_: int, client: int, count: int) -> float:
        """Return a client's amount of work, by the address (seed, round, client)."""
        amount = self._amount
        if isinstance(amount, tuple):
            rng, (low, high) = stream(seed, "work", round_, client), amount
            if isinstance(low, int) and isinstance(high, int):
                return int(rng.integers(low, high, endpoint=True))
            return float(rng.uniform(low, high))
        if not callable(amount):
            assert amount is not None
            return amount
        found: Any = amount(client, round_, count, key(seed, "work", round_, client))
        unit = "steps" if self._in_steps else "epochs"
        if not is_number(found, whole=self._in_steps) or not 0 <= found <= LARGEST_WORK[unit]:
            kind = "a whole number" if self._in_steps else "a number"
            expected = f"{kind} of {unit} up to {LARGEST_WORK[unit]}"
            source = f"{function_name(amount)}, client {client}, round {round_}"
            raise InputError(f"{source}: {brief(found)}: expected {expected}")
        return int(found) if self._in_steps else float(found)


def local_stream(
    batching: Batching, seed: int, round_: int, client: int, occurrence: int, first: int, count: int
) -> Stream:
    """Plan the steps of one client, whose examples are ``first : first + count``."""
    address = (round_, client, occurrence)
    counts, closes, once = _cuts(batching, count)
    order = brief_stream(seed, "order", *address).permuted(once, axis=1)
    runs = 1 if batching.straddle else batching.epochs
    indices = _batches(first + order.reshape(runs, -1), batching.size, len(counts) // runs, first)
    return Stream(indices, counts, closes, key(seed, "dropout", *address))


def full_pass(size: int, first: int, count: int) -> Stream:
    """Plan one pass over all examples of a client, in order."""
    counts, closes, once = _cuts(Batching(size), count)
    indices = _batches(first + once, size, len(counts), first)
    return Stream(indices, counts, np.zeros_like(closes), 0)


@lru_cache(4096)
def _cuts(batching: Batching, count: int) -> tuple[Ids, npt.NDArray[np.bool_], Ids]:
    """Return, for a size: real examples, ends of epochs by step, and examples in order."""
    size, epochs = batching.size, batching.epochs
    runs = 1 if batching.straddle else epochs
    length, steps = epochs * count // runs, batching.steps(count) // runs
    counts = np.full((runs, steps), size, dtype=np.int64)
    counts[:, -1:] -= max(0, steps * size - length)
    ends = (np.arange(1, epochs + 1) * count - 1) // size
    if not batching.straddle:
        ends = np.arange(1, runs + 1) * steps - 1
    closes = np.isin(np.arange(runs * steps), ends)
    return counts.reshape(-1), closes, np.tile(np.arange(count), (epochs, 1))


def _batches(order: Ids, size: int, steps: int, first: int) -> Ids:
    used = min(order.shape[1], steps * size)
    # Padding repeats a real example; its weight is zero, so its value never matters.
    indices = np.full((len(order), steps * size), first, dtype=np.int64)
    indices[:, :used] = order[:, :used]
    return indices.reshape(-1, size)


class Padded(NamedTuple):
    """Streams of several clients as rectangles: ``[client, step, ...]``."""

    indices: Ids
    weights: npt.NDArray[np.float64]  # sum to one in a batch; zero past the end of a stream
    closes: npt.NDArray[np.bool_]
    keys: Ids
    lengths: Ids


def pad(streams: Sequence[Stream], *, per_example: bool = False) -> Padded:
    """Align streams of different length; ``per_example`` weights sum to one over a stream."""
    lengths = np.array([len(s) for s in streams], dtype=np.int64)
    each, size = (len(streams), int(lengths.max())), streams[0].indices.shape[1]
    indices, counts = np.zeros((*each, size), np.int64), np.zeros((*each, 1), np.int64)
    closes, keys = np.zeros(each, np.bool_), step_keys(np.array([s.key for s in streams]), each[1])
    for k, s in enumerate(streams):
        n = len(s)
        indices[k, :n], counts[k, :n, 0], closes[k, :n] = s.indices, s.counts, s.closes
    divisor = counts.sum(1, keepdims=True) if per_example else counts
    weights = (np.arange(size) < counts) / np.maximum(divisor, 1)
    return Padded(indices, weights, closes, keys, lengths)
