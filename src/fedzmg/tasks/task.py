"""A task: what is learnt, by whom, and how it is judged."""

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
from fedzmg.models.objective import LossFunction, Objective, PrepareFunction
from fedzmg.tasks.fit import check
from fedzmg.tasks.losses import cross_entropy
from fedzmg.tasks.source import test_owners
from fedzmg.tree import num_bytes


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Inputs of the model's precision; token ids stay integers."""
    return x.to(dtype) if x.is_floating_point() else x


def unit_pixels(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes to the unit interval."""
    return x.to(dtype) / 255


@dataclass(frozen=True)
class Protocol:
    """How a federation trains on a task."""

    rounds: int = 100
    cohort: int = 10
    replacement: bool = False
    """Whether a client can be drawn twice in one round."""
    batch_size: int = 20
    epochs: int = 1
    straddle: bool = False
    keep_partial: bool = True
    eval_every: int = 1
    threshold: float = 0.9

    def __post_init__(self) -> None:
        """Refuse values that no run can have."""
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
        """The part that shapes a client's local steps."""
        return Batching(self.batch_size, self.epochs, self.straddle, self.keep_partial)

    def with_options(self, options: Mapping[str, Any]) -> Protocol:
        """A copy with some fields changed; an unknown one is refused with the nearest name."""
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
    """Examples for choosing hyper-parameters; results are reported on ``test``, never on these."""
    options: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Hyper-parameters found for this task, by algorithm name."""
    preset: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Every field of the preset it was built from; empty for a user's own task."""
    test_owners: npt.NDArray[np.int64] | None = None
    """Position in ``train`` of the client whose each test example is, negative for nobody's; None
    where test examples belong to no training client."""
    notes: tuple[str, ...] = ()
    """What a user should know about the data, such as counts that differ from the official."""

    def __post_init__(self) -> None:
        """Run the model once, so that a misfit is said here and not in the middle of a round."""
        check(self)

    def __repr__(self) -> str:
        """What there is, without any data."""
        model, protocol = self.model, self.protocol
        weights = sum(leaf.numel() for leaf in model.params().values())
        return (
            f"<Task {self.name!r}: {len(self.train):,} clients, {self.train.examples.size:,} "
            f"training and {self.test.size:,} test examples of {self.test.kind()}; "
            f"{type(model.module).__name__} with {weights:,} trainable weights; "
            f"{protocol.rounds} rounds, cohort {protocol.cohort}; {self.metric.name}>"
        )

    def fingerprint(self) -> str:
        """SHA-256 of everything a run depends on; of functions, the names count."""
        digest = hashlib.sha256(self.train.fingerprint().encode())
        given = self.model.params().values() if self.init == "given" else ()
        for column in (*self.test, *given, *self.model.frozen()):
            digest.update(f"{column.dtype}{tuple(column.shape)}".encode())
            digest.update(column.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        names = [getattr(f, "__qualname__", repr(f)) for f in (self.loss, self.prepare, self.init)]
        names += [self.metric.name, repr(self.model.module), repr(dict(self.model.layout))]
        # Where an object lies in memory, which a repr may tell, differs from process to process.
        digest.update(re.sub(r" at 0x[0-9a-fA-F]+", "", "\x1f".join(names)).encode())
        return digest.hexdigest()

    @property
    def model_bytes(self) -> int:
        """Size of the trainable model, as it travels."""
        return num_bytes(self.model.params())

    @property
    def objective(self) -> Objective:
        """What a client minimises."""
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
        """A task from a module and arrays.

        Args:
            model: any ``nn.Module`` without buffers; it is copied.
            x: training inputs, one per example.
            y: training targets, one per example.
            clients: the client id of every training example.
            test: inputs and targets for evaluation.
            tune: other inputs and targets, by which :func:`fedzmg.tune` chooses rates; nothing is
                reported on them.
            name: how run directories and tables call it.
            loss: ``(outputs, targets) -> one loss per example``.
            metric: what is reported.
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
            test=examples(*_pair(test, "test", "models are judged"), what="test data"),
            tune=None
            if tune is None
            else examples(*_pair(tune, "tune", "rates are chosen"), what="tuning data"),
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
        """A task from a module and what a reader of ``fedzmg.data.formats`` gives.

        Args:
            model: any ``nn.Module`` without buffers; it is copied.
            train: columns ``x`` and ``y`` whose rows know their clients.
            test: columns for evaluation; where labels are names, read with the same ``classes``.
                Rows of a client that also trains count as its own.
            tune: other columns, by which :func:`fedzmg.tune` chooses rates; nothing is reported on
                them.
            name: how run directories and tables call it.
            loss: ``(outputs, targets) -> one loss per example``.
            metric: what is reported.
            prepare: ``(stored inputs, dtype) -> model inputs``; without it bytes are divided by
                255, and everything else stays as it is stored.
            init: ``"torch"``, ``"keras"``, ``"given"`` (a pretrained start) or a function.
            axes: input axes of parameters of your own modules, by name.
            **protocol: fields of :class:`Protocol`, such as ``cohort=5``.

        Raises:
            InputError: for parts that do not fit together; the message names the remedy.
        """
        given = [_given(train, "training data"), _given(test, "test data")]
        held = None if tune is None else _given(tune, "tuning data")
        if train.owners is None:
            raise InputError(
                "the training data does not say whose rows are whose: name the column of clients "
                "when you read it, or make ids by fedzmg.data.partition and use Task.from_arrays"
            )
        for what, other in (("test data", test), ("tuning data", tune)):
            if other is not None and train.classes != other.classes:
                said = [", ".join(one.classes[:8]) or "none" for one in (other, train)]
                raise InputError(
                    f"the {what} names the classes {said[0]} but the training data {said[1]}: read "
                    f"the {what} with classes=TRAIN.classes, so that ids mean the same"
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
            notes=tuple(
                dict.fromkeys(
                    note for one in (train, test, tune) if one is not None for note in one.notes
                )
            ),
        )


def _pair(given: Any, name: str, use: str) -> Sequence[Any]:
    """Inputs and targets that were given together."""
    if isinstance(given, tuple | list) and len(given) == 2:
        return given
    said = "is None" if given is None else f"is a {type(given).__name__}"
    said = f"has {len(given)} parts" if isinstance(given, tuple | list) else said
    raise InputError(f"{name} {said}: give the inputs and targets that {use} by, {name}=(x, y)")


def _given(columns: Columns, what: str) -> Examples:
    """Inputs and targets of a file."""
    if not isinstance(columns, Columns):
        raise InputError(
            f"the {what} is a {type(columns).__name__}: give columns, such as "
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
    """Whose each test example is, if any is of a client that trains."""
    if test is None:
        return None
    owners = test_owners(train.names, test.names, np.diff(test.offsets), "test")
    return owners if (owners >= 0).any() else None
