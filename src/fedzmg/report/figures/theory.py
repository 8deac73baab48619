"""Figures of the checks of ``fedzmg theory`` and of a diagnosis, from their JSON."""

import functools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedzmg.diagnose.verdict import by_name, ratio, rows, when
from fedzmg.report.figures import style
from fedzmg.report.figures.style import PAPER, QUIET_INK, Chart, styled, use_log_scale

BLUE, RED, GREEN, _, _, ORANGE, _ = style.COLOURS
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
Layers = Sequence[Mapping[str, Any]]
_SIGNS = {"rho": "\u03c1", "Phi ": "Φ", "grad ": "∇", "^2": "²", " - ": " \u2212 "}
CHARTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def theory(finding: Mapping[str, Any]) -> dict[str, Chart]:
    """Draw the figures of a finding, by the names of their files; none for one without curves."""
    name, series = str(finding["id"]), dict(finding["series"])
    if name == "T5":
        (x, ours), (_, theirs) = series["FedZMG"], series["FedAvg"]
        series["gain"] = (x, [a / b for a, b in zip(ours, theirs, strict=True)])
        series["gain, exact"] = (x, [11 / 12] * len(x))
    plots = {key: plot for key, plot in CHARTS.items() if key.partition("-")[0] == name}
    return {key: _lines(plot, series) for key, plot in plots.items()}


@styled
def _lines(plot: Mapping[str, Any], series: Series) -> Chart:
    log, chart = plot.get("log", "xy"), Chart(plot["title"], plot["caption"], (7.0, 3.9))
    axes = chart.panel(plot.get("xlabel", "steps t"), plot["ylabel"])
    for name, form in plot["strokes"].items():
        label = functools.reduce(lambda text, pair: text.replace(*pair), _SIGNS.items(), name)
        face = PAPER if "y" in log else form[:2]
        (line,) = axes.plot(
            *series[name], form, label=label, markersize=5.0, markerfacecolor=face,
            linewidth=3.0 if form == "C6-" else 1.6,  # others lie on it
        )  # fmt: skip
        chart.tag(line, label)
    for axis in log:
        use_log_scale(axes, axis)
    if "y" not in log:
        axes.set_ylim(bottom=0.0)
    if plot.get("percent"):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    chart.name_series(*axes.get_legend_handles_labels(), below=True)
    return chart


@styled
def diagnosis(data: Mapping[str, Any]) -> Chart:
    """Draw mean shares by layer, the spread after projection, and the shares along a run."""
    points, expect = data["points"], data["verdict"]["expect"]
    outlook = "no verdict" if expect == "unclear" else f"expect {expect}"
    layers, moving = list(rows(points[0])), len(points) > 1
    names = [style.wrapped(layer["name"], 40) for layer in layers]
    below = sum(1 + name.count("\n") for name in names) if moving else 3
    size = (4.6 * (2 + moving) + 0.6, 2.4 + 0.22 * len(layers) + 0.17 * below)
    chart = Chart(f"{data['task']}, {when(points[0])}: {outlook}", size=size)
    shares, spread, *along = chart.body.subplots(1, 2 + moving)
    _draw_shares(shares, data, layers)
    _draw_distances(spread, points[0], layers)
    if along:
        table = zip(*(rows(point) for point in points), strict=True)
        for i, (name, row) in enumerate(zip(names, table, strict=True)):
            options = {**style.line_style(i), "marker": "o", "markersize": 3.0, "linewidth": 1.5}
            means = [layer["share"]["mean"] for layer in row]
            along[0].plot([point["round"] for point in points], means, label=name, **options)
        along[0].set(xlabel="round of plain FedAvg", ylabel="mean component, mean over clients")
        along[0].xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        along[0].yaxis.set_major_formatter(PercentFormatter(1.0))
        along[0].set_ylim(0.0, 1.02)
    for axes in (shares, spread, *along):
        axes.grid()
        if axes.get_legend_handles_labels()[0]:
            # Outside the axes, where entries cannot be taken for data.
            axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.16), handlelength=2.0)
    return chart


def _draw_shares(axes: Axes, data: Mapping[str, Any], layers: Layers) -> None:
    centred = by_name(data["centred"])
    for y, layer in enumerate(layers):
        without_mean = centred.get(layer["name"], {}).get("share", {}).get("mean")
        for values, mark, face, edge, label in (
            (layer["shares"], "|", BLUE, BLUE, "a client"),
            ([layer["share"]["mean"]], "o", BLUE, BLUE, "mean over clients"),
            ([layer["forbidden"]], "D", RED, RED, "loss gradient"),
            ([without_mean], "s", PAPER, style.INK, "mean, inputs centred"),
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


def _draw_distances(axes: Axes, point: Mapping[str, Any], layers: Layers) -> None:
    drift = [point["drift"].get(one["name"]) for one in layers]
    for offset, colour, label, pairs in (
        (-0.18, GREEN, "distance of gradients", [one["distance"] for one in layers]),
        (0.18, ORANGE, "drift of local models", drift),
    ):
        found = {y + offset: ratio(pair) for y, pair in enumerate(pairs)}
        known = {y: value for y, value in found.items() if value is not None}
        if known:
            axes.barh(list(known), list(known.values()), height=0.34, color=colour, label=label)
    axes.axvline(1.0, color=QUIET_INK, linewidth=0.9)
    _name_layers(axes, layers, "squared distance of clients, projected over plain")
    axes.tick_params(labelleft=False)


def _name_layers(axes: Axes, layers: Layers, label: str) -> None:
    axes.set_yticks(range(len(layers)), [style.wrapped(one["name"], 30) for one in layers])
    axes.set(ylim=(len(layers) - 0.5, -0.5), xlabel=label)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
