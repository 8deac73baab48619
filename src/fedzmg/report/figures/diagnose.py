"""Figure of a diagnosis, from the dictionary of a :class:`fedzmg.diagnose.Diagnosis`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedzmg.report.figures import style
from fedzmg.report.figures.style import Chart, line_style, styled, wrapped
from fedzmg.results.diagnosis import by_name, ratio, rows, when


@styled
def diagnosis(data: Mapping[str, Any]) -> Chart:
    """Draw mean shares by layer, the spread after projection, and the shares along a run."""
    points, expect = data["points"], data["verdict"]["expect"]
    outlook = "no verdict" if expect == "unclear" else f"expect {expect}"
    layers, moving = list(rows(points[0])), len(points) > 1
    names = [wrapped(layer["name"], 40) for layer in layers]
    below = sum(1 + name.count("\n") for name in names) if moving else 3
    size = (4.6 * (2 + moving) + 0.6, 2.4 + 0.22 * len(layers) + 0.17 * below)
    chart = Chart(f"{data['task']}, {when(points[0])}: {outlook}", size=size)
    shares, spread, *along = chart.body.subplots(1, 2 + moving)
    _draw_shares(shares, data, layers)
    _draw_distances(spread, points[0], layers)
    if along:
        _draw_along(along[0], points, names)
    for axes in (shares, spread, *along):
        axes.grid()
        if axes.get_legend_handles_labels()[0]:
            # Outside the axes, where entries cannot be taken for data.
            axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.16), handlelength=2.0)
    return chart


def _draw_shares(axes: Axes, data: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> None:
    centred, blue, red = by_name(data["centred"]), style.COLOURS[0], style.COLOURS[1]
    for y, layer in enumerate(layers):
        without_mean = centred.get(layer["name"], {}).get("share", {}).get("mean")
        for values, mark, face, edge, label in (
            (layer["shares"], "|", blue, blue, "a client"),
            ([layer["share"]["mean"]], "o", blue, blue, "mean over clients"),
            ([layer["forbidden"]], "D", red, red, "loss gradient"),
            ([without_mean], "s", style.PAPER, style.INK, "mean, inputs centred"),
        ):
            known = [value for value in values if value is not None]
            if known:
                each = mark == "|"
                axes.plot(
                    known, [y] * len(known), mark, color=face, markeredgecolor=edge,
                    markersize=11.0 if each else 6.0, alpha=0.35 if each else None,
                    label=None if y else label,
                )  # fmt: skip
    _name_layers(axes, layers, "share of gradient energy that is mean component")
    axes.set_xlim(-0.02, 1.02)


def _draw_distances(
    axes: Axes, point: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]
) -> None:
    drift = [point["drift"].get(one["name"]) for one in layers]
    for offset, colour, label, pairs in (
        (-0.18, style.COLOURS[2], "distance of gradients", [one["distance"] for one in layers]),
        (0.18, style.COLOURS[5], "drift of local models", drift),
    ):
        found = {y + offset: ratio(pair) for y, pair in enumerate(pairs)}
        known = {y: value for y, value in found.items() if value is not None}
        if known:
            axes.barh(list(known), list(known.values()), height=0.34, color=colour, label=label)
    axes.axvline(1.0, color=style.QUIET_INK, linewidth=0.9)
    _name_layers(axes, layers, "squared distance of clients, projected over plain")
    axes.tick_params(labelleft=False)


def _draw_along(axes: Axes, points: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    table = zip(*(rows(point) for point in points), strict=True)
    for i, (name, row) in enumerate(zip(names, table, strict=True)):
        options = {**line_style(i), "marker": "o", "markersize": 3.0, "linewidth": 1.5}
        means = [layer["share"]["mean"] for layer in row]
        axes.plot([point["round"] for point in points], means, label=name, **options)
    axes.set(xlabel="round of plain FedAvg", ylabel="mean component, mean over clients")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0.0, 1.02)


def _name_layers(axes: Axes, layers: Sequence[Mapping[str, Any]], label: str) -> None:
    axes.set_yticks(range(len(layers)), [wrapped(one["name"], 30) for one in layers])
    axes.set(ylim=(len(layers) - 0.5, -0.5), xlabel=label)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
