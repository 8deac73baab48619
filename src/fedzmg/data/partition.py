"""Split pooled examples into clients; every partition is a function of its seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedzmg.errors import InputError
from fedzmg.seeds import stream

Owners = npt.NDArray[np.int64]


def _check(labels: npt.NDArray[np.int64], clients: int) -> None:
    if clients < 1 or clients > len(labels):
        raise InputError(
            f"clients = {clients}: expected 1 to {len(labels)}, the number of examples"
        )


def iid(labels: npt.NDArray[np.int64], clients: int, *, seed: int = 0) -> Owners:
    """Owner of every example: a random split into clients of equal size (up to one example)."""
    _check(labels, clients)
    owners = np.arange(len(labels), dtype=np.int64) % clients
    return stream(seed, "partition", "iid").permutation(owners)


def dirichlet(
    labels: npt.NDArray[np.int64], clients: int, *, alpha: float, seed: int = 0
) -> Owners:
    """Owner of every example under label skew; every client owns the same number, up to one.

    Each client draws its own label distribution from Dirichlet(alpha); examples are dealt one at
    a time to clients in turn, each taking a label from its distribution among those left. Small
    ``alpha`` means strong skew. Equal sizes keep label skew apart from quantity skew.
    """
    _check(labels, clients)
    if not 0 < alpha < np.inf:
        raise InputError(f"alpha = {alpha!r}: expected a number > 0")
    rng = stream(seed, "partition", "dirichlet")
    classes = np.unique(labels)
    piles = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in classes]
    taste = rng.dirichlet(np.full(len(classes), alpha), size=clients)
    owners = np.empty(len(labels), dtype=np.int64)
    left = np.array([len(pile) for pile in piles])
    for turn in range(len(labels)):
        client = turn % clients
        share = taste[client] * (left > 0)
        # A client whose labels are used up takes what there is most of.
        share = share / share.sum() if share.sum() > 1e-12 else left / left.sum()
        label = int(rng.choice(len(classes), p=share))
        owners[piles[label].pop()] = client
        left[label] -= 1
    return owners


PARTITIONS: dict[str, Callable[..., Owners]] = {"iid": iid, "dirichlet": dirichlet}
