"""Split pooled examples into clients; every partition is a function of its seed.

A partition is the client of every example; ``UNUSED`` marks examples without a client. :func:`make`
takes a name and options, and records everything needed to repeat the partition.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Columns, Ids
from fedzmg.data.federated import number_clients
from fedzmg.errors import InputError, check_names
from fedzmg.seeds import stream

Owners = Ids
Floats = npt.NDArray[np.float64]
UNUSED = -1

_MOST_DRAWS = 100


def iid(labels: Ids, clients: int, *, seed: int = 0) -> Owners:
    """Split at random into clients of equal size (up to one example)."""
    labels = _check(labels, clients)
    owners = np.arange(len(labels), dtype=np.int64) % clients
    return stream(seed, "partition", "iid").permutation(owners)


def dirichlet(labels: Ids, clients: int, *, alpha: float, seed: int = 0) -> Owners:
    """Split with label skew into clients of equal size (up to one example).

    Each client draws its own label distribution from Dirichlet(alpha). Clients take one example at
    a time in turn, with a label from their distribution among those left. Small ``alpha`` means
    strong skew. Equal sizes keep label skew apart from quantity skew.
    """
    labels = _check(labels, clients, alpha=alpha)
    rng = stream(seed, "partition", "dirichlet")
    classes = np.unique(labels)
    piles = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in classes]
    shares = rng.dirichlet(np.full(len(classes), alpha), size=clients)
    owners = np.empty(len(labels), dtype=np.int64)
    left = np.array([len(pile) for pile in piles])
    for i in range(len(labels)):
        client = i % clients
        share = shares[client] * (left > 0)
        # A client whose labels are used up takes what there is most of.
        share = share / share.sum() if share.sum() > 1e-12 else left / left.sum()
        label = int(rng.choice(len(classes), p=share))
        owners[piles[label].pop()] = client
        left[label] -= 1
    return owners


def shards(labels: Ids, clients: int, *, per_client: int = 2, seed: int = 0) -> Owners:
    """Sort by label, cut into shards, and give each client a few of them.

    The split of the FedAvg paper: a client sees few labels, about ``per_client`` where a label
    fills whole shards. Shards differ by at most one example in size; which examples of a label
    fall into which of its shards is random, and so is who gets which shards.
    """
    labels = _check(labels, clients, per_client=per_client)
    pieces = clients * per_client
    rng = stream(seed, "partition", "shards")
    mixed = rng.permutation(len(labels))
    by_label = mixed[np.argsort(labels[mixed], kind="stable")]
    shard = np.arange(len(labels)) * pieces // len(labels)
    owners = np.empty(len(labels), dtype=np.int64)
    owners[by_label] = rng.permutation(np.arange(pieces) % clients)[shard]
    return owners


def quantity(labels: Ids, clients: int, *, alpha: float, minimum: int = 1, seed: int = 0) -> Owners:
    """Split into clients that differ in size and in nothing else.

    Every client gets ``minimum`` examples; the rest is divided by shares drawn from
    Dirichlet(alpha) over the clients, to the nearest example. Small ``alpha`` means few large
    clients, large ``alpha`` equal sizes. Labels are given out at random.
    """
    labels = _check(labels, clients, minimum=minimum, alpha=alpha)
    rest = len(labels) - clients * minimum
    rng = stream(seed, "partition", "quantity")
    borders = np.rint(rest * np.cumsum(_softmax(_log_gamma(rng, alpha, clients))))
    borders[-1] = rest
    sizes = minimum + np.diff(borders, prepend=0.0).astype(np.int64)
    return rng.permutation(np.repeat(np.arange(clients, dtype=np.int64), sizes))


def dirichlet_by_label(
    labels: Ids, clients: int, *, alpha: float, minimum: int = 10, seed: int = 0
) -> Owners:
    """Split with label skew into clients of unequal size.

    Each label is divided over the clients by shares drawn from Dirichlet(alpha). The draw is
    repeated until every client has ``minimum`` examples. Small ``alpha`` means strong skew.
    """
    labels = _check(labels, clients, minimum=minimum, alpha=alpha)
    rng = stream(seed, "partition", "dirichlet_by_label")
    label = np.unique(labels, return_inverse=True)[1]
    sizes = np.bincount(label)[:, None]
    for _ in range(_MOST_DRAWS):
        shares = [_softmax(_log_gamma(rng, alpha, clients)) for _ in sizes]
        borders = np.rint(sizes * np.cumsum(shares, axis=1))
        borders[:, -1:] = sizes
        counts = np.diff(borders, axis=1, prepend=0.0).astype(np.int64)
        if counts.sum(0).min() >= minimum:
            break
    else:
        wanted = f"alpha = {alpha}, clients = {clients}, minimum = {minimum}"
        remedy = "use a larger alpha, fewer clients or a smaller minimum"
        raise InputError(f"{wanted}: not reached in {_MOST_DRAWS} draws: {remedy}")
    mixed = rng.permutation(len(labels))
    owners = np.empty(len(labels), dtype=np.int64)
    given = np.repeat(np.tile(np.arange(clients), len(sizes)), counts.ravel())
    owners[mixed[np.argsort(label[mixed], kind="stable")]] = given
    return owners


def natural(ids: npt.ArrayLike, clients: int | None = None) -> Owners:
    """Split by a sortable client id; client ``i`` is the ``i``-th id of ``clients``, if known."""
    present, owners = number_clients(ids)
    if clients is not None and clients != len(present):
        raise InputError(f"clients = {clients}: the ids name {len(present)}, leave clients out")
    return owners


def pachinko(
    fine: Ids, coarse: Ids, clients: int, *, per_client: int = 100, root: float = 0.1,
    leaf: float = 10.0, seed: int = 0,
) -> Owners:  # fmt: skip
    """Split by two-level Pachinko allocation, as for federated CIFAR-100.

    A client draws probabilities of coarse labels from Dirichlet(root) and, below each of them, of
    fine labels from Dirichlet(leaf), among those that still have examples. Then it takes
    ``per_client`` random examples, one coarse label and one fine label at a time; a label that
    runs out is deleted and its level renormalised. Later clients find fewer labels and are more
    skewed. Left-over examples are ``UNUSED``. Each fine label lies below one coarse label. Small
    ``root`` and ``leaf`` mean strong skew.
    """
    fine = _check(fine, clients, per_client=per_client, root=root, leaf=leaf)
    above_each = np.asarray(coarse)
    if above_each.shape != fine.shape:
        raise InputError(f"coarse labels have shape {above_each.shape}, labels {fine.shape}")
    _, first, label = np.unique(fine, return_index=True, return_inverse=True)
    for row in np.flatnonzero(above_each != above_each[first][label]):
        raise InputError(f"label {fine[row]} in example {row} has a second coarse label: use one")
    above = np.unique(above_each[first], return_inverse=True)[1]
    rng = stream(seed, "partition", "pachinko")
    mixed = rng.permutation(len(label))
    piles = mixed[np.argsort(label[mixed], kind="stable")]
    sizes = np.bincount(label)

    left = sizes.copy()
    taken = [_fill(rng, left, above, per_client, root, leaf) for _ in range(clients)]

    # The draws of a label, in order, take its pile from the top.
    drawn = np.concatenate(taken)
    by_label = np.argsort(drawn, kind="stable")
    top = np.cumsum(sizes) - sizes
    used = sizes - left
    rank = np.arange(len(drawn)) - np.repeat(np.cumsum(used) - used, used)
    owners = np.full(len(label), UNUSED, dtype=np.int64)
    owners[piles[top[drawn[by_label]] + rank]] = by_label // per_client
    return owners


def _fill(rng: Any, left: Ids, above: Ids, wanted: int, root: float, leaf: float) -> Ids:
    """Draw a client's labels, removed from ``left``: many at once, up to one that runs out."""
    # A draw over all labels, without those that are exhausted, is Dirichlet over the others.
    coarse_logs = _log_gamma(rng, root, int(above.max()) + 1)
    fine_logs = _log_gamma(rng, leaf, len(left))
    kept: list[Ids] = []
    while wanted:
        labels = np.flatnonzero(left)
        parents, parent = np.unique(above[labels], return_inverse=True)
        weights = _softmax(coarse_logs[parents])[parent] * _softmax(fine_logs[labels], parent)
        borders = np.cumsum(weights)
        row = np.searchsorted(borders, rng.random(wanted) * borders[-1], side="right")
        # A number that rounds up to the last border belongs to the last label.
        draws = labels[np.minimum(row, len(labels) - 1)]
        counts = np.bincount(draws, minlength=len(left))
        spent = np.flatnonzero((counts >= left) & (left > 0))
        if len(spent):
            last = min(int(np.flatnonzero(draws == y)[left[y] - 1]) for y in spent)
            draws = draws[: last + 1]
            counts = np.bincount(draws, minlength=len(left))
        left -= counts
        kept.append(draws)
        wanted -= len(draws)
    return np.concatenate(kept)


