"""Shared parts of specifications, and the specification of a run."""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self

import pydantic
import torch

from fedzmg import aggregators, algorithms, tasks
from fedzmg.algorithms.options import configure, known_options
from fedzmg.contract import Algorithm
from fedzmg.data.sampling import Sampler
from fedzmg.errors import InputError, brief, unknown
from fedzmg.experiment.specs.strict import Setting, Strict, toml
from fedzmg.federation import Federation
from fedzmg.kernels.precision import DEFAULT_PRECISION, Precision
from fedzmg.participation import Participation
from fedzmg.simulation import Device, EngineName, Trial
from fedzmg.storage.fields import Seed, Value
from fedzmg.storage.formats import by_side, flat
from fedzmg.tasks.preset import tuned
from fedzmg.tasks.protocol import LARGEST, Protocol
from fedzmg.tasks.task import Task

DTYPES = {"float32": torch.float32, "float64": torch.float64}
COUNT = LARGEST["eval_every"]  # largest interval in a file
MOST_SHARDS = 100_000


class Participants(Strict):
    """Fields of :class:`Participation`."""

    sampler: Literal["uniform", "examples", "poisson", "schedule"] = "uniform"
    """Clients of a round: a cohort of fixed size, uniform or in proportion to their examples; every
    client independently with probability cohort / population; or the lists of ``schedule``."""
    schedule: list[list[int | str]] | None = None
    """Clients of every round by number or name, repeated from the start."""
    epochs: int | float | list[int | float] | None = None
    """Local epochs in place of the protocol's: a number, or a range to draw from for every client
    and round."""
    steps: int | list[int] | None = None
    """Local steps in place of epochs: a number, or a range."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _checked(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.keys() <= cls.model_fields.keys():
            Participation(**given)
        return given


class Stages(Strict):
    """Fields of :class:`Federation`."""

    guard: bool = False
    """Reject updates whose norm is above 100 times the median of the cohort, instead of only
    flagging them; all uploads of a round are then in memory at once."""
    participation: Participants = Participants()
    """Clients of a round, and their local work."""
    aggregator: dict[str, Value] | None = None
    """Way to merge updates: a name of ``fedzmg list --aggregators``, or a table of name and
    options; by default the algorithm's, usually the weighted mean."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _whole_table(cls, given: Any) -> Any:
        """Write all options of the aggregator out; ``aggregator.byzantine`` sets one of them."""
        if not isinstance(given, Mapping):
            return given
        dotted = {k: v for k, v in given.items() if k.startswith("aggregator.")}
        found = {k: v for k, v in given.items() if k not in dotted}
        table = found.get("aggregator", {})
        table = {"name": table} if isinstance(table, str) else table
        if table is not None and not isinstance(table, Mapping):
            raise InputError(f"aggregator = {brief(table)}: expected a name or a table")
        if table or dotted:
            own = {k.removeprefix("aggregator."): v for k, v in dotted.items()}
            found["aggregator"] = aggregators.table_of(aggregators.build({**(table or {}), **own}))
        return found

    @pydantic.model_serializer(mode="wrap")
    def _written(self, written: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        # Defaults are not written: earlier versions read the file, too.
        unset = {"participation"} if self.participation == Participants() else set()
        unset |= {"aggregator"} if self.aggregator is None else set()
        return {key: value for key, value in written(self).items() if key not in unset}

    def build(self) -> Federation:
        merged = aggregators.build(self.aggregator) if self.aggregator else None
        clients = Participation(**self.participation.model_dump())
        return Federation(guard=self.guard, participation=clients, aggregator=merged)


class Experiment(Strict):
    """Shared parts of runs, grids and studies."""

    tables: ClassVar[tuple[str, ...]]
    """Tables of settings."""
    sparse: ClassVar[tuple[str, ...]] = ("federation",)
    """Keys that are written only if they are not the default: earlier versions read the file."""

    task: str
    engine: EngineName = "auto"
    device: Device = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    precision: Precision = DEFAULT_PRECISION
    """Precision of float32 layers on a GPU; weights and updates keep ``dtype``."""
    deterministic: bool = False
    """On a GPU: the same bits whenever the same runs are packed together, also after a resume."""
    preset: dict[str, Value] = {}
    """Fields of the task's preset: centring, ...; ``fedzmg list TASK`` shows them."""
    protocol: dict[str, Value] = {}
    """Fields of the task's protocol: cohort, batch_size, epochs, ..."""
    federation: Stages = Stages()
    """Optional stages of a round; none by default."""

    def to_toml(self) -> str:
        """Write a TOML document that :meth:`read` reads back."""
        return toml(self.model_dump(exclude_none=True, exclude=self._unwritten()))

    def _unwritten(self) -> set[str]:
        fields = type(self).model_fields
        return {key for key in self.sparse if getattr(self, key) == fields[key].default}

    def bases(self) -> list[str]:
        """Return the names of the algorithms that train."""
        raise NotImplementedError

    def build_task(self) -> Task:
        return tasks.info(self.task).with_options(self.preset).build()

    def check_participation(self, task: Task) -> None:
        """Refuse clients that do not fit the data, and too few for the aggregator."""
        protocol = task.protocol.with_options(self.protocol)
        stages, cohort = self.federation.build(), protocol.cohort
        Sampler(stages.participation, task.train, cohort, replacement=protocol.replacement)
        if stages.aggregator is not None:
            stages.aggregator.check_cohort(cohort)

    def with_settings(self, settings: Mapping[str, Setting]) -> Self:
        """Copy with ``key=value`` settings; keys as in the TOML file, ``client.lr`` in tables."""
        values = self.model_dump(exclude_none=True)
        # New algorithms come first: the other settings are for them.
        for key, value in sorted(settings.items(), key=lambda item: item[0] != "algorithms"):
            if not (paths := self._paths(values, key)):
                # A task that was made in Python is not listed.
                listed = [f"fedzmg list {self.task}"] * (self.task in tasks.TASKS)
                commands = [self.listing, *listed, "fedzmg list ALGORITHM"]
                raise unknown("key", key, self._known_keys(), *commands)
            for *names, last in paths:
                table = values
                for name in names:
                    table = table.setdefault(name, {})
                    if not isinstance(table, dict):
                        raise InputError(f"{name} = {table!r}: expected a table, to set {key} in")
                table[last] = value
        return type(self).parse(values)

    def _paths(self, values: dict[str, Any], key: str) -> list[tuple[str, ...]]:
        """Return the places that a key sets, each as names of tables; none if it is unknown."""
        table, _, name = key.partition(".")
        is_known = table in (self.tables if name else type(self).model_fields)
        deep = table == "federation" and not name.startswith("aggregator.")
        nested = tuple(key.split(".")) if deep else (table, name)
        return [nested if name else (key,)] if is_known else []

    def _known_keys(self) -> list[str]:
        entry = tasks.TASKS.get(self.task)
        keys = [key for key in type(self).model_fields if key not in self.tables]
        keys += [] if entry is None else [f"preset.{name}" for name in entry.options()]
        keys += [f"protocol.{name}" for name in Protocol.__dataclass_fields__]
        tables = [name for name in ("federation", "stop", "search") if name in self.tables]
        keys += [f"{table}.{name}" for table in tables for name in self.keys_of([table])]
        nested = ("federation", "participation")
        keys += [".".join([*nested, name]) for name in self.keys_of(nested)]
        bases = [algorithms.get(name) for name in self.bases() if name in algorithms.ALGORITHMS]
        return keys + [key for base in bases for key in known_options(base)]


SIDES = ("client", "server", "parts")  # tables of an algorithm's options


class RunSpec(Experiment):
    """One run: a task, an algorithm with its hyper-parameters, a seed and its execution."""

    listing: ClassVar[str] = "fedzmg schema run"
    tables: ClassVar[tuple[str, ...]] = ("preset", "protocol", "federation", *SIDES)
    sparse: ClassVar[tuple[str, ...]] = ("federation", "shards")

    algorithm: str = "fedzmg"
    seed: Seed = 0
    client_metrics_every: int = pydantic.Field(default=0, ge=0, le=COUNT)
    """Interval of evaluations on each client's own examples: after rounds 1, 1 + N, ... and the
    last; 0: only after the last. It does not affect training."""
    shards: int = pydantic.Field(default=0, ge=0, le=MOST_SHARDS)
    """Parts of the population, by client number, whose sums are added in this order; they may train
    in other processes (``--on``). 0: one sum over the whole cohort."""
    weights: Literal["examples", "uniform"] | None = None
    client: dict[str, Value] = {}
    """Fields of the client rule: lr, momentum, decay, ...; clip_norm, clip_value, schedule, ..."""
    server: dict[str, Value] = {}
    """Fields of the server rule: lr, ...; schedule, ..."""
    parts: dict[str, Value] = {}
    """Layers that are personal or frozen, for algorithms that have such parts."""

    def bases(self) -> list[str]:
        return [self.algorithm]

    def for_algorithm(self, name: str) -> "tuple[RunSpec, list[str]]":
        """Copy for another algorithm; return it with the keys that are left out."""
        # Learning rates and other options belong to the algorithm they were chosen for.
        algorithms.get(name)
        if name == self.algorithm:
            return self, []
        left_out = list(flat(self.model_dump(include=set(SIDES))))
        left_out += ["weights"] * (self.weights is not None)
        blank: dict[str, Any] = {"client": {}, "server": {}, "parts": {}, "weights": None}
        return self.model_copy(update={**blank, "algorithm": name}), left_out

    def build_algorithm(self, task: Task | None = None) -> Algorithm:
        """Build the algorithm with the task's recommended hyper-parameters, then the user's."""
        known = tuned(self.task) if task is None else task.options
        options: dict[str, Any] = dict(known.get(self.algorithm, {}))
        options |= flat(self.model_dump(include=set(SIDES)))
        if self.weights is not None:
            options["weights"] = self.weights
        return configure(algorithms.get(self.algorithm), options)

    def build_protocol(self, task: Task) -> Protocol:
        return task.protocol.with_options(self.protocol)

    def resolve(self, task: Task, name: str = "") -> "ResolvedRun":
        """Write every default out and build the trial; packs of several algorithms need a name."""
        algorithm = self.build_algorithm(task)
        changes = {
            **by_side(algorithm.options()), "weights": algorithm.weights,
            "preset": dict(task.preset), "protocol": dict(vars(self.build_protocol(task))),
        }  # fmt: skip
        return ResolvedRun(self.model_copy(update=changes), Trial(algorithm, self.seed, name))


class ResolvedRun(NamedTuple):
    """A run with every default written out, and its trial."""

    spec: RunSpec
    trial: Trial

    def resolve(self, _: Task) -> "ResolvedRun":
        return self
