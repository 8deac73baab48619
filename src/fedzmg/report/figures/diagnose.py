"""Figure of a diagnosis, from the dictionary of a :class:`fedzmg.diagnose.Diagnosis`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedzmg.report.figures.style import (
    COLOURS,
    INK,
    PAPER,
    QUIET_INK,
    Chart,
    line_style,
    styled,
    wrapped,
)
from fedzmg.results.diagnosis import by_name, ratio, rows, when


@styled
def diagnosis(data: Mapping[str, Any]) -> Chart:
    """Draw mean shares by layer, the spread after projection, and the shares along a run."""
    moving = len(data["points"]) > 1
    expect = data["verdict"]["expect"]
    outlook = "no verdict" if expect == "unclear" else f"expect {expect}"
    title = f"{data['task']}, {when(data['points'][0])}: {outlook}"
    layers = list(rows(data["points"][0]))
    names = [wrapped(layer["name"], 40) for layer in layers]
    below = sum(1 + name.count("\n") for name in names) if moving else 3
    columns = 3 if moving else 2
    height = 2.4 + 0.22 * len(layers) + 0.17 * below
    chart = Chart(title, size=(4.6 * columns + 0.6, height))
    panels = chart.body.subplots(1, columns, squeeze=False)[0]
    _draw_shares(panels[0], data, layers)
    _draw_distances(panels[1], data, layers)
    if moving:
        _draw_along(panels[2], data)
    for axes in panels:
        axes.grid()
        if axes.get_legend_handles_labels()[0]:
            # Outside the axes, where entries cannot be taken for data.
            axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.16), handlelength=2.0)
    return chart


def _draw_shares(axes: Axes, data: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> None:
    centred = by_name(data["centred"])
    for y, layer in enumerate(layers):
        shares = [share for share in layer["shares"] if share is not None]
        first = y == 0
        axes.plot(
            shares, [y] * len(shares), "|", color=COLOURS[0], alpha=0.35, markersize=11.0,
            label="a client" if first else None,
        )  # fmt: skip
        without_mean = centred.get(layer["name"], {}).get("share", {}).get("mean")
        for value, mark, face, edge, label in (
            (layer["share"]["mean"], "o", COLOURS[0], COLOURS[0], "mean over clients"),
            (layer["forbidden"], "D", COLOURS[1], COLOURS[1], "loss gradient"),
            (without_mean, "s", PAPER, INK, "mean, inputs centred"),
        ):
            if value is not None:
                axes.plot(
                    [value], [y], mark, color=face, markersize=6.0, markeredgecolor=edge,
                    label=label if first else None,
                )  # fmt: skip
    _dress_rows(axes, layers, "share of gradient energy that is mean component")
    axes.set_xlim(-0.02, 1.02)


def _draw_distances(
    axes: Axes, data: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]
) -> None:
    drift = data["points"][0]["drift"]
    for offset, colour, label, pairs in (
        (-0.18, COLOURS[2], "distance of gradients", [one["distance"] for one in layers]),
        (0.18, COLOURS[5], "drift of local models", [drift.get(one["name"]) for one in layers]),
    ):
        found = {i + offset: length for i, pair in enumerate(pairs)
                 if (length := ratio(pair)) is not None}  # fmt: skip
        if found:
            axes.barh(list(found), list(found.values()), height=0.34, color=colour, label=label)
    axes.axvline(1.0, color=QUIET_INK, linewidth=0.9)
    _dress_rows(axes, layers, "squared distance of clients, projected over plain")
    axes.tick_params(labelleft=False)


def _draw_along(axes: Axes, data: Mapping[str, Any]) -> None:
    rounds = [point["round"] for point in data["points"]]
    for i, row in enumerate(zip(*(rows(point) for point in data["points"]), strict=True)):
        style = {**line_style(i), "marker": "o", "markersize": 3.0}
        means = [layer["share"]["mean"] for layer in row]
        axes.plot(rounds, means, linewidth=1.5, label=wrapped(row[0]["name"], 40), **style)
    axes.set_xlabel("round of plain FedAvg")
    axes.set_ylabel("mean component, mean over clients")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0.0, 1.02)


def _dress_rows(axes: Axes, layers: Sequence[Mapping[str, Any]], label: str) -> None:
    axes.set_yticks(range(len(layers)), [wrapped(one["name"], 30) for one in layers])
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(label)
