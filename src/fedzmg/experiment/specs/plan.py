"""What the files of grids and studies have in common: a task, algorithms with options, seeds.

Both are TOML files, or built in Python. Everything but the data is checked without the data.
"""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)
from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import pydantic

from fedzmg import algorithms, tasks
from fedzmg.algorithms.options import configure, known_options
from fedzmg.contract import Algorithm
from fedzmg.errors import InputError, unknown
from fedzmg.experiment.specs.axes import Axes, checked, dotted
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.specs.strict import Setting, Strict, Value, toml
from fedzmg.models.kernels.precision import Precision
from fedzmg.simulation import Device, EngineName
from fedzmg.storage.files import folder_name
from fedzmg.tasks.task import Protocol, Task
from fedzmg.tasks.tuned import tuned

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:+-]*")


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

    _dotted = pydantic.field_validator("axes", mode="before")(dotted)

    @pydantic.field_validator("axes")
    @classmethod
    def _checked(cls, axes: Axes | None) -> Axes | None:
        return None if axes is None else checked(axes)


class Plan(Strict):
    """What grids and studies share."""

    tables: ClassVar[tuple[str, ...]] = ("preset", "protocol", "stop")

    task: str
    label: str = ""
    """A remark that is shown with every result, such as "reduced protocol"."""
    seeds: list[int]
    rounds: int
    engine: EngineName = "auto"
    device: Device = "auto"
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
        if not isinstance(given, list | Mapping):
            name = given if isinstance(given, str) else "fedzmg"
            raise InputError(f'{given!r} is no list: expected names such as ["{name}"], or "all"')
        if isinstance(given, list):
            if not all(isinstance(name, str) for name in given) or len(set(given)) != len(given):
                raise InputError("expected names of algorithms, each once")
            given = {name: {} for name in given}
        return given

    @pydantic.field_validator("seeds", mode="before")
    @classmethod
    def _which_seeds(cls, given: Any) -> Any:
        if isinstance(given, int):
            listed = list(range(given if 1 <= given <= 5 else 3))
            raise InputError(f"{given!r} is no list of them: say which, such as seeds = {listed}")
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

    def orders(self) -> dict[str, list[str]]:
        """Keys of tables whose order counts, which the equality of plans does not see."""
        return {}

    @staticmethod
    def folder(name: str) -> str:
        """The directory of an algorithm."""
        return folder_name(name)

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
                known = [f"fedzmg list {self.task}"] * (self.task in tasks.TASKS)
                commands = [self.listing, *known, "fedzmg list ALGORITHM"]
                raise unknown("key", key, self._known_keys(), *commands)
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
            preset = tasks.info(self.task).preset.with_options(self.preset)
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
