"""What a user writes for many runs: a grid that chooses learning rates, a study that compares.

Both are TOML files, or built in Python. Everything but the data is checked without the data.
"""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)
from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias

import pydantic

from fedzmg import algorithms, tasks
from fedzmg.algorithms.options import configure, known_options
from fedzmg.contract import Algorithm
from fedzmg.errors import InputError, unknown
from fedzmg.experiment.spec import RunSpec
from fedzmg.experiment.stopping import GridStop, StudyStop
from fedzmg.experiment.strict import Setting, Strict, Value, read_toml, toml
from fedzmg.models.kernels.precision import Precision
from fedzmg.tasks.task import Protocol, Task
from fedzmg.tasks.tuned import tuned

PAPER_RATES = [10.0 ** (-3 + i / 2) for i in range(9)]
"""The paper's learning rates, for clients and servers: half decades from 1e-3 to 10."""

Axes: TypeAlias = dict[str, list[float]]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:+-]*")


def _flat(axes: Any) -> Any:
    """``{"client": {"lr": [...]}}``, as TOML reads ``client.lr = [...]``, with dotted keys."""
    if not isinstance(axes, Mapping):
        return axes
    found: dict[str, Any] = {}
    for key, values in axes.items():
        nested = values.items() if isinstance(values, Mapping) else ()
        found |= {f"{key}.{name}": v for name, v in nested} or {key: values}
    return {key: PAPER_RATES if v == "paper" else v for key, v in found.items()}


def _check_axes(axes: Axes) -> Axes:
    for key, values in axes.items():
        if not values or len(set(values)) != len(values) or not all(map(math.isfinite, values)):
            raise InputError(f"{key} = {values!r}: give at least one finite number, each once")
    return {key: sorted(values) for key, values in axes.items()}


class Variant(Strict):
    """An algorithm with options of its own."""

    algorithm: str | None = None
    """A name of ``fedzmg list``; by default the name of the table."""
    label: str | None = None
    """What tables and figures call it; by default the name of the table."""
    weights: Literal["examples", "uniform"] | None = None
    client: dict[str, Value] = {}
    """Fixed fields of the client rule: momentum, decay, project, ..."""
    server: dict[str, Value] = {}
    """Fixed fields of the server rule."""
    axes: Axes | None = None
    """Instead of the grid's own axes."""

    _flat = pydantic.field_validator("axes", mode="before")(_flat)

    @pydantic.field_validator("axes")
    @classmethod
    def _checked(cls, axes: Axes | None) -> Axes | None:
        return None if axes is None else _check_axes(axes)


