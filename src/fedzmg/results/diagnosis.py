"""Access to the JSON form of a :class:`fedzmg.diagnose.Diagnosis`, for every view of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def rows(point: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield every layer of a measurement, and the whole model at the end."""
    yield from point["layers"]
    yield point["whole"]


def by_name(measurement: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Return the same by name; empty if nothing was measured."""
    return {} if measurement is None else {one["name"]: one for one in rows(measurement)}


def when(point: Mapping[str, Any]) -> str:
    """Describe the round of a point."""
    return "before training" if point["round"] == 0 else f"after round {point['round']}"


def ratio(pair: Mapping[str, Any] | None) -> float | None:
    """Return after over before; None if there was nothing before."""
    if pair is None or pair["before"] is None or pair["after"] is None or pair["before"] <= 0.0:
        return None
    return float(pair["after"] / pair["before"])
