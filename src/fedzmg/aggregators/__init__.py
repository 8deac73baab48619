"""Aggregators: ways to merge the updates of a cohort, and the table of them."""

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fedzmg.aggregators.coordinates import Mean, Median, TrimmedMean
from fedzmg.aggregators.distances import CentredClipping, GeometricMedian, NormBound
from fedzmg.aggregators.nearest import Bulyan, Krum, MultiKrum
from fedzmg.contract import Aggregator, check_rule
from fedzmg.errors import InputError, check_names
from fedzmg.plugins import Registry

__all__ = [
    "AGGREGATORS", "AggregatorInfo", "Bulyan", "CentredClipping", "GeometricMedian", "Krum", "Mean",
    "Median", "MultiKrum", "NormBound", "TrimmedMean", "build", "describe", "get", "table_of",
]  # fmt: skip


class AggregatorInfo(NamedTuple):
    """An aggregator with its defaults, and a line about it."""

    aggregator: Aggregator
    summary: str
    source: str  # authors and year


def _entry(value: Any, name: str, _: ModuleType | None) -> tuple[str, AggregatorInfo]:
    """Make an entry of an aggregator; its class gives the name: ``MyMean`` is ``my_mean``."""
    check_rule("aggregator", getattr(value, "aggregator", value), Aggregator)
    if isinstance(value, Aggregator):
        summary = inspect.getdoc(type(value)) or ""
        value = AggregatorInfo(value, summary.partition("\n")[0], "")
    own = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(value.aggregator).__name__).lower()
    return name or own, value


_TEXTS = tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8"))
_CLASSES: tuple[type[Aggregator], ...] = (
    Mean, Median, TrimmedMean, Krum, MultiKrum, Bulyan, GeometricMedian, CentredClipping, NormBound
)  # fmt: skip
_INFOS = [AggregatorInfo(kind(), **_TEXTS[kind.__name__]) for kind in _CLASSES]
AGGREGATORS: Registry[AggregatorInfo] = Registry(
    "aggregator", dict(_entry(info, "", None) for info in _INFOS), _entry,
    lambda old, new: old.aggregator == new.aggregator,
)  # fmt: skip


def get(name: str) -> Aggregator:
    """Return the aggregator of that name with its defaults; for an unknown one suggest a name."""
    return AGGREGATORS.look_up(name).aggregator


def build(table: Mapping[str, Any]) -> Aggregator:
    """Build an aggregator from a table, such as ``{"name": "krum", "byzantine": 2}``."""
    options = dict(table)
    if "name" not in options:
        raise InputError(f"aggregator = {options!r}: add its name, such as name = 'median'")
    name = options.pop("name")
    aggregator = get(name)
    known = [field.name for field in dataclasses.fields(aggregator)]  # type: ignore[arg-type]
    check_names(f"option of {name}", options, known, "fedzmg list --aggregators")
    try:
        return dataclasses.replace(aggregator, **options)  # type: ignore[type-var]
    except InputError as error:
        raise InputError(f"{name}, {error}") from None


def describe() -> dict[str, dict[str, Any]]:
    """Return all aggregators with their options, ready for JSON."""
    found: dict[str, dict[str, Any]] = {}
    for name, (aggregator, summary, source) in AGGREGATORS.items():
        found[name] = {"summary": summary, "source": source, "fewest": aggregator.fewest}
        found[name]["options"] = [
            {"key": f.name, "default": f.default, "doc": f.metadata.get("doc", "")}
            for f in dataclasses.fields(aggregator)  # type: ignore[arg-type]
        ]
    return found


def table_of(aggregator: Aggregator) -> dict[str, Any]:
    """Return the name and all options of an aggregator; :func:`build` builds the same."""
    names = {type(info.aggregator): name for name, info in AGGREGATORS.items()}
    options = dataclasses.asdict(aggregator)  # type: ignore[call-overload]
    shown = {key: value for key, value in options.items() if value is not None}
    return {"name": names.get(type(aggregator), type(aggregator).__name__), **shown}
