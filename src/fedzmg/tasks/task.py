"""Tasks: data, model, loss, metric and training protocol."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedzmg.data.columns import Columns, Owners
from fedzmg.data.federated import Examples, FederatedData, examples, number_clients
from fedzmg.errors import InputError, check_text
from fedzmg.evaluation import ACCURACY, Metric
from fedzmg.models.batch_norm import BatchNormPolicy
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.initial import Initializer, check_scheme
from fedzmg.models.objective import (
    LossFunction,
    Objective,
    PrepareFunction,
    cross_entropy,
    masked_cross_entropy,
)
from fedzmg.parts import Parts
from fedzmg.tasks.protocol import Protocol
from fedzmg.tree import num_bytes


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert inputs to the model's precision; token ids stay integers."""
    return x.to(dtype) if x.is_floating_point() else x


def unit_pixels(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert bytes to the unit interval."""
    return x.to(dtype) / 255


FULL_BATCH = 10**5
"""Batch size that needs no comparison with the number of examples."""


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
    parts: Parts = Parts()
    """Personal and frozen parts of the model, besides those of the algorithm."""

    def __post_init__(self) -> None:
        if self.model.batch_norm == "local" and "batch_norm" not in self.parts.personal:
            object.__setattr__(self, "parts", self.parts | Parts(personal=("batch_norm",)))
        self.check()

    def check(self) -> None:
        """Reject parts that do not fit together."""
        for what, good, expected in (
            ("name", isinstance(self.name, str) and self.name, "text"),
            ("metric", isinstance(self.metric, Metric), "fedzmg.Metric(NAME, FUNCTION)"),
            ("loss", _is_function(self.loss), "a function (outputs, targets) -> losses"),
            ("prepare", _is_function(self.prepare), "a function (inputs, dtype) -> inputs"),
        ):
            if not good:
                given = " ".join(repr(getattr(self, what)).split())
                raise InputError(f"{what}: expected {expected}, not {given:.80}")
        check_text("name", self.name)
        check_text("metric.name", self.metric.name)
        check_scheme(self.init)
        self.parts.split(self.model.layout)
        clients, protocol = len(self.train), self.protocol
        if protocol.cohort > clients and not protocol.replacement:
            raise InputError(
                f"cohort = {protocol.cohort} but there are {clients} clients: choose a smaller "
                "cohort or replacement=True"
            )
        owners = self.test_owners
        if owners is not None and (owners.shape != (self.test.size,) or owners.max() >= clients):
            raise InputError(
                f"{len(owners)} owners of {self.test.size} test examples, of {clients} clients: "
                "give each example the number of one client"
            )
        everything = self.train.examples.size * protocol.epochs
        if protocol.batch_size > max(FULL_BATCH, everything):
            # Batches are padded to this size.
            there = f"there are {self.train.examples.size:,} training examples"
            raise InputError(
                f"batch_size = {protocol.batch_size} but {there}: choose a smaller one"
            )
        self.metric.check_level("threshold", protocol.threshold)
        params = self.model.params()
        dtype = next(iter(params.values())).dtype
        parts = {"training": self.train.examples, "test": self.test, "tuning": self.tune}
        for what, data in parts.items():
            if data is None:
                continue
            # A copy: a prepare function may modify its input.
            x, y = Examples(data.x[:2].clone(), data.y[:2]).to(data.x.device, dtype)
            shape, kind = tuple(x.shape)[1:], str(x.dtype).removeprefix("torch.")
            with _named(f"the model cannot read {what} data of shape {shape} and type {kind}"):
                # Independence of examples is a matter of the model: one try of it suffices.
                call = self.model.try_out if what == "training" else self.model.evaluate
                with torch.no_grad():
                    outputs = call(params, self.prepare(x, dtype))
            if self.loss in (cross_entropy, masked_cross_entropy):
                padded = self.loss is masked_cross_entropy
                _check_labels(data.y.clamp(min=0) if padded else data.y, outputs, f"{what} data")
            for name, function in (
                ("loss", self.loss),
                (f"metric {self.metric.name}", self.metric.function),
            ):
                with _named(f"the {name} fails on the model's outputs"):
                    values: Any = function(outputs, y)
                if not isinstance(values, Tensor) or values.shape != (len(y),):
                    got = tuple(values.shape) if isinstance(values, Tensor) else type(values)
                    raise InputError(
                        f"the {name} gave {got} for {len(y)} examples: return one value per "
                        "example (for a torch loss: reduction='none')"
                    )

    def __repr__(self) -> str:
        model, protocol = self.model, self.protocol
        weights = sum(p.numel() for n, p in model.params().items() if n not in model.statistics)
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
        names += [repr(self.parts)] if self.parts else []
        names += [self.model.batch_norm] if self.model.batch_norm != "average" else []
        # Memory addresses in a repr differ between processes.
        digest.update(re.sub(r" at 0x[0-9a-fA-F]+", "", "\x1f".join(names)).encode())
        return digest.hexdigest()

    @property
    def model_bytes(self) -> int:
        """Size of the trainable model in bytes, running statistics included."""
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
        test_clients: Any = None,
        tune: tuple[Any, Any] | None = None,
        name: str = "custom",
        loss: LossFunction = cross_entropy,
        metric: Metric = ACCURACY,
        prepare: PrepareFunction = as_stored,
        init: Initializer = "torch",
        axes: Mapping[str, tuple[int, ...]] | None = None,
        client_names: Sequence[Any] | None = None,
        parts: Parts | None = None,
        batch_norm: BatchNormPolicy = "average",
        **protocol: Any,
    ) -> Task:
        """Build a task from a module and arrays.

        Args:
            model: any ``nn.Module``; it is copied.
            x: training inputs, one per example.
            y: training targets, one per example.
            clients: the client id of every training example.
            test: inputs and targets for evaluation.
            test_clients: the client id of every test example; clients are then evaluated on their
                own test examples. Ids without training examples belong to no client.
            tune: other inputs and targets, for :func:`fedzmg.tune`; nothing is reported on them.
            name: name in run directories and tables.
            loss: ``(outputs, targets) -> one loss per example``.
            metric: metric of reports.
            prepare: ``(stored inputs, dtype) -> model inputs``, e.g. bytes to floats.
            init: ``"torch"``, ``"keras"``, ``"given"`` (a pretrained start) or a function.
            axes: input axes of parameters of your own modules, by name.
            client_names: all client ids, if order or completeness matters.
            parts: personal and frozen parts of the model, ``Parts(personal=("last:1",))``.
            batch_norm: statistics of BatchNorm layers: ``"average"`` (they travel and are
                averaged), ``"local"`` (the layers stay with the client), ``"frozen"`` (constants)
                or ``"batch"`` (of the batch, in evaluation, too).
            **protocol: fields of :class:`Protocol`, such as ``cohort=5``.

        Raises:
            InputError: for parts that do not fit together; the message names the remedy.
        """
        tuning = None if tune is None else examples(*_pair(tune, "tune"), what="tuning data")
        train = FederatedData.from_arrays(x, y, clients, client_names)
        owners = None if test_clients is None else _test_owners(test_clients, train.names)
        return cls(
            name, FunctionalModel(model, axes, batch_norm), train,
            examples(*_pair(test, "test"), what="test data"),
            loss, metric, prepare, init, Protocol().with_options(protocol), tuning,
            test_owners=owners, parts=parts or Parts(),
        )  # fmt: skip

    @classmethod
    def from_columns(
        cls,
        model: nn.Module,
        train: Columns,
        *,
        test: Columns,
        tune: Columns | None = None,
        prepare: PrepareFunction | None = None,
        axes: Mapping[str, tuple[int, ...]] | None = None,
        batch_norm: BatchNormPolicy = "average",
        **options: Any,
    ) -> Task:
        """Build a task from a module and columns read by ``fedzmg.data.formats``.

        ``train``, ``test`` and ``tune`` hold columns ``x`` and ``y`` with the same ``classes``;
        ``train`` also names the clients. Test rows of a training client count as its own. By
        default ``prepare`` divides bytes by 255 and keeps everything else as stored. ``options``
        and other arguments are those of :meth:`from_arrays`.
        """
        given = {"training data": train, "test data": test}
        if tune is not None:
            given["tuning data"] = tune
        held = {what: _examples(columns, what) for what, columns in given.items()}
        if train.owners is None:
            raise InputError(
                "the training data names no clients: name their column when you read it, or make "
                "ids with fedzmg.data.partition and use Task.from_arrays"
            )
        for what, columns in given.items():
            if columns.classes != train.classes:
                there, here = (", ".join(c.classes[:8]) or "none" for c in (columns, train))
                raise InputError(
                    f"the {what} has the classes {there}, the training data {here}: read the "
                    f"{what} with classes=TRAIN.classes"
                )
        owners = None if test.owners is None else match_clients(train.owners.names, test.owners)
        bytes_ = held["training data"].x.dtype == torch.uint8
        parts = {
            key: options.pop(key) for key in ("loss", "metric", "init", "parts") if key in options
        }
        return cls(
            name=options.pop("name", "custom"),
            model=FunctionalModel(model, axes, batch_norm),
            train=FederatedData(held["training data"], train.owners.offsets, train.owners.names),
            test=held["test data"],
            tune=held.get("tuning data"),
            prepare=prepare or (unit_pixels if bytes_ else as_stored),
            protocol=Protocol().with_options(options),
            test_owners=owners if owners is not None and (owners >= 0).any() else None,
            notes=tuple(dict.fromkeys(n for columns in given.values() for n in columns.notes)),
            **parts,
        )


def match_clients(train: Sequence[str], test: Owners) -> npt.NDArray[np.int64]:
    """Return each test example's client: a position in ``train``, or -1."""
    position = {name: i for i, name in enumerate(train)}
    matched = np.array([position.get(name, -1) for name in test.names], np.int64)
    return np.repeat(matched, np.diff(test.offsets))


def _test_owners(clients: Any, train: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the position in ``train`` of each test example's client, or -1."""
    try:
        present, owner = number_clients(clients)
    except InputError as error:
        raise InputError(f"test_clients: {error}") from None
    position = {name: i for i, name in enumerate(train)}
    matched = np.array([position.get(str(name), -1) for name in present], np.int64)
    if (matched < 0).all():
        raise InputError(
            f"test_clients: {str(present[0])!r} and all others are no training clients, which are "
            f"called {train[0]!r}, ...: give ids of the same kind"
        )
    return matched[owner]


@contextlib.contextmanager
def _named(failure: str) -> Iterator[None]:
    """Reject a user's own module or function that raises anything."""
    try:
        with torch.no_grad():
            yield
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__} {next(iter(str(error).splitlines()), '')}".rstrip()
        raise InputError(f"{failure}: {reason}") from error


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def _check_labels(y: Tensor, logits: Any, what: str) -> None:
    """Reject labels that the outputs cannot predict."""
    if not isinstance(logits, Tensor):
        given = type(logits).__name__
        raise InputError(f"the model gives a {given} for {what}: return one tensor")
    shape = tuple(logits.shape)
    if y.is_floating_point() or y.ndim != len(shape) - 1:
        raise InputError(
            f"{what} has {y.dtype} labels of shape {tuple(y.shape)}, and the model gives a "
            f"tensor of shape {shape}: give one whole number per prediction, or pass your own "
            "loss and metric"
        )
    outputs = shape[-1]
    for label in (int(y.min()), int(y.max())):
        if not 0 <= label < outputs:
            raise InputError(
                f"{what} holds the label {label} but the model has {outputs} outputs "
                f"(labels 0 to {outputs - 1}): change the labels or the last layer"
            )


def _pair(given: Any, name: str) -> Sequence[Any]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(f"{name} is a {type(given).__name__}: pass {name}=(inputs, targets)")
    return given


def _examples(columns: Columns, what: str) -> Examples:
    """Extract inputs and targets."""
    held = columns.columns if isinstance(columns, Columns) else {}
    if not all(isinstance(held.get(name), np.ndarray) for name in "xy"):
        raise InputError(
            f"the {what} is a {type(columns).__name__} of {', '.join(held) or 'no columns'}: "
            "expected columns x and y of numbers; read them with fedzmg.data.formats, or turn text "
            "into numbers and use Task.from_arrays"
        )
    return examples(columns.array("x"), columns.array("y"), what=what)
