"""Random numbers by address: every number is a function of where it is used.

Initial weights, cohorts, batch orders and dropout masks are derived from an *address*
``(seed, purpose, *place)``; no global generator is read or written. Hence every algorithm of a
study sees the same cohorts and batches, a run resumes bit-identically at any round, and a trial
gives the same curve alone or packed with others, on one execution path.
"""

import hashlib
import operator
import threading
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

Purpose = Literal[
    "init", "cohort", "order", "dropout", "partition", "probe", "work", "rule", "server"
]
Place = int | str

_MASK63 = (1 << 63) - 1


def key(seed: int, purpose: Purpose, *place: Place) -> int:
    """Return a 63-bit integer for an address, the same on every platform."""
    # A NumPy integer gives the same key as the Python integer it equals.
    parts = [f"str:{p}" if isinstance(p, str) else f"int:{operator.index(p)}" for p in place]
    address = "\x1f".join([str(operator.index(seed)), purpose, *parts])
    digest = hashlib.blake2b(address.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK63


def stream(seed: int, purpose: Purpose, *place: Place) -> np.random.Generator:
    """Return a NumPy generator that starts at an address."""
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, *place)))


class _Moved(threading.local):
    """A generator that moves from address to address; to make a new one takes 20 times as long."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)
        self.generator, self.state = np.random.Generator(self.bits), self.bits.state


_moved = _Moved()


def brief_stream(seed: int, purpose: Purpose, *place: Place) -> np.random.Generator:
    """Return the generator of :func:`stream`, good until the next call in this thread."""
    _moved.state["state"]["key"][0] = key(seed, purpose, *place)
    _moved.bits.state = _moved.state
    return _moved.generator


def torch_stream(seed: int, purpose: Purpose, *place: Place) -> torch.Generator:
    """Return a torch CPU generator that starts at an address."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(key(seed, purpose, *place))
    return generator


def step_keys(keys: npt.NDArray[np.int64], steps: int) -> npt.NDArray[np.int64]:
    """Return one key per local step below each address, by its key (splitmix64 of a counter)."""
    with np.errstate(over="ignore"):
        counter = np.arange(1, steps + 1, dtype=np.uint64)
        z = keys.astype(np.uint64)[:, None] + counter * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    found: npt.NDArray[np.int64] = (z & np.uint64(_MASK63)).astype(np.int64)
    return found
