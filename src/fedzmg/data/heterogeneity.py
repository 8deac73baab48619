"""Measure the heterogeneity of clients: volume, labels, entropy, imbalance, KL divergence.

All measures start from class counts ``[clients, classes]``. For images a class is a label and the
volume counts examples; for text a class is a character and the volume counts characters.
Logarithms are natural, standard deviations over clients divide by ``n - 1``.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from fedzmg.data import embedded
from fedzmg.data.columns import Columns, Owners, Strings, group
from fedzmg.data.partition import make
from fedzmg.data.text import CHARACTERS, encode
from fedzmg.errors import InputError, check_names
from fedzmg.seeds import stream

Counts: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Options: TypeAlias = Mapping[str, Any]
Unit = Literal["examples", "characters"]
EntropyBase = Literal["classes", "present"]
Reference = Literal["pooled", "global"]


def label_counts(
    labels: npt.ArrayLike, owners: npt.ArrayLike, *, classes: int, clients: int | None = None
) -> Counts:
    """Count each class at each client, ``[clients, classes]``; negative owners are left out."""
    label, owner = np.asarray(labels), np.asarray(owners)
    whole = all(array.dtype.kind in "iu" for array in (label, owner)) or label.size == 0
    if label.ndim != 1 or label.shape != owner.shape or not whole:
        given = f"labels are {label.dtype} of shape {label.shape}"
        given += f", owners {owner.dtype} of shape {owner.shape}"
        raise InputError(f"{given}: give a whole number each for every example")
    owned = owner >= 0
    outside = owned & ((label < 0) | (label >= classes))
    if outside.any():
        row = int(np.argmax(outside))
        raise InputError(f"label {label[row]} of example {row}: expected 0 to {classes - 1}")
    total = int(owner.max(initial=-1)) + 1 if clients is None else clients
    if (owner >= total).any():
        raise InputError(f"client {owner.max()} owns examples, but clients = {total}")
    cells = owner[owned].astype(np.int64) * classes + label[owned].astype(np.int64)
    return np.bincount(cells, minlength=total * classes).reshape(total, classes).astype(np.int64)


def owners_of(offsets: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return the owner of every row from client offsets, as in ``FederatedData.offsets``."""
    sizes = np.diff(np.asarray(offsets))
    return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)


def distinct(counts: Counts) -> Counts:
    """Count the classes that occur at each client."""
    return np.asarray(np.count_nonzero(counts, axis=-1))


def entropy(counts: Counts, base: EntropyBase = "classes") -> Floats:
    """Compute each client's entropy over the largest of all classes, or of those ``present``."""
    share = _shares(counts)
    nats = -np.sum(share * np.log(share, out=np.zeros_like(share), where=share > 0), axis=-1)
    possible = distinct(counts) if base == "present" else np.full(nats.shape, counts.shape[-1])
    most = np.log(np.maximum(possible, 1))
    normal: Floats = np.divide(nats, most, out=np.zeros_like(nats), where=most > 0)
    # Rounding may step over the ends, and -0 would be printed with its sign.
    return normal.clip(0.0, 1.0) + 0.0


def gini(counts: Counts) -> Floats:
    """Compute the Gini coefficient of each client's counts: 0 if even, ``1 - 1/C`` for one of C."""
    classes = counts.shape[-1]
    # Whole numbers until the division: equal counts give exactly 0.
    weights = 2 * np.arange(1, classes + 1) - classes - 1
    unequal = np.sum(np.sort(counts, axis=-1) * weights, axis=-1)
    return np.asarray(unequal / (classes * counts.sum(axis=-1)))


def kl(counts: Counts, reference: npt.ArrayLike) -> Floats:
    """Compute the KL divergence of each client from reference counts, in nats; may be infinite."""
    share, whole = _shares(counts), _shares(np.asarray(reference))
    with np.errstate(divide="ignore"):
        ratio = np.divide(share, whole, out=np.ones_like(share), where=share > 0)
    return np.asarray(np.maximum(np.sum(share * np.log(ratio), axis=-1), 0.0))


def dominant(counts: Counts) -> tuple[Counts, Floats]:
    """Return the most frequent class of each client (the first of equals) and its share."""
    return counts.argmax(axis=-1), counts.max(axis=-1) / counts.sum(axis=-1)


def _shares(counts: npt.NDArray[Any]) -> Floats:
    return np.asarray(counts / counts.sum(axis=-1, keepdims=True))


MEASURES = ("volume", "distinct", "entropy", "gini", "kl", "dominant_share")


