"""The learning curves of a study in one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedzmg.report.plots.figures import curves
from fedzmg.report.plots.panels import panels
from fedzmg.report.plots.series import Series
from fedzmg.results.averaging import possible
from fedzmg.results.formatting import INDEX_EXPLAINED
from fedzmg.results.study_result import StudyResult

MOST_IN_ONE_PANEL = 10


def figure(
    data: StudyResult | Mapping[str, Any], thresholds: Sequence[float] = (), label: str = ""
) -> Figure:
    """Draw mean curve and spread of every algorithm; many of them get a panel per family.

    Args:
        data: a result, or task, metric, seeds and curves of one.
        thresholds: levels to mark; by default the result's own.
        label: a remark for the title ("reduced protocol").
    """
    if isinstance(data, StudyResult):
        thresholds, label = data.study.thresholds, data.study.label
        data = data.as_dict() | {"threshold": None}
    series = [
        Series(label, np.array(curve["indices"]), np.array(curve["runs"], dtype=float))
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
