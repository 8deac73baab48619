"""Access to the JSON form of a :class:`fedzmg.diagnose.Diagnosis`, for every view of it."""

from collections.abc import Mapping
from typing import Any


def rows(point: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return every layer of a measurement, and the whole model at the end."""
    return [*point["layers"], point["whole"]]


def by_name(measurement: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Return the same by name; empty if nothing was measured."""
    return {one["name"]: one for one in rows(measurement)} if measurement else {}


def when(point: Mapping[str, Any]) -> str:
    """Describe the round of a point."""
    return "before training" if point["round"] == 0 else f"after round {point['round']}"


def ratio(pair: Mapping[str, Any] | None) -> float | None:
    """Return after over before; None if there was nothing before."""
    if not pair or pair["after"] is None or not pair["before"]:
        return None
    return float(pair["after"] / pair["before"])
