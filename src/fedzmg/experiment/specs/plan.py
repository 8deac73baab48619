"""Shared parts of grids and studies, and the algorithms that a call or a command names.

Everything but the data is checked without the data.
"""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import pydantic

from fedzmg import algorithms, tasks
from fedzmg.algorithms.options import known_options
from fedzmg.contract import Algorithm, AlgorithmInfo
from fedzmg.errors import InputError, brief, check_text, unknown
from fedzmg.experiment.specs.run import SIDES, Experiment, RunSpec
from fedzmg.experiment.specs.strict import Strict, toml
from fedzmg.storage.fields import Seed, Value
from fedzmg.storage.files import folder_name
from fedzmg.storage.formats import by_side, flat
from fedzmg.storage.reading import MOST_PLANNED
from fedzmg.tasks.task import Task

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9 ._:+-]*[A-Za-z0-9+])?")
_RESERVED = re.compile(
    r"memory|report|tracking|figures|tables|seed-\d+|con|prn|aux|nul|(com|lpt)\d"
    r"|.*\.(gz|html|jsonl?|png|safetensors|svg|toml)",
    re.IGNORECASE,
)
"""Names of files and directories beside those of the algorithms, or that Windows refuses."""

MOST_SEEDS = 10_000
MOST_ALGORITHMS = 1000
MOST_VALUES = 1000
MOST_TRIALS = 100_000
"""Largest numbers of seeds, of algorithms, of values of an axis, and of trials in a file."""

PAPER_RATES = [10.0 ** (-3 + i / 2) for i in range(9)]
"""The paper's learning rates, for clients and servers: half decades from 1e-3 to 10."""


def _dotted(axes: Any) -> Any:
    """Flatten ``{"client": {"lr": [...]}}``, as TOML reads ``client.lr = [...]``."""
    if not isinstance(axes, Mapping):
        return axes
    found = flat(axes, keep_empty=True)
    return {key: PAPER_RATES if value == "paper" else value for key, value in found.items()}


def _sorted(axes: dict[str, list[float]]) -> dict[str, list[float]]:
    for key, values in axes.items():
        if not values or len(set(values)) != len(values) or not all(map(math.isfinite, values)):
            raise InputError(f"{key} = {brief(values)}: give at least one finite number, each once")
    return {key: sorted(values) for key, values in axes.items()}


Axes: TypeAlias = Annotated[
    dict[str, Annotated[list[float], pydantic.Field(max_length=MOST_VALUES)]],
    pydantic.BeforeValidator(_dotted),
    pydantic.AfterValidator(_sorted),
]
"""Values to try, by option."""
Seeds: TypeAlias = Annotated[list[Seed], pydantic.Field(min_length=1, max_length=MOST_SEEDS)]


class Stop(Strict):
    """Early-stopping rule (off by default)."""

    diverged: bool = False
    """Stop a trial once it has diverged. Its model is frozen and its score is the worst possible
    anyway, so no score and no choice changes; only its traffic and its steps end."""


class Variant(Strict):
    """An algorithm with options of its own."""

    algorithm: str | None = None
    """A name of ``fedzmg list``; by default the name of the table."""
    label: str | None = None
    """Name in tables and figures; by default the name of the table."""
    weights: Literal["examples", "uniform"] | None = None
    client: dict[str, Value] = {}
    """Fixed fields of the client rule: momentum, decay, project, ..."""
    server: dict[str, Value] = {}
    """Fixed fields of the server rule."""
    parts: dict[str, Value] = {}
    """Personal and frozen layers."""
    axes: Axes | None = None
    """Replaces the grid's own axes."""


