"""Types of the fields in files of results, checked whenever such a file is read.

Unknown fields are left alone: a newer version may have written them.
"""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Required, TypeAlias

import pydantic
from typing_extensions import TypedDict  # pydantic asks for it before Python 3.12

from fedzmg.errors import InputError
from fedzmg.storage.reading import MOST_LINES

MOST_POINTS, MOST_ALGORITHMS = 100_000, 1000
"""Largest number of points, runs or trials, and of algorithms."""

Value: TypeAlias = bool | int | float | str
Number: TypeAlias = Annotated[float, pydantic.Field(allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, pydantic.Field(ge=0, le=2**53)]
Round: TypeAlias = Annotated[int, pydantic.Field(ge=0, le=MOST_LINES)]
Interval: TypeAlias = Annotated[int, pydantic.Field(ge=1, le=2**53)]
_FEW = pydantic.Field(max_length=MOST_POINTS)
Seed: TypeAlias = Annotated[int, pydantic.Field(ge=0, lt=2**128)]
Seeds: TypeAlias = Annotated[list[Seed], _FEW]
Axes: TypeAlias = dict[str, Annotated[list[Number], pydantic.Field(max_length=1000)]]


class Protocol(TypedDict, total=False):
    """Table of a specification."""

    rounds: Round
    cohort: Count
    eval_every: Interval
    threshold: Number


class Participation(TypedDict, total=False):
    """Table of a specification."""

    sampler: str
    schedule: list[list[int | str]]


class Stages(TypedDict, total=False):
    """Table of a specification."""

    participation: Participation


class Run(TypedDict, total=False):
    """Content of ``spec.toml``."""

    task: str
    algorithm: str
    seed: Seed
    weights: str
    preset: dict[str, Value]
    protocol: Protocol
    federation: Stages
    client: dict[str, Value]
    server: dict[str, Value]


PlanAxes: TypeAlias = dict[str, list[Number] | dict[str, list[Number]]]


class Variant(TypedDict, total=False):
    """An algorithm of a study or grid."""

    algorithm: str
    label: str
    axes: PlanAxes


class PlanFields(TypedDict, total=False):
    """Content of ``study.toml`` and ``grid.toml``."""

    task: str
    label: str
    seeds: Seeds
    rounds: Round
    algorithms: list[str] | dict[str, Variant]
    axes: PlanAxes
    federation: Stages
    rates: str
    precision: str
    thresholds: list[Number]
    window: Interval
    tests: str
    last: Round
    together: Count


def _few(plan: dict[str, Any]) -> dict[str, Any]:
    """Refuse a plan of too many runs or trials."""
    names, trials = plan.get("algorithms", {}), len(plan.get("seeds", []))
    tables = [names[name].get("axes", {}) for name in names] if isinstance(names, dict) else []
    for axes in (plan.get("axes", {}), *tables):
        nested = [own.values() if isinstance(own, dict) else [own] for own in axes.values()]
        points = math.prod(len(values) for own in nested for values in own)
        if len(names) > MOST_ALGORITHMS or len(names) * trials * points > MOST_POINTS:
            raise ValueError(f"more than {MOST_POINTS:,} runs or trials")
    return plan


Plan: TypeAlias = Annotated[PlanFields, pydantic.AfterValidator(_few)]


class Change(TypedDict, total=False):
    """Change of a pack during training."""

    round: Required[Round]
    chunk: Count | None


LogName: TypeAlias = Annotated[str, pydantic.Field(pattern=r"^\w{1,40}\.jsonl$")]
LogMark: TypeAlias = Annotated[str, pydantic.Field(pattern=r"^\d{1,12} [0-9a-f]{64}$")]
"""Size and hash of a log."""


class PluginFile(TypedDict, total=False):
    """File of an algorithm or task from outside the package."""

    file: Required[str]
    sha256: Required[str]
    distribution: str


class Manifest(TypedDict, total=False):
    """Content of ``manifest.json``."""

    metric: str
    higher_is_better: bool
    clients: Count
    examples: Count
    device: str
    engine: str
    onednn: bool
    threads: Annotated[int, pydantic.Field(ge=1, le=4096)]
    chunk: Count | None
    pack: Annotated[list[str], _FEW]
    chunk_changes: list[Change]
    pack_changes: list[Change]
    command: str | list[str] | None
    seconds: Number
    logs: dict[LogName, LogMark]
    plugins: dict[str, PluginFile]


class Stop(TypedDict, total=False):
    """Content of ``stopped.json``."""

    round: Required[Round]
    why: str
    words: str


class Unusual(TypedDict, total=False):
    """A client of a grid's point whose uploads were rejected or flagged."""

    client: Required[str]
    action: Required[str]
    ratio: Required[Number | None]
    """Norm of its largest update over the median of the cohort; None if not finite."""
    round: Required[Round]


class Point(TypedDict, total=False):
    """A point of a grid."""

    options: Required[dict[str, Number]]
    score: Required[Number | None]
    diverged: Required[Count]
    unusual: Annotated[list[Unusual], _FEW]


class Neighbour(TypedDict, total=False):
    """A point beside the best one."""

    score: Required[Number | None]


class Best(TypedDict, total=False):
    """The chosen point of a grid."""

    options: Required[dict[str, Number]]
    score: Required[Number | None]
    border: Required[bool]
    border_axes: Required[list[str]]
    neighbours: Required[list[Neighbour]]


def _on_axes(entry: dict[str, Any]) -> dict[str, Any]:
    """Refuse points that are not on the axes."""
    axes = {key: set(values) for key, values in entry["axes"].items()}
    chosen = [entry[name] for name in ("best", "best_by_test") if entry.get(name) is not None]
    for point in (*entry["points"], *chosen):
        options = point["options"]
        if options.keys() != axes.keys() or any(options[key] not in axes[key] for key in axes):
            raise ValueError("a point is not on the axes")
    if not axes or math.prod(map(len, axes.values())) > MOST_POINTS:
        raise ValueError("no axes, or too many points")
    return entry


class Scores(TypedDict, total=False):
    """Content of ``scores.json``, and of ``grid.json`` for each algorithm."""

    algorithm: str
    label: Required[str]
    fixed: dict[str, Value]
    weights: str | None
    axes: Required[Axes]
    points: Required[Annotated[list[Point], _FEW]]
    best: Required[Best | None]
    best_by_test: Best | None
    stopped: dict[str, Count]


Entry: TypeAlias = Annotated[Scores, pydantic.AfterValidator(_on_axes)]


class Grid(TypedDict, total=False):
    """Content of ``grid.json``."""

    task: Required[str]
    label: str
    metric: Required[str]
    higher_is_better: Required[bool]
    selection: Required[str]
    examples: Required[Count]
    rounds: Required[Round]
    last: Required[Round]
    seeds: Required[Seeds]
    complete: Required[bool]
    algorithms: Required[Annotated[dict[str, Entry], pydantic.Field(max_length=MOST_ALGORITHMS)]]


class Spread(TypedDict, total=False):
    """Mean and deviation of a measure over clients."""

    mean: Required[Number]
    sd: Required[Number | None]


class Client(TypedDict, total=False):
    """Measures of one client."""

    client: Required[str | int]
    volume: Number
    distinct: int | Number
    entropy: Number
    gini: Number
    kl: Number
    dominant_share: Number


class Heterogeneity(TypedDict, total=False):
    """Content of ``heterogeneity.json``."""

    name: Required[str]
    unit: Required[str]
    total: Count
    clients: Required[list[Client]]
    summary: Required[dict[str, Spread]]
    counts: list[list[Number]]
    labels: list[str]


KINDS: dict[str, Any] = {
    "spec.toml": Run, "study.toml": Plan, "grid.toml": Plan, "manifest.json": Manifest,
    "stopped.json": Stop, "scores.json": Entry, "grid.json": Grid,
    "heterogeneity.json": Heterogeneity,
}  # fmt: skip
"""Types by the name of a file."""


_adapter: Any = functools.cache(pydantic.TypeAdapter)


def check_fields(path: Path, values: Mapping[str, Any], remedy: str) -> None:
    """Refuse a file of results with a missing field or one of another type, in one line."""
    if path.name not in KINDS:
        return
    try:
        _adapter(KINDS[path.name]).validate_python(values, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        key, given = ".".join(map(str, first["loc"])), repr(first.get("input"))[:60]
        if first["type"] == "missing":
            raise InputError(f"{path} lacks {key!r}: {remedy}") from None
        raise InputError(f"{path}: {key} = {given}: {first['msg'].lower()}; {remedy}") from None