class Plan(Strict):
    """What grids and studies share."""

    tables: ClassVar[tuple[str, ...]] = ("preset", "protocol", "stop")

    task: str
    label: str = ""
    """A remark that is shown with every result, such as "reduced protocol"."""
    seeds: list[int]
    rounds: int
    engine: Literal["auto", "sequential", "vectorized", "captured", "compiled"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    precision: Precision = "float32"
    """How layers are computed on a GPU; weights and updates keep ``dtype``."""
    deterministic: bool = False
    """On a GPU: the same bits whenever the same runs are packed together, also after a resume."""
    preset: dict[str, Value] = {}
    """Fields of the task's preset: centring, partition_seed, ..."""
    protocol: dict[str, Value] = {}
    """Fields of the task's protocol: cohort, batch_size, epochs, ..."""
    algorithms: dict[str, Variant]
    """Names of algorithms, or tables of options by a name of your own."""

    @pydantic.field_validator("algorithms", mode="before")
    @classmethod
    def _as_table(cls, given: Any) -> Any:
        if given == "all":
            given = list(algorithms.ALGORITHMS)
        if isinstance(given, str):
            raise InputError(f'expected a list of names such as ["{given}"], or "all"')
        if isinstance(given, list):
            if not all(isinstance(name, str) for name in given) or len(set(given)) != len(given):
                raise InputError("expected names of algorithms, each once")
            given = {name: {} for name in given}
        return given

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.algorithms:
            raise InputError("algorithms: give at least one")
        for name in self.algorithms:
            if not _NAME.fullmatch(name):
                raise InputError(f"algorithms: {name!r} is no name for a directory: use letters")
        places = [self.folder(name) for name in self.algorithms]
        for place in places:
            if places.count(place) > 1:
                raise InputError(f"algorithms: two of them would share the directory {place!r}")
        shown = [self.shown(name) for name in self.algorithms]
        for label in shown:
            if shown.count(label) > 1:
                raise InputError(f"algorithms: two of them are called {label!r}: change a label")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise InputError(f"seeds = {self.seeds!r}: give at least one, each once")
        for name in ("rounds", "eval_every"):
            if name in self.protocol:
                raise InputError(f"protocol.{name}: belongs to the top of the file, without table")
        if self.rounds < 1:
            raise InputError(f"rounds = {self.rounds!r}: expected a whole number of at least 1")
        return self

    @classmethod
    def keys_of(cls, table: list[str]) -> list[str]:
        if table[:1] == ["algorithms"] and len(table) == 2:
            return list(Variant.model_fields)
        if table == ["stop"]:
            return cls._stop_keys()
        return super().keys_of(table)

    @classmethod
    def _stop_keys(cls) -> list[str]:
        return list(cls.model_fields["stop"].annotation.model_fields)  # type: ignore[union-attr]

    def to_toml(self) -> str:
        values = self.model_dump(exclude_none=True)
        for variant in values["algorithms"].values():
            for side in ("client", "server"):
                if not variant[side]:
                    del variant[side]
        if not self.stops:
            del values["stop"]
        return toml(values)

    @property
    def stops(self) -> bool:
        """Whether anything may end a trial before its last round."""
        return any(value for value in dict(self.model_dump().get("stop", {})).values())

    @staticmethod
    def folder(name: str) -> str:
        """The directory of an algorithm; a colon is no file name everywhere."""
        return name.replace(":", "-").replace(" ", "-")

    def shown(self, name: str) -> str:
        """What tables and figures call an algorithm."""
        return self.algorithms[name].label or name

    def with_settings(self, settings: Mapping[str, Setting]) -> Self:
        """A copy with ``key=value`` settings.

        Keys are those of the file: ``rounds``, ``protocol.cohort``, ``axes.client.lr``;
        ``fedavg.client.lr`` is for one algorithm, ``client.momentum`` for all of them.

        Raises:
            InputError: for an unknown key, with the nearest one, or a wrong value.
        """
        values = self.model_dump(exclude_none=True)
        for key, value in settings.items():
            table, _, name = key.partition(".")
            owner = next((n for n in self.algorithms if key.startswith(f"{n}.")), None)
            if owner is not None:
                _put(values["algorithms"][owner], key.removeprefix(f"{owner}."), value)
            elif table in self.tables and name:
                values[table][name] = value
            elif table in ("client", "server") and name:
                for variant in values["algorithms"].values():
                    variant.setdefault(table, {})[name] = value
            elif not name and table in type(self).model_fields:
                values[table] = value
            else:
                raise unknown("key", key, self._known_keys())
        return type(self).parse(values)

    def _known_keys(self) -> list[str]:
        own = [k for k in type(self).model_fields if k not in self.tables]
        entry = tasks.TASKS.get(self.task)
        preset = [] if entry is None else [f"preset.{name}" for name in entry.preset.options()]
        protocol = [f"protocol.{name}" for name in Protocol.__dataclass_fields__]
        protocol += [f"stop.{name}" for name in self._stop_keys()]
        options: set[str] = set()
        for name in self.algorithms:
            if self.base(name) in algorithms.ALGORITHMS:
                options |= {*known_options(algorithms.get(self.base(name)))}
        return [*own, *preset, *protocol, *sorted(options)]

    def base(self, name: str) -> str:
        """The algorithm that a table stands for."""
        return self.algorithms[name].algorithm or name

    def run_spec(
        self, name: str, seed: int, options: Mapping[str, Value], **protocol: Value
    ) -> RunSpec:
        """One run of an algorithm with these options."""
        variant = self.algorithms[name]
        sides: dict[str, dict[str, Value]] = {"client": {}, "server": {}}
        for key, value in options.items():
            side, _, field = key.partition(".")
            sides[side][field] = value
        return RunSpec.parse(
            {
                "task": self.task,
                "algorithm": self.base(name),
                "seed": seed,
                "engine": self.engine,
                "device": self.device,
                "dtype": self.dtype,
                "precision": self.precision,
                "deterministic": self.deterministic,
                "weights": variant.weights,
                "preset": self.preset,
                "protocol": {**self.protocol, "rounds": self.rounds, **protocol},
                **sides,
            }
        )

    def fixed(self, name: str) -> dict[str, Value]:
        """The options that a table gives."""
        variant = self.algorithms[name]
        own = {f"client.{k}": v for k, v in variant.client.items()}
        return own | {f"server.{k}": v for k, v in variant.server.items()}

    def configured(
        self, name: str, options: Mapping[str, Any], task: Task | None = None
    ) -> Algorithm:
        """An algorithm with the task's recommended options, then these.

        Raises:
            InputError: for an unknown name, option or value.
        """
        known = tuned(self.task) if task is None else task.options
        given = {**known.get(self.base(name), {}), **options}
        if self.algorithms[name].weights is not None:
            given["weights"] = self.algorithms[name].weights
        return configure(algorithms.get(self.base(name)), given)

    def build_task(self) -> Task:
        """The preset of that name with the plan's changes."""
        return tasks.get(self.task, self.preset)

    def check(self, task: Task | None = None) -> None:
        """Refuse what could not run, as far as it can be known without data.

        Args:
            task: a user's own task; by default the preset of that name.

        Raises:
            InputError: naming the value and the remedy.
        """
        if task is None:
            preset = tasks.entry(self.task).preset.with_options(self.preset)
            protocol, clients = preset.protocol, preset.clients
        else:
            protocol, clients = task.protocol, len(task.train)
        protocol = protocol.with_options(self.protocol)
        if protocol.cohort > clients and not protocol.replacement:
            raise InputError(
                f"cohort = {protocol.cohort} but there are {clients} clients: choose a smaller "
                "cohort or protocol.replacement = true"
            )
        for name in self.algorithms:
            self.check_algorithm(name, task)

    def check_algorithm(self, name: str, task: Task | None) -> None:
        """Refuse an algorithm that cannot be built."""
        self.configured(name, self.fixed(name), task)


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested tables; an axis keeps its dot."""
    table, _, name = key.partition(".")
    if table in ("client", "server", "axes") and name:
        values.setdefault(table, {})[name] = value
    else:
        values[key] = value


class GridSpec(Plan):
    """A search over hyper-parameters: short trainings, scored by their last rounds."""

    tables: ClassVar[tuple[str, ...]] = ("preset", "protocol", "stop", "axes")

    kind: Literal["grid"] = "grid"
    seeds: list[int] = [1000]
    """Seeds that no reported run uses."""
    rounds: int = 50
    last: int = 10
    """A score is the mean metric after each of so many last rounds; 0 for a trial that diverged."""
    selection: Literal["tune", "test"] = "tune"
    """Examples that choose: a half that reports nothing, or all test examples, as in the paper."""
    together: int = 0
    """Most trials that train side by side, where memory is short; 0: all of an algorithm's."""
    axes: Axes = pydantic.Field(default_factory=lambda: {})
    """Values by option, such as ``client.lr``; by default the paper's rates of clients and servers.
    An algorithm without such an option has one axis less."""
    stop: GridStop = GridStop()
    """When to train points no further; by default never."""

    _flat = pydantic.field_validator("axes", mode="before")(_flat)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _usual_axes(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("axes"):
            return {**values, "axes": {"client.lr": PAPER_RATES, "server.lr": PAPER_RATES}}
        return values

    @pydantic.field_validator("axes")
    @classmethod
    def _checked(cls, axes: Axes) -> Axes:
        return _check_axes(axes)

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        if not 1 <= self.last <= self.rounds:
            raise InputError(f"last = {self.last}: expected 1 to {self.rounds}, the rounds")
        if self.together < 0:
            raise InputError(f"together = {self.together}: expected 0 or more")
        if self.selection == "tune" and self.preset.get("selection") == "test":
            raise InputError(
                'preset.selection = "test" leaves no half to choose by: say selection = "test"'
            )
        self._check_stop()
        return self

    def _check_stop(self) -> None:
        bound, halvings = self.stop.best_possible, self.stop.heuristic_halving
        if bound is not None and not (self.stop.cannot_win and math.isfinite(bound)):
            raise InputError(
                f"stop.best_possible = {bound}: a finite number, for stop.cannot_win = true only"
            )
        if not halvings:
            return
        if sorted(set(halvings)) != halvings or not 1 <= halvings[0] <= halvings[-1] < self.rounds:
            raise InputError(
                f"stop.heuristic_halving = {halvings}: expected rising rounds from 1 to "
                f"{self.rounds - 1}"
            )
        if self.together:
            raise InputError(
                "stop.heuristic_halving compares all points of an algorithm after the same round: "
                "leave out together"
            )

    def packs(self) -> dict[str, int]:
        """How many packs the trials of every algorithm make."""
        trials = {name: len(self.points(name)) * len(self.seeds) for name in self.algorithms}
        return {name: -(-n // (self.together or n)) for name, n in trials.items()}

    def axes_of(self, name: str) -> Axes:
        """The axes of an algorithm: those whose option it has."""
        axes = self.algorithms[name].axes
        known = known_options(algorithms.get(self.base(name)))
        return {k: v for k, v in (self.axes if axes is None else axes).items() if k in known}

    def points(self, name: str) -> list[dict[str, float]]:
        """Every combination of an algorithm's axes, the last axis running fastest."""
        axes = self.axes_of(name)
        return [
            dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
        ]

    def build_task(self) -> Task:
        """The task, whose preset hands all test examples to tuning if they are to choose."""
        preset = dict(self.preset)
        if self.selection == "test" and "selection" in tasks.entry(self.task).preset.options():
            preset["selection"] = "test"
        return tasks.get(self.task, preset)

    def check(self, task: Task | None = None) -> None:
        known: set[str] = set()
        for name in self.algorithms:
            options = known_options(algorithms.get(self.base(name)))
            known |= {*options}
            for key in self.algorithms[name].axes or {}:
                if key not in options:
                    raise unknown(f"axis of {name}", key, options)
        for key in self.axes:
            if key not in known:
                raise unknown("axis", key, known)
        super().check(task)

    def check_algorithm(self, name: str, task: Task | None) -> None:
        if not self.axes_of(name):
            raise InputError(f"{name} has none of the axes {', '.join(self.axes)}: leave it out")
        both = self.fixed(name).keys() & self.axes_of(name).keys()
        if both:
            raise InputError(f"{name}: {min(both)} is both fixed and an axis: choose one")
        for point in self.points(name):
            self.configured(name, {**self.fixed(name), **point}, task)


class StudySpec(Plan):
    """A comparison of algorithms on identical cohorts and batches, over several seeds."""

    kind: Literal["study"] = "study"
    seeds: list[int] = [0, 1, 2, 3, 4]
    rounds: int = 1000
    eval_every: int = 5
    client_metrics_every: int = pydantic.Field(default=0, ge=0)
    """How often models are evaluated on each client's own examples: after rounds 1, 1 + N, ... and
    the last; 0: only after the last."""
    rates: str = "tuned"
    """``tuned``: found for the task before; ``given``: defaults and the tables here; otherwise the
    directory of a finished grid. Options in the tables go first."""
    thresholds: list[float] = []
    """Levels of the metric to be reached; by default the task's own."""
    window: int = 4
    """Evaluations whose average, or smallest, has to reach a threshold."""
    tests: Literal["reference", "pairs"] = "reference"
    """The family of tests: the first algorithm against every other, or every pair."""
    stop: StudyStop = StudyStop()
    """When to train runs no further; by default never."""

    @pydantic.field_validator("stop", mode="before")
    @classmethod
    def _all_runs_count(cls, given: Any) -> Any:
        wrong = [k for k in GridStop.model_fields if k in given] if isinstance(given, dict) else []
        for key in wrong:
            if key not in StudyStop.model_fields:
                raise InputError(f"{key} belongs to a grid: every run of a study counts")
        return given

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        for name in ("eval_every", "window"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)}: expected at least 1")
        if not all(map(math.isfinite, self.thresholds)):
            raise InputError(f"thresholds = {self.thresholds!r}: expected finite numbers")
        if any(variant.axes is not None for variant in self.algorithms.values()):
            raise InputError("axes belong to a grid: a study has none")
        return self

    def run_spec(
        self, name: str, seed: int, options: Mapping[str, Value], **protocol: Value
    ) -> RunSpec:
        found = super().run_spec(name, seed, options, **protocol)
        return found.model_copy(update={"client_metrics_every": self.client_metrics_every})

    def check_algorithm(self, name: str, task: Task | None) -> None:
        super().check_algorithm(name, task)
        known = tuned(self.task) if task is None else task.options
        rated = self.base(name) in known or "lr" in self.algorithms[name].client
        if self.rates == "tuned" and not rated:
            raise InputError(
                f"no rates were found before for {self.base(name)} on {self.task}: name the "
                'directory of a grid as rates, or say rates = "given"'
            )


SPECS: dict[str, type[Strict]] = {"run": RunSpec, "grid": GridSpec, "study": StudySpec}


def read(path: Path, kind: str | None = None) -> RunSpec | GridSpec | StudySpec:
    """Read a run, a grid or a study; the file's ``kind`` says which, a run needs none.

    Args:
        path: a TOML file.
        kind: what it has to be; None: anything.

    Raises:
        InputError: if it is something else or not valid.
    """
    values = read_toml(path)
    said = values.get("kind", kind or "run")
    if said not in SPECS:
        raise InputError(f"{path}: {unknown('kind', str(said), SPECS)}")
    if kind is not None and said != kind:
        raise InputError(f"{path} is a {said}: use 'fedzmg {said} {path}'")
    if said == "run":
        values.pop("kind", None)
    try:
        return SPECS[said].parse(values)  # type: ignore[return-value]
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def schema(kind: str) -> dict[str, Any]:
    """JSON Schema of a file, with the names there are, for editors.

    Raises:
        InputError: for an unknown kind.
    """
    if kind not in SPECS:
        raise unknown("kind", kind, SPECS)
    found = SPECS[kind].model_json_schema()
    properties = found["properties"]
    properties["task"]["enum"] = list(tasks.TASKS)
    names = {"type": "string", "enum": list(algorithms.ALGORITHMS)}
    if kind == "run":
        properties["algorithm"]["enum"] = names["enum"]
    else:
        listed = {"type": "array", "items": names, "minItems": 1, "uniqueItems": True}
        table = properties["algorithms"]
        description = table.pop("description")
        properties["algorithms"] = {"description": description, "anyOf": [listed, table]}
        found["$defs"]["Variant"]["properties"]["algorithm"]["anyOf"][0] = names
    if kind == "grid":
        properties["axes"] = {
            "description": properties["axes"]["description"],
            "type": "object",
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