def _log_gamma(rng: np.random.Generator, shape: float, size: int) -> Floats:
    """Draw logarithms of gamma variates, which do not underflow; normalised they are Dirichlet."""
    # Gamma(a) is Gamma(a + 1) U^(1 / a), and -log U is exponential.
    return np.log(rng.standard_gamma(shape + 1.0, size)) - rng.standard_exponential(size) / shape


def _softmax(logs: Floats, group: Ids | None = None) -> Floats:
    """Normalise logarithms to weights that sum to one (in every ``group``)."""
    if group is None:
        group = np.zeros(len(logs), dtype=np.int64)
    largest = np.full(int(group.max()) + 1, -np.inf)
    np.maximum.at(largest, group, logs)
    weights: Floats = np.exp(logs - largest[group])
    weights /= np.bincount(group, weights)[group]
    return weights


def _check(labels: npt.ArrayLike, clients: int, **options: float) -> npt.NDArray[Any]:
    """Check labels, the number of clients and options; return the labels."""
    array = np.asarray(labels)
    if array.ndim != 1 or len(array) == 0:
        raise InputError(f"labels have shape {array.shape}: give one per example")
    given = {"clients": clients, **options}
    needed = 1
    for name, value in given.items():
        whole = name in ("clients", "per_client", "minimum")
        number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
        if not number or not 0 < value < np.inf:
            kind = "whole number" if whole else "number"
            raise InputError(f"{name} = {value!r}: expected a {kind} greater than 0")
        needed *= int(value) if whole else 1
    if needed > len(array):
        named = ", ".join(f"{name} = {value}" for name, value in given.items())
        raise InputError(f"{named}: needs {needed} examples of {len(array)}: use smaller numbers")
    return array