class Plan(Experiment):
    """Shared parts of grids and studies."""

    tables: ClassVar[tuple[str, ...]] = ("preset", "protocol", "federation", "stop")
    sparse: ClassVar[tuple[str, ...]] = ("federation", "stop")

    label: str = ""
    """A remark that is shown with every result, such as "reduced protocol"."""
    seeds: Seeds
    rounds: int = pydantic.Field(ge=1, le=MOST_PLANNED)
    algorithms: dict[str, Variant] = pydantic.Field(min_length=1, max_length=MOST_ALGORITHMS)
    """Names of algorithms, or tables of options by a name of your own."""
    stop: Stop = Stop()
    """Early-stopping rule; off by default."""

    @pydantic.field_validator("algorithms", mode="before")
    @classmethod
    def _as_table(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = list(algorithms.ALGORITHMS) if given == "all" else [given]
        if not isinstance(given, list):
            return given
        if not all(isinstance(name, str) for name in given) or len(set(given)) != len(given):
            raise InputError("expected names of algorithms, each once")
        return {name: {} for name in given}

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        folders: dict[str, str] = {}
        labels: set[str] = set()
        if self.label:
            check_text("label", self.label)
        for name, variant in self.algorithms.items():
            check_text("algorithms", name)
            if not _NAME.fullmatch(name) or _RESERVED.fullmatch(self.folder(name)):
                remedy = "use another name of letters and digits"
                raise InputError(f"algorithms: {name!r} cannot be a directory here: {remedy}")
            if variant.label is not None:
                check_text(f"algorithms.{name}.label", variant.label)
            # Some systems do not distinguish upper and lower case.
            folder, label = self.folder(name).casefold(), self.shown(name)
            if folder in folders:
                both = f"{folders[folder]!r} and {name!r} would share the directory {folder!r}"
                raise InputError(f"algorithms: {both}: rename one")
            if label in labels:
                raise InputError(f"algorithms: two of them are called {label!r}: change a label")
            folders[folder] = name
            labels.add(label)
        if len(set(self.seeds)) != len(self.seeds):
            raise InputError(f"seeds = {brief(self.seeds)}: give each once")
        for name in ("rounds", "eval_every"):
            if name in self.protocol:
                raise InputError(f"protocol.{name}: belongs to the top of the file, without table")
        return self

    def to_toml(self) -> str:
        values = self.model_dump(exclude_none=True, exclude=self._unwritten())
        variants = self.algorithms.items()
        own = {name: variant.model_dump(exclude_defaults=True) for name, variant in variants}
        return toml({**values, "algorithms": own})

    def orders(self) -> dict[str, list[str]]:
        """Return keys of tables whose order matters, which equality of plans ignores."""
        return {}

    @staticmethod
    def folder(name: str) -> str:
        return folder_name(name)

    def shown(self, name: str) -> str:
        """Return the name of an algorithm in tables and figures."""
        return self.algorithms[name].label or name

    def _paths(self, values: dict[str, Any], key: str) -> list[tuple[str, ...]]:
        """``fedavg.client.lr`` is for one algorithm, ``client.momentum`` for all of them."""
        names = values["algorithms"] = self._as_table(values["algorithms"])
        names = names if isinstance(names, dict) else [""]  # not a table, which is refused
        owners = [name for name in names if key.startswith(f"{name}.")][:1]
        own = key.removeprefix(f"{owners[0]}.") if owners else key
        table, _, name = own.partition(".")
        is_option = table in SIDES if name else own == "weights"
        if not owners and not is_option:
            return super()._paths(values, key)
        path = (table, name) if name and table in (*SIDES, "axes") else (own,)
        return [("algorithms", each, *path) for each in owners or names]

    @classmethod
    def keys_of(cls, table: Sequence[str]) -> list[str]:
        of_algorithms = [f"algorithms.NAME.{key}" for key in ("weights", *SIDES)]
        return super().keys_of(table) + ([] if table else of_algorithms)

    def bases(self) -> list[str]:
        return [self.base(name) for name in self.algorithms]

    def base(self, name: str) -> str:
        """Return the algorithm that a table stands for."""
        return self.algorithms[name].algorithm or name

    def run_spec(
        self, name: str, seed: int, options: Mapping[str, Value], **protocol: Value
    ) -> RunSpec:
        shared = ("task", "engine", "device", "dtype", "precision", "deterministic")
        return RunSpec.parse({
            **{key: getattr(self, key) for key in (*shared, "preset", "federation")},
            "client_metrics_every": getattr(self, "client_metrics_every", 0),
            "algorithm": self.base(name), "seed": seed,
            "weights": self.algorithms[name].weights or options.get("weights"),
            "protocol": {**self.protocol, "rounds": self.rounds, **protocol}, **by_side(options),
        })  # fmt: skip

    def fixed(self, name: str) -> dict[str, Value]:
        return flat(self.algorithms[name].model_dump(include=set(SIDES)))

    def configured(self, name: str, options: Mapping[str, Any], task: Task | None) -> Algorithm:
        """Build an algorithm with the task's recommended options, then these."""
        return self.run_spec(name, 0, options).build_algorithm(task)

    def check(self, task: Task | None = None) -> None:
        """Refuse a plan that could not run, without data; ``task`` is a user's own."""
        if task is None:
            preset = tasks.info(self.task).with_options(self.preset)
            protocol, clients = preset.protocol.with_options(self.protocol), preset.clients
            if protocol.cohort > clients and not protocol.replacement:
                remedy = "choose a smaller one, or protocol.replacement = true"
                there = f"cohort = {protocol.cohort} but there are {clients} clients"
                raise InputError(f"{there}: {remedy}")
        else:
            replace(task, protocol=task.protocol.with_options(self.protocol))  # checks itself
        for name in self.algorithms:
            self.check_algorithm(name, task)

    def check_algorithm(self, name: str, task: Task | None) -> None:
        self.configured(name, self.fixed(name), task)


EXAMPLE = '["fedavg", my_algorithm] or {"heavy": ("fedavg", {"client.momentum": 0.9})}'
Chosen = Algorithm | AlgorithmInfo | str  # an algorithm, or the name of one
Algorithms = Chosen | Sequence[Chosen] | Mapping[str, Chosen | tuple[Chosen, Mapping[str, Any]]]
"""Algorithms of a comparison: names and objects, or variants by names of your own."""


def named_algorithms(given: Any) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return options by name, as in a file, and algorithms that were passed as objects by name.

    Names are a text with commas or "all", a list, or a table of variants.
    """
    if isinstance(given, str):
        names = [name.strip() for name in given.split(",")]
        given = list(algorithms.ALGORITHMS) if names == ["all"] else names
    elif isinstance(given, Algorithm | AlgorithmInfo):
        given = [given]
    if isinstance(given, Mapping):
        pairs = [(name, *_base_and_options(name, value)) for name, value in given.items()]
    elif isinstance(given, Sequence):
        pairs = [(_name(value), value, {}) for value in given]
    else:
        raise InputError(f"algorithms = {brief(given)}: expected names, {EXAMPLE}")
    table: dict[str, dict[str, Any]] = {}
    objects: dict[str, Algorithm | AlgorithmInfo] = {}
    for name, base, options in pairs:
        if not name or not isinstance(name, str) or name in table:
            raise InputError(f"algorithms: {name!r}: expected names, each once")
        if not isinstance(base, str):
            known = algorithms.ALGORITHMS.data.get(name)
            algorithm = getattr(base, "algorithm", base)
            if known is not None and known.algorithm == algorithm:
                # An object keeps its numbers; a name would start from those of the task.
                options = {**algorithm.options(), **options}
            else:
                # Known by the name that the caller gives it.
                objects[name] = base
        of = {"algorithm": base} if isinstance(base, str) and base != name else {}
        weights = {"weights": options["weights"]} if "weights" in options else {}
        table[name] = {**of, **weights, **{k: v for k, v in by_side(options).items() if v}}
    return table, objects


def _name(value: Any) -> Any:
    if not isinstance(value, str | Algorithm | AlgorithmInfo):
        raise InputError(f"algorithms: {brief(value)}: expected {EXAMPLE}")
    return getattr(getattr(value, "algorithm", value), "name", value)  # a text is a name


def _base_and_options(name: str, value: Any) -> tuple[Any, Mapping[str, Any]]:
    base, options = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    _name(base)
    if not isinstance(options, Mapping):
        raise InputError(f"algorithms, {name}: {brief(options)}: expected options, {EXAMPLE}")
    for key in options:
        if key != "weights" and str(key).partition(".")[0] not in SIDES:
            known = known_options(algorithms.get(base)) if isinstance(base, str) else ()
            raise unknown(f"option of {name}", str(key), known)
    return base, options