def describe(
    counts: npt.ArrayLike, names: Sequence[str], *, unit: Unit = "examples",
    entropy: EntropyBase = "classes", reference: Reference = "global", sample: int | None = None,
    seed: int = 0, labels: Sequence[str] | None = None, name: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Measure clients and average over them; return a report, ready for JSON.

    It holds the arguments, ``clients`` (a record each), ``counts`` (of the sampled clients),
    ``summary`` (mean and standard deviation of :data:`MEASURES`; one client has no deviation), and
    ``total`` (the number of all clients).

    ``counts`` has the shape ``[clients, classes]``; classes without ``labels`` are named by their
    numbers. ``entropy`` is as in :func:`entropy`. The divergence is from the ``pooled`` clients
    that are described, as in the paper, or from the ``global`` distribution of all clients.
    ``sample`` random clients are measured, by default all. ``name`` is the dataset, for titles.
    """
    table = np.asarray(counts)
    given = {"unit": (unit, Unit), "entropy": (entropy, EntropyBase)}
    for what, (value, known) in {**given, "reference": (reference, Reference)}.items():
        check_names(what, [value], get_args(known))
    if table.ndim != 2 or 0 in table.shape or table.dtype.kind not in "iu" or table.min() < 0:
        problem = f"counts are {table.dtype} of shape {table.shape}"
        raise InputError(f"{problem}: expected whole numbers from 0, clients by classes")
    classes = tuple(map(str, range(table.shape[1]))) if labels is None else tuple(labels)
    if (len(names), len(classes)) != table.shape:
        problem = f"{len(names)} names of clients and {len(classes)} of classes"
        raise InputError(f"{problem} for counts of shape {table.shape}: give one for each")
    for client in np.flatnonzero(table.sum(axis=1) == 0).tolist():
        raise InputError(f"client {names[client]!r} holds no data: leave it out")
    chosen = np.arange(len(table))
    if sample is not None:
        if not 1 <= sample <= len(table):
            raise InputError(f"sample = {sample}: expected 1 to the {len(table)} clients")
        draw = stream(seed, "probe", "heterogeneity").choice(len(table), sample, replace=False)
        chosen = np.sort(draw)
    part = table[chosen]
    largest, share = dominant(part)
    measured: dict[str, npt.NDArray[Any]] = {
        "client": np.array(names, dtype=object)[chosen], "volume": part.sum(axis=1),
        "distinct": distinct(part), "entropy": _entropy(part, entropy), "gini": gini(part),
        "kl": kl(part, (part if reference == "pooled" else table).sum(axis=0)),
        "dominant_class": np.array(classes, dtype=object)[largest], "dominant_share": share,
    }  # fmt: skip
    values = zip(*(column.tolist() for column in measured.values()), strict=True)
    summary: dict[str, Any] = {}
    for measure in MEASURES:
        own = measured[measure]
        sd = float(own.std(ddof=1)) if len(part) > 1 else None
        summary[measure] = {"mean": float(own.mean()), "sd": sd}
    return {
        "name": name, "unit": unit, "entropy": entropy, "reference": reference,
        "total": len(table), "sample": sample, "seed": seed, "labels": list(classes),
        "summary": summary, "clients": [dict(zip(measured, row, strict=True)) for row in values],
        "counts": part.tolist(),
    }  # fmt: skip


_entropy = entropy  # describe() has an option of that name
_NUMBERS = Path(__file__).with_name("paper_heterogeneity.json")
PAPER: dict[str, dict[str, Any]] = json.loads(_NUMBERS.read_text(encoding="utf-8"))
"""Numbers of the FedZMG paper: (mean, deviation) over ten clients, and clients that it names.

``entropy`` and ``reference`` are the definitions that its numbers fit; it does not state them.
"""


class Population(NamedTuple):
    """Clients of one split."""

    names: tuple[str, ...]
    counts: Counts  # [clients, classes]; a class of text is a character
    unit: Unit
    labels: tuple[str, ...]
    columns: Columns  # rows sorted by client
    partition: Options | None  # partition of the rows; None where the files name clients
    notes: tuple[str, ...]


DEFAULT_PARTITIONS: dict[tuple[str, str], dict[str, Any]] = {  # of sets without clients
    ("digits", "train"): {"name": "dirichlet", "clients": 160, "alpha": 0.1},
    ("cifar100", "train"): {"name": "pachinko", "clients": 500},
    ("cifar100", "test"): {"name": "pachinko", "clients": 100},
}


def embedded_columns(name: str, split: str) -> Columns:
    """Return a data set that ships with the package as columns."""
    if name == "digits" and split in ("train", "test"):
        digits = embedded.load_digits()
        x, y = (getattr(digits, f"{split}_{column}") for column in "xy")
        return Columns({"x": x, "y": y})
    if name == "plays" and split == "train":
        plays = embedded.load_plays()
        text = Strings(plays.text, plays.offsets)
        return Columns({"text": text}, Owners(plays.roles, np.arange(len(plays.roles) + 1)))
    raise InputError(f"{name!r} has no split {split!r}: use --split train")


def population(columns: Columns, *, classes: int | None, partition: Options | None) -> Population:
    """Sort a split by client and count classes; ``partition`` is for files without clients."""
    record = None
    if partition is not None:
        if "y" not in columns.columns:
            raise InputError("text cannot be partitioned by label: its files name its clients")
        options = dict(partition)
        coarse = columns.array("coarse") if "coarse" in columns.columns else None
        made = make(options.pop("name"), columns.array("y"), coarse=coarse, **options)
        used, record = np.flatnonzero(made.owners >= 0), made.as_dict()
        order, owners = group(made.owners[used], [*map(str, range(int(made.owners.max()) + 1))])
        columns = columns.take(used[order], owners)
    if columns.owners is None:
        remedy = "use --partition dirichlet --clients 100 --set alpha=0.1"
        raise InputError(f"it names no clients: {remedy}")
    unit: Unit = "characters" if "text" in columns.columns else "examples"
    labels: tuple[str, ...] = (*CHARACTERS, "*")  # any character outside the vocabulary
    if unit == "characters":
        text = columns.strings("text")
        ids, offsets = encode(text.text, text.offsets[columns.owners.offsets])
    else:
        ids, offsets = columns.array("y"), columns.owners.offsets
        number = classes or int(ids.max(initial=0)) + 1
        labels = columns.classes or tuple(map(str, range(number)))
    counts = label_counts(ids, owners_of(offsets), classes=len(labels), clients=columns.clients)
    held = counts.sum(1) > 0
    empty = int((~held).sum())
    notes = (f"{empty} clients hold nothing and are left out",) if empty else ()
    names = tuple(name for name, some in zip(columns.owners.names, held, strict=True) if some)
    return Population(names, counts[held], unit, labels, columns, record, notes)
