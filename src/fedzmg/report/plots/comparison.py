"""The figure of a comparison, from its ``comparison.json`` and a study's levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedzmg.report.plots.figures import curves
from fedzmg.report.plots.panels import panels
from fedzmg.report.plots.series import Series
from fedzmg.results.formatting import INDEX_EXPLAINED
from fedzmg.results.spread import possible

MOST_IN_ONE_PANEL = 10


def figure(data: Mapping[str, Any], thresholds: Sequence[float] = (), label: str = "") -> Figure:
    """Mean curve and spread of every algorithm; many of them get a panel per family.

    Args:
        data: a ``comparison.json``.
        thresholds: levels to mark, those of a study; by default the comparison's own.
        label: what the study says of itself ("reduced protocol").
    """
    series = [
        Series(label, _indices(curve), np.array(curve["runs"], dtype=float))
        for label, curve in data["curves"].items()
    ]
    remark = f" ({label})" if label else ""
    draw = curves if len(series) <= MOST_IN_ONE_PANEL else panels
    return draw(
        series,
        title=f"{data['task']}{remark}, {len(data['seeds'])} paired seeds",
        ylabel=f"test {data['metric']}",
        threshold=list(thresholds) or data.get("threshold"),
        xlabel=INDEX_EXPLAINED,
        possible=possible(data["metric"]),
    )


def _indices(curve: Mapping[str, Any]) -> NDArray[np.int64]:
    """Indices of the evaluated rounds; older files have rounds, which count from 1."""
    return np.array(curve["indices"]) if "indices" in curve else np.array(curve["rounds"]) - 1