def hold_out(columns: Columns, share: float, *, seed: int = 0) -> tuple[Columns, Columns]:
    """Split off a share of each client's rows, or of all; one row at least stays to train on."""
    if not isinstance(share, Real) or not 0 < share < 1:
        raise InputError(f"share = {share!r}: expected a number between 0 and 1, such as 0.2")
    owners = columns.owners
    ends = np.array([0, columns.rows]) if owners is None else owners.offsets
    sizes = np.diff(ends)
    held = np.clip(np.rint(share * sizes).astype(np.int64), 0, np.maximum(sizes - 1, 0))
    if not held.any():
        raise InputError(f"share = {share} of no client's rows is a whole row: use a larger one")
    owner = np.repeat(np.arange(len(sizes)), sizes)
    shuffled = np.lexsort((stream(seed, "partition", "hold out").random(columns.rows), owner))
    first = np.arange(columns.rows) - ends[owner] < held[owner]
    test = np.concatenate([[0], np.cumsum(held)])
    parts = [
        columns.take(np.sort(rows), None if owners is None else owners._replace(offsets=offsets))
        for rows, offsets in ((shuffled[~first], ends - test), (shuffled[first], test))
    ]
    return parts[0], parts[1]


_RULES = (iid, dirichlet, dirichlet_by_label, shards, quantity, natural, pachinko)
PARTITIONS: dict[str, Callable[..., Owners]] = {rule.__name__: rule for rule in _RULES}
_MISSING = {  # remedy for a missing argument, in Python (and in a command)
    "alpha": "give alpha=0.1 for very unequal clients, 10 for nearly equal ones (--set alpha=0.1)",
    "clients": "give their number, clients=100 (--clients 100)",
    "coarse": "it needs data with coarse labels, such as CIFAR-100",
}


@dataclass(frozen=True, eq=False)
class Partition:
    """Owners and the options that made them."""

    name: str
    options: Mapping[str, Any]  # all options of the partition, defaults included
    seed: int
    owners: Owners  # client of every example, read-only; UNUSED for examples without one

    def fingerprint(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.owners, dtype="<i8").tobytes()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Return the record of a partition, ready for JSON; it can be made again from this."""
        record = {"name": self.name, "options": dict(self.options), "seed": self.seed}
        return {**record, "fingerprint": self.fingerprint()}


def make(
    name: str, labels: npt.ArrayLike, clients: int | None = None, *,
    coarse: npt.ArrayLike | None = None, seed: int = 0, **options: Any,
) -> Partition:  # fmt: skip
    """Make a partition by its name in :data:`PARTITIONS`, with its own options, e.g. ``alpha``.

    For ``natural``, ``labels`` are client ids, and the number of clients is found by itself. Only
    ``pachinko`` uses ``coarse``, a coarse label of every example.
    """
    check_names("partition", [name], PARTITIONS)
    parameters = inspect.signature(PARTITIONS[name]).parameters
    known = [key for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY and key != "seed"]
    check_names(f"option of partition {name!r}", options, [*known, "clients", "seed"])
    if not isinstance(seed, Integral):
        raise InputError(f"seed = {seed!r}: expected a whole number")
    given = {"clients": clients, "coarse": coarse, "seed": seed, **options}
    given = {key: value for key, value in given.items() if value is not None}
    data, *others = parameters.values()
    arguments = {one.name: given.get(one.name, one.default) for one in others}
    for key, value in arguments.items():
        if value is inspect.Parameter.empty:
            raise InputError(f"partition {name!r} needs {key}: {_MISSING[key]}")
    owners = PARTITIONS[name](**{data.name: np.asarray(labels)}, **arguments)
    owners.flags.writeable = False
    return Partition(name, {key: arguments[key] for key in known}, int(seed), owners)
