"""Types of the fields in files of results, checked by readers; unknown fields are allowed."""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Required, TypeAlias

import pydantic
from typing_extensions import TypedDict  # pydantic asks for it before Python 3.12

from fedzmg.errors import InputError
from fedzmg.storage.reading import MOST_ROUNDS

MOST_POINTS, MOST_ALGORITHMS = 100_000, 1000  # points: also runs or trials

Value: TypeAlias = bool | int | float | str
Number: TypeAlias = Annotated[float, pydantic.Field(allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, pydantic.Field(ge=0, le=2**53)]
Round: TypeAlias = Annotated[int, pydantic.Field(ge=0, le=MOST_ROUNDS)]
Interval: TypeAlias = Annotated[int, pydantic.Field(ge=1, le=2**53)]
_FEW = pydantic.Field(max_length=MOST_POINTS)
Seed: TypeAlias = Annotated[int, pydantic.Field(ge=0, lt=2**128)]
Seeds: TypeAlias = Annotated[list[Seed], _FEW]
Axes: TypeAlias = dict[str, Annotated[list[Number], pydantic.Field(max_length=1000)]]
PlanAxes: TypeAlias = dict[str, list[Number] | dict[str, list[Number]]]
LogName: TypeAlias = Annotated[str, pydantic.Field(pattern=r"^\w{1,40}\.jsonl$")]
LogMark: TypeAlias = Annotated[str, pydantic.Field(pattern=r"^\d{1,12} [0-9a-f]{64}$")]
"""Size and hash of a log."""
_TypedDict: Any = TypedDict
_List: Any = list
_Dict: Any = dict


def _table(needed: Mapping[str, Any], **others: Any) -> Any:
    """Return the type of a table: fields that it needs, and others that it may have."""
    required = {name: Required[kind] for name, kind in needed.items()}
    return _TypedDict("Table", {**required, **others}, total=False)


def _on_axes(entry: dict[str, Any]) -> dict[str, Any]:
    axes = {key: set(values) for key, values in entry["axes"].items()}
    chosen = [entry[name] for name in ("best", "best_by_test") if entry.get(name) is not None]
    for point in (*entry["points"], *chosen):
        options = point["options"]
        if options.keys() != axes.keys() or any(options[key] not in axes[key] for key in axes):
            raise ValueError("a point is not on the axes")
    if not axes or math.prod(map(len, axes.values())) > MOST_POINTS:
        raise ValueError("no axes, or too many points")
    return entry


_STAGES = _table({}, participation=_table({}, sampler=str, schedule=list[list[int | str]]))
_RUN = _table(
    {"task": str, "algorithm": str, "seed": Seed}, weights=str, preset=dict[str, Value],
    protocol=_table({}, rounds=Round, cohort=Count, eval_every=Interval, threshold=Number),
    federation=_STAGES, client=dict[str, Value], server=dict[str, Value],
)  # fmt: skip
_VARIANT = _table({}, algorithm=str, label=str, axes=PlanAxes)
_PLAN = _table(
    {}, task=str, label=str, seeds=Seeds, rounds=Round, algorithms=list[str] | _Dict[str, _VARIANT],
    axes=PlanAxes, federation=_STAGES, rates=str, precision=str, thresholds=list[Number],
    window=Interval, tests=str, last=Round, together=Count,
)  # fmt: skip
_CHANGES = _List[_table({"round": Round}, chunk=Count | None)]
_PLUGIN = _table({"file": str, "sha256": str}, distribution=str)
_MANIFEST = _table(
    {}, metric=str, higher_is_better=bool, clients=Count, examples=Count, device=str, engine=str,
    onednn=bool, channels_last=bool, threads=Annotated[int, pydantic.Field(ge=1, le=4096)],
    chunk=Count | None, parallel=Annotated[int, pydantic.Field(ge=1, le=4096)],
    pack=Annotated[list[str], _FEW], chunk_changes=_CHANGES, pack_changes=_CHANGES,
    command=str | list[str] | None, seconds=Number, logs=dict[LogName, LogMark],
    plugins=_Dict[str, _PLUGIN],
)  # fmt: skip
_STOP = _table({"round": Round, "why": str, "words": str}, score=Number | None)
_SCORED = {"options": dict[str, Number], "score": Number | None}
_POINT = _table({**_SCORED, "diverged": Count})
_NEIGHBOURS = _List[_table({"score": Number | None})]
_BEST = _table({**_SCORED, "border": bool, "border_axes": list[str], "neighbours": _NEIGHBOURS})
_SCORES = _table(
    {"label": str, "axes": Axes, "points": Annotated[_List[_POINT], _FEW], "best": _BEST | None},
    algorithm=str, fixed=dict[str, Value], weights=str | None, best_by_test=_BEST | None,
    stopped=dict[str, Count],
)  # fmt: skip
_ENTRY: Any = Annotated[_SCORES, pydantic.AfterValidator(_on_axes)]
_GRID = _table(
    {"task": str, "metric": str, "higher_is_better": bool, "selection": str, "examples": Count,
     "rounds": Round, "last": Round, "seeds": Seeds, "complete": bool,
     "algorithms": Annotated[dict[str, _ENTRY], pydantic.Field(max_length=MOST_ALGORITHMS)]},
    label=str,
)  # fmt: skip
_CLIENT = _table(
    {"client": str | int}, volume=Number, distinct=int | Number, entropy=Number, gini=Number,
    kl=Number, dominant_share=Number,
)  # fmt: skip
_SPREAD = _table({"mean": Number, "sd": Number | None})
_HETEROGENEITY = _table(
    {"name": str, "unit": str, "clients": _List[_CLIENT], "summary": _Dict[str, _SPREAD]},
    total=Count, counts=list[list[Number]], labels=list[str],
)  # fmt: skip
KINDS: dict[str, Any] = {
    "spec.toml": _RUN, "study.toml": _PLAN, "grid.toml": _PLAN, "manifest.json": _MANIFEST,
    "stopped.json": _STOP, "scores.json": _ENTRY, "grid.json": _GRID,
    "heterogeneity.json": _HETEROGENEITY,
}  # fmt: skip
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
