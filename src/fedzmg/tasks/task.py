"""Tasks: data, model, loss, metric and training protocol."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedzmg.data.columns import Columns, Owners, Strings
from fedzmg.data.federated import Examples, FederatedData, examples
from fedzmg.data.plan import Batching
from fedzmg.errors import InputError, unknown
from fedzmg.evaluation import ACCURACY, Metric
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.initial import Initializer
from fedzmg.models.objective import LossFunction, Objective, PrepareFunction, cross_entropy
from fedzmg.tasks.fit import check
from fedzmg.tasks.source import test_owners
from fedzmg.tree import num_bytes


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert inputs to the model's precision; token ids stay integers."""
    return x.to(dtype) if x.is_floating_point() else x


def unit_pixels(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert bytes to the unit interval."""
    return x.to(dtype) / 255


@dataclass(frozen=True)
class Protocol:
    """Training protocol of a federation."""

    rounds: int = 100
    cohort: int = 10
    replacement: bool = False
    """True if a client can be drawn twice in one round."""
    batch_size: int = 20
    epochs: int = 1
    straddle: bool = False
    keep_partial: bool = True
    eval_every: int = 1
    threshold: float = 0.9

    def __post_init__(self) -> None:
        for name in ("rounds", "cohort", "batch_size", "epochs", "eval_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} = {value!r}: expected a whole number of at least 1")
        for name in ("replacement", "straddle", "keep_partial"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} = {getattr(self, name)!r}: expected true or false")
        number = isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool)
        if not number or not math.isfinite(self.threshold):
            raise InputError(f"threshold = {self.threshold!r}: expected a finite number")

    @property
    def batching(self) -> Batching:
        """Settings of a client's local steps."""
        return Batching(self.batch_size, self.epochs, self.straddle, self.keep_partial)

    def with_options(self, options: Mapping[str, Any]) -> Protocol:
        """Copy with some fields changed; the nearest name is suggested for an unknown one."""
        known = [f.name for f in fields(self)]
        for name in options:
            if name not in known:
                raise unknown("protocol field", name, known)
        return replace(self, **options)


@dataclass(frozen=True)
class Task:
    """Data, model, loss and metric that belong together.

    Presets are in ``fedzmg.tasks``; :meth:`from_arrays` and :meth:`from_columns` make one from a
    user's own parts.
    """

    name: str
    model: FunctionalModel
    train: FederatedData
    test: Examples
    loss: LossFunction = cross_entropy
    metric: Metric = ACCURACY
    prepare: PrepareFunction = as_stored
    init: Initializer = "torch"
    protocol: Protocol = field(default_factory=Protocol)
    tune: Examples | None = None
    """Examples for choosing hyper-parameters; results are reported on ``test``."""
    options: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Tuned hyper-parameters, by algorithm name."""
    preset: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Options of the preset; empty for a user's own task."""
    test_owners: npt.NDArray[np.int64] | None = None
    """Position in ``train`` of each test example's client, negative for none of them; None if no
    test example belongs to a training client."""
    notes: tuple[str, ...] = ()
    """Notes on the data, such as counts that differ from the official."""

    def __post_init__(self) -> None:
        check(self)

    def __repr__(self) -> str:
        model, protocol = self.model, self.protocol
        weights = sum(leaf.numel() for leaf in model.params().values())
        return (
            f"<Task {self.name!r}: {len(self.train):,} clients, {self.train.examples.size:,} "
            f"training and {self.test.size:,} test examples of {self.test.kind()}; "
            f"{type(model.module).__name__} with {weights:,} trainable weights; "
            f"{protocol.rounds} rounds, cohort {protocol.cohort}; {self.metric.name}>"
        )

    def fingerprint(self) -> str:
        """Return the SHA-256 of everything a run depends on; functions count by name."""
        digest = hashlib.sha256(self.train.fingerprint().encode())
        given = self.model.params().values() if self.init == "given" else ()
        for column in (*self.test, *given, *self.model.frozen()):
            digest.update(f"{column.dtype}{tuple(column.shape)}".encode())
            digest.update(column.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        names = [getattr(f, "__qualname__", repr(f)) for f in (self.loss, self.prepare, self.init)]
        names += [self.metric.name, repr(self.model.module), repr(dict(self.model.layout))]
        # Memory addresses in a repr differ between processes.
        digest.update(re.sub(r" at 0x[0-9a-fA-F]+", "", "\x1f".join(names)).encode())
        return digest.hexdigest()

    @property
    def model_bytes(self) -> int:
        """Size of the trainable model in bytes."""
        return num_bytes(self.model.params())

    @property
    def objective(self) -> Objective:
        """Objective of a client."""
        return Objective(self.model, self.loss)

    @classmethod
    def from_arrays(
        cls,
        model: nn.Module,
        x: Any,
        y: Any,
        clients: Any,
        *,
        test: tuple[Any, Any],
        tune: tuple[Any, Any] | None = None,
        name: str = "custom",
        loss: LossFunction = cross_entropy,
        metric: Metric = ACCURACY,
        prepare: PrepareFunction = as_stored,
        init: Initializer = "torch",
        axes: Mapping[str, tuple[int, ...]] | None = None,
        client_names: Sequence[Any] | None = None,
        **protocol: Any,
    ) -> Task:
        """Build a task from a module and arrays.

        Args:
            model: any ``nn.Module`` without buffers; it is copied.
            x: training inputs, one per example.
            y: training targets, one per example.
            clients: the client id of every training example.
            test: inputs and targets for evaluation.
            tune: other inputs and targets, for :func:`fedzmg.tune`; nothing is reported on them.
            name: name in run directories and tables.
            loss: ``(outputs, targets) -> one loss per example``.
            metric: metric of reports.
            prepare: ``(stored inputs, dtype) -> model inputs``, e.g. bytes to floats.
            init: ``"torch"``, ``"keras"``, ``"given"`` (a pretrained start) or a function.
            axes: input axes of parameters of your own modules, by name.
            client_names: all client ids, if order or completeness matters.
            **protocol: fields of :class:`Protocol`, such as ``cohort=5``.

        Raises:
            InputError: for parts that do not fit together; the message names the remedy.
        """
        return cls(
            name=name,
            model=FunctionalModel(model, axes),
            train=FederatedData.from_arrays(x, y, clients, client_names),
            test=examples(*_pair(test, "test"), what="test data"),
            tune=None if tune is None else examples(*_pair(tune, "tune"), what="tuning data"),
            loss=loss,
            metric=metric,
            prepare=prepare,
            init=init,
            protocol=Protocol().with_options(protocol),
        )

    @classmethod
    def from_columns(
        cls,
        model: nn.Module,
        train: Columns,
        *,
        test: Columns,
        tune: Columns | None = None,
        name: str = "custom",
        loss: LossFunction = cross_entropy,
        metric: Metric = ACCURACY,
        prepare: PrepareFunction | None = None,
        init: Initializer = "torch",
        axes: Mapping[str, tuple[int, ...]] | None = None,
        **protocol: Any,
    ) -> Task:
        """Build a task from a module and columns read by ``fedzmg.data.formats``.

        ``train``, ``test`` and ``tune`` hold columns ``x`` and ``y`` with the same ``classes``;
        ``train`` also names the clients. Test rows of a training client count as its own. By
        default ``prepare`` divides bytes by 255 and keeps everything else as stored. Other
        arguments are those of :meth:`from_arrays`.
        """
        given = [_given(train, "training data"), _given(test, "test data")]
        held = None if tune is None else _given(tune, "tuning data")
        if train.owners is None:
            raise InputError(
                "the training data names no clients: name their column when you read it, or make "
                "ids with fedzmg.data.partition and use Task.from_arrays"
            )
        for what, other in (("test data", test), ("tuning data", tune)):
            if other is not None and train.classes != other.classes:
                there, here = (", ".join(c.classes[:8]) or "none" for c in (other, train))
                raise InputError(
                    f"the {what} has the classes {there}, the training data {here}: read the "
                    f"{what} with classes=TRAIN.classes"
                )
        if prepare is None:
            prepare = unit_pixels if given[0].x.dtype == torch.uint8 else as_stored
        return cls(
            name=name,
            model=FunctionalModel(model, axes),
            train=FederatedData(given[0], train.owners.offsets, train.owners.names),
            test=given[1],
            tune=held,
            loss=loss,
            metric=metric,
            prepare=prepare,
            init=init,
            protocol=Protocol().with_options(protocol),
            test_owners=_shared(train.owners, test.owners),
            notes=tuple(dict.fromkeys(n for c in (train, test, tune) if c for n in c.notes)),
        )


def _pair(given: Any, name: str) -> Sequence[Any]:
    """Check a pair of inputs and targets."""
    if isinstance(given, tuple | list) and len(given) == 2:
        return given
    kind = "is None" if given is None else f"is a {type(given).__name__}"
    kind = f"has {len(given)} parts" if isinstance(given, tuple | list) else kind
    raise InputError(f"{name} {kind}: pass inputs and targets, {name}=(x, y)")


def _given(columns: Columns, what: str) -> Examples:
    """Extract inputs and targets."""
    if not isinstance(columns, Columns):
        raise InputError(
            f"the {what} is a {type(columns).__name__}: pass columns, such as "
            "fedzmg.data.formats.tabular.read_table(FILE), or use Task.from_arrays"
        )
    remedies = {
        "x": "read columns of numbers, or images",
        "y": "name the column of labels when you read it",
    }
    for column, remedy in remedies.items():
        if column in columns.columns and not isinstance(columns.columns[column], Strings):
            continue
        there = ", ".join(columns.columns)
        if column == "x" and "text" in columns.columns:
            remedy = "turn the text into numbers and use Task.from_arrays"
        raise InputError(f"the {what} has no column {column!r} of numbers but {there}: {remedy}")
    return examples(columns.array("x"), columns.array("y"), what=what)


def _shared(train: Owners, test: Owners | None) -> npt.NDArray[np.int64] | None:
    """Match test examples to training clients; None if there is no match."""
    if test is None:
        return None
    owners = test_owners(train.names, test.names, np.diff(test.offsets), "test")
    return owners if (owners >= 0).any() else None
