"""Tasks: data, model, loss, metric and training protocol."""

import contextlib
import functools
import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedzmg.data.columns import Columns
from fedzmg.data.federated import Examples, FederatedData, examples
from fedzmg.errors import InputError, UserCodeError, check_text, unknown
from fedzmg.evaluation import ACCURACY, CHUNK, LARGEST_OUTPUTS, Metric, check_values
from fedzmg.metrics import loss_and_metric
from fedzmg.models.batch_norm import BatchNormPolicy, norms_of
from fedzmg.models.behaviour import couples, opened
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.initial import Initializer, check_scheme, given_values
from fedzmg.models.objective import LossFunction, Objective, PrepareFunction, cross_entropy
from fedzmg.parts import Parts
from fedzmg.tasks import inputs
from fedzmg.tasks.protocol import Protocol
from fedzmg.tree import Inputs, Tree, leaves, num_bytes, row, tree_map

RULE_WORDS = "lr", "learning_rate", "momentum", "decay", "weight_decay"
FULL_BATCH = 10**5  # batch size that needs no comparison with the number of examples


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
    prepare: PrepareFunction = inputs.as_stored
    init: Initializer = "torch"
    protocol: Protocol = field(default_factory=Protocol)
    tune: Examples | None = None
    """Examples for choosing hyper-parameters; results are reported on ``test``."""
    options: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    preset: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Options of the preset; of a user's own task, ``batch_norm`` if the model has such layers."""
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
        if norms_of(self.model.source):
            object.__setattr__(self, "preset", {**self.preset, "batch_norm": self.model.batch_norm})
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
        clients, protocol = len(self.train), self.protocol
        if protocol.cohort > clients and not protocol.replacement:
            problem = f"cohort = {protocol.cohort} but there are {clients} clients"
            raise InputError(f"{problem}: choose a smaller cohort or replacement=True")
        owners = self.test_owners
        if owners is not None and (owners.shape != (self.test.size,) or owners.max() >= clients):
            given = f"{len(owners)} owners of {self.test.size} test examples, of {clients} clients"
            raise InputError(f"{given}: give each example the number of one client")
        if protocol.batch_size > max(FULL_BATCH, self.train.examples.size * protocol.epochs):
            # Batches are padded to this size.
            there = f"but there are {self.train.examples.size:,} training examples"
            raise InputError(f"batch_size = {protocol.batch_size} {there}: choose a smaller one")
        most = int(self.train.counts.max()) * (protocol.epochs if protocol.straddle else 1)
        if not protocol.keep_partial and most < protocol.batch_size:
            smaller = f"keep_partial = False drops batches of less than {protocol.batch_size}"
            raise InputError(f"{smaller}, and no client has more than {most} examples: none trains")
        self.metric.check_level("threshold", protocol.threshold)
        used = self.train.examples, self.test, self.tune, self.loss, self.prepare, self.metric
        if [*map(id, used)] != [*map(id, self.model.tried)]:
            self._try_model()
            self.model.tried = used
        self.parts.split(self.model.layout)

    def _try_model(self) -> None:
        parts = {"training": self.train.examples, "test": self.test, "tuning": self.tune}
        for what, data in parts.items():
            if data is None:
                continue
            with _named(f"the model cannot read {what} data of {inputs.describe_inputs(data.x)}"):
                params, x, y = self.prepared(data)
                places = np.linspace(0, data.size - 1, min(data.size, 8)).astype(int)
                _, several, wanted = self.prepared(data, places)
                trains = what == "training"  # one try of the model suffices
                more = (several,) if trains else ()
                outputs = (self.model.try_out if trains else self.model.evaluate)(params, x, *more)
            inputs.check_labels(data, outputs, self.loss, f"{what} data")
            inputs.warn_of_loss(self.model.module, outputs, self.loss)
            with _named("the loss fails on the model's outputs"):
                check_values("loss", self.loss(outputs, y), len(y))
            varied = functools.partial(self.model.evaluate, opened(params), several)
            if trains and couples(self.loss, varied, wanted):
                self.model.loop_reason = "the loss of an example depends on others of its batch"
            with _named(f"the metric {self.metric.name} fails on the model's outputs"):
                self.metric.check_values(self.metric.function(outputs, y), len(y))

    def prepared(self, data: Examples, which: Any = slice(2)) -> tuple[Tree, Inputs, Tensor]:
        """Return the model's parameters, and a few examples in their precision."""
        params = self.model.params()
        dtype = next(iter(params.values())).dtype
        # A copy: a prepare function may modify its input.
        x, y = tree_map(torch.clone, row(data, which)).to(data.y.device, dtype)
        return params, self.prepare(x, dtype), y

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
        given: Sequence[Any] = given_values(self.model, self.init)
        for column in (*leaves(self.test), *given, *self.model.frozen()):
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

    @functools.cached_property
    def examples_at_once(self) -> int:
        """Examples that are evaluated at once: fewer if their outputs are large."""
        params, x, y = self.prepared(self.test)
        with torch.no_grad():
            size = num_bytes(self.model.evaluate(params, x)) // len(y)
        return max(1, min(CHUNK, LARGEST_OUTPUTS // max(1, size)))

    @property
    def objective(self) -> Objective:
        """Objective of a client."""
        return Objective(self.model, self.loss)

    @classmethod
    def from_arrays(
        cls, model: nn.Module, x: Any, y: Any, clients: Any, *, test: tuple[Any, Any],
        test_clients: Any = None, tune: tuple[Any, Any] | None = None, name: str = "custom",
        loss: LossFunction | str = cross_entropy, metric: Metric | str | None = None,
        prepare: PrepareFunction | None = None, init: Initializer = "torch",
        axes: Mapping[str, tuple[int, ...]] | None = None,
        client_names: Sequence[Any] | None = None, parts: Parts | None = None,
        batch_norm: BatchNormPolicy = "average", notes: tuple[str, ...] = (), **protocol: Any,
    ) -> "Task":  # fmt: skip
        """Build a task from a module and arrays.

        Args:
            model: any ``nn.Module`` that a plain loop can train; it is copied.
            x: training inputs, one per example: an array, a table (pandas), a list, or a dict or
                tuple of them, which the model gets as keywords or positional arguments.
            y: training targets, one per example.
            clients: the client id of every training example.
            test: inputs and targets for evaluation.
            test_clients: the client id of every test example; clients are then evaluated on their
                own test examples. Ids without training examples belong to no client.
            tune: other inputs and targets, for :func:`fedzmg.tune`; nothing is reported on them.
            name: name in run directories and tables.
            loss: a name of ``fedzmg.models.objective.LOSSES``, a loss of torch, or
                ``(outputs, targets) -> one loss per example``.
            metric: metric of reports, or a name of ``fedzmg.metrics.METRICS``; by default the
                loss's usual one.
            prepare: ``(stored inputs, dtype) -> model inputs``. By default whole numbers that
                the model cannot read become floats, bytes above 1 divided by 255.
            init: ``"torch"``, ``"keras"``, ``"given"`` (a pretrained start) or a function.
            axes: input axes by parameter name or pattern, in place of the layer's own.
            client_names: ids of all clients with examples, in the order wanted.
            parts: personal and frozen parts of the model, ``Parts(personal=("last:1",))``.
            batch_norm: statistics of BatchNorm layers: ``"average"`` (they travel and are
                averaged), ``"local"`` (the layers stay with the client), ``"frozen"`` (constants)
                or ``"batch"`` (of the batch, in evaluation, too).
            notes: notes on the data, for reports.
            **protocol: fields of :class:`Protocol`, such as ``cohort=5``.
        """
        for name in protocol.keys() - Protocol.__dataclass_fields__.keys():
            known = [*inspect.signature(cls.from_arrays).parameters][:-1]
            if name.removeprefix("client_") in RULE_WORDS:
                problem = f"{name} belongs to an algorithm, not to a task"
                raise InputError(f"{problem}: Trial.of('fedavg', client_lr=0.1)")
            raise unknown("argument", name, [*known, *Protocol.__dataclass_fields__])
        tuning = (
            None if tune is None else examples(*inputs.as_pair(tune, "tune"), what="tuning data")
        )
        train = FederatedData.from_arrays(x, y, clients, client_names)
        owners = inputs.find_owners(test_clients, train.names)
        x = train.examples.x
        if isinstance(model, nn.Module) and any(map(is_lazy, model.parameters())):
            with _named(f"the model cannot read training data of {inputs.describe_inputs(x)}"):
                model, prepare = inputs.with_shapes(model, x, prepare)
        made = FunctionalModel(model, axes, batch_norm)
        if prepare is None:
            params = made.params()
            read = functools.partial(made.evaluate, params)
            prepare = inputs.default_prepare(read, x, next(iter(params.values())).dtype)
        loss, metric = loss_and_metric(loss, metric, train.examples.y)
        made_task = cls(
            name, made, replace(train, examples=inputs.whole_labels(train.examples, loss)),
            inputs.whole_labels(examples(*inputs.as_pair(test, "test"), what="test data"), loss),
            loss, metric, prepare, init,
            Protocol().with_options(protocol), tuning and inputs.whole_labels(tuning, loss),
            test_owners=owners, notes=notes, parts=parts or Parts(),
        )  # fmt: skip
        made_task._try_extremes()
        return made_task

    def _try_extremes(self) -> None:
        """Evaluate examples with the smallest and largest whole numbers, which may be ids."""
        # On a GPU, or mapped, an id beyond an embedding's rows ends in an obscure error, or none.
        for what, data in (("training", self.train.examples), ("test", self.test)):
            for leaf in leaves(data.x):
                pixels = self.prepare is inputs.unit_pixels
                if leaf.is_floating_point() or pixels or not leaf.numel():
                    continue
                flat, size = leaf.cpu().numpy(), leaf[0].numel()
                for example in {int(flat.argmin()) // size, int(flat.argmax()) // size}:
                    with _named(f"the model cannot read example {example} of the {what} data"):
                        self.model.evaluate(*self.prepared(data, [example] * 2)[:2])

    @classmethod
    def from_datasets(
        cls, model: nn.Module, datasets: Sequence[Any] | Mapping[str, Any], *, test: Any,
        tune: Any = None, collate: inputs.Collate | None = None, **options: Any,
    ) -> "Task":  # fmt: skip
        """Build a task from one dataset per client: torch's, Hugging Face's, or lists of examples.

        Every dataset is read once, here: random transforms are drawn once. Examples are pairs
        (input, target) or dicts with a ``label``; several other entries become keywords of the
        model.

        Args:
            model: as in :meth:`from_arrays`.
            datasets: a dataset per client, by name or in order.
            test: a dataset, or one per client in the form of ``datasets``.
            tune: as ``test``, for tuning as in :meth:`from_arrays`.
            collate: function of a list of examples that returns ``(inputs, targets)`` or a dict,
                for example to pad texts. It gets all examples of training, test or tuning at once.
            **options: other arguments of :meth:`from_arrays`.
        """
        if (clients := inputs.by_client(datasets, tuple)) is None:
            given = type(datasets).__name__
            raise InputError(f"datasets is a {given}: give a list or dict, a dataset per client")
        x, y, ids = inputs.read_datasets(clients, "dataset of client", collate)
        own = inputs.by_client(test)
        _refuse(options, "client_names", *(["test_clients"] if own else []))
        test_x, test_y, test_ids = inputs.read_datasets(own or {"": test}, "test dataset", collate)
        if own:
            options["test_clients"] = test_ids
        if tune is not None:
            parts = inputs.by_client(tune) or {"": tune}
            options["tune"] = inputs.read_datasets(parts, "tuning dataset", collate)[:2]
        options |= {"test": (test_x, test_y), "client_names": [*clients]}
        return cls.from_arrays(model, x, y, ids, **options)

    @classmethod
    def from_columns(
        cls, model: nn.Module, train: Columns, *, test: Columns, tune: Columns | None = None,
        prepare: PrepareFunction | None = None, **options: Any,
    ) -> "Task":  # fmt: skip
        """Build a task from a module and columns read by ``fedzmg.data.formats``.

        ``train``, ``test`` and ``tune`` hold columns ``x`` and ``y`` with the same ``classes``;
        ``train`` also names the clients. Test rows of a training client count as its own. By
        default ``prepare`` divides bytes by 255 and keeps everything else as stored. ``options``
        and other arguments are those of :meth:`from_arrays`.
        """
        given = {"training data": train, "test data": test}
        if tune is not None:
            given["tuning data"] = tune
        held = {what: inputs.column_arrays(columns, what) for what, columns in given.items()}
        if train.owners is None:
            remedy = "make ids with fedzmg.data.partition and use Task.from_arrays"
            own = "the training data names no clients: name their column when you read it"
            raise InputError(f"{own}, or {remedy}")
        for what, columns in given.items():
            if columns.classes != train.classes:
                there, here = (", ".join(c.classes[:8]) or "none" for c in (columns, train))
                problem = f"the {what} has the classes {there}, the training data {here}"
                raise InputError(f"{problem}: read the {what} with classes=TRAIN.classes")
        _refuse(options, "test_clients", "client_names", "notes")
        x, y = held["training data"]
        return cls.from_arrays(
            model, x, y, train.owners, test=held["test data"], tune=held.get("tuning data"),
            prepare=prepare or (inputs.unit_pixels if x.dtype == np.uint8 else None),
            test_clients=test.owners, client_names=None,
            notes=tuple(dict.fromkeys(n for columns in given.values() for n in columns.notes)),
            **options,
        )  # fmt: skip


def _refuse(options: Mapping[str, Any], *names: str) -> None:
    """Refuse options that the data itself gives."""
    if given := next((name for name in names if name in options), ""):
        raise InputError(f"{given} is given by the data: leave it out, or use Task.from_arrays")


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
        if "channels" in reason:
            reason += "; convolutions have channels first: x.transpose(0, 3, 1, 2), grey x[:, None]"
        raise UserCodeError(f"{failure}: {reason}") from error


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)
