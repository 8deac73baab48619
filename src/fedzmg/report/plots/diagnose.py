"""A diagnosis as a figure.

Everything starts from the dictionary of a :class:`fedzmg.diagnose.Diagnosis`, as kept in JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedzmg.report.lettering import folded, widest
from fedzmg.report.plots.style import COLOURS, DASHES, GRID, QUIET_INK, STYLE, laid_out
from fedzmg.results.diagnosis import by_name, ratio, rows, when

_INCHES = 4.6
_HIGH = 4.2
_LETTERS = 8.0
"""Size of names in a legend, in points."""
_HANDLE = 2.0
"""Piece of a line before a name, in letters."""
_BELOW = 4.8
"""From a panel to its legend, in letters: past the numbers and the name of the axis."""


def figure(data: Mapping[str, Any]) -> Figure:
    """Draw every client's mean share by layer, what the projection leaves, and the way of a run.

    Returns:
        A figure that belongs to no window.
    """
    moving = len(data["points"]) > 1
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
        canvas = Figure(
            figsize=(_INCHES * (3 if moving else 2) + 0.6, _HIGH), dpi=100.0, facecolor="white",
            layout=layout,
        )  # fmt: skip
        FigureCanvasAgg(canvas)
        expect = data["verdict"]["expect"]
        outlook = "no verdict" if expect == "unclear" else f"expect {expect}"
        title = f"{data['task']}, {when(data['points'][0])}: {outlook}"
        canvas.suptitle(
            title.replace("$", r"\$"), x=0.012, ha="left", fontsize=11.0, fontweight="bold"
        )
        panels = canvas.subplots(1, 3 if moving else 2, squeeze=False)[0]
        _draw_shares(panels[0], data)
        _draw_left(panels[1], data)
        if moving:
            _draw_along(panels[2], data)
        _name_below(canvas, panels)
        return laid_out(canvas)


def _draw_shares(axes: Axes, data: Mapping[str, Any]) -> None:
    layers = list(rows(data["points"][0]))
    centred = by_name(data["centred"])
    for place, layer in enumerate(layers):
        found = [share for share in layer["shares"] if share is not None]
        axes.plot(
            found, [place] * len(found), "|", color=COLOURS[0], alpha=0.35, markersize=11.0,
            label="a client" if place == 0 else None,
        )  # fmt: skip
        for values, mark, colour, label in (
            (layer["share"]["mean"], "o", COLOURS[0], "mean over clients"),
            (layer["forbidden"], "D", COLOURS[1], "loss gradient"),
            (centred.get(layer["name"], {}).get("share", {}).get("mean"), "s", "white",
             "mean, inputs centred"),
        ):  # fmt: skip
            if values is not None:
                axes.plot(
                    [values], [place], mark, color=colour, markersize=6.0,
                    markeredgecolor="black" if colour == "white" else colour,
                    label=label if place == 0 else None,
                )  # fmt: skip
    _dress_rows(axes, layers, "share of gradient energy that is mean component")
    axes.set_xlim(-0.02, 1.02)


def _draw_left(axes: Axes, data: Mapping[str, Any]) -> None:
    point = data["points"][0]
    layers = list(rows(point))
    for offset, colour, label, pairs in (
        (-0.18, COLOURS[2], "distance of gradients", [one["distance"] for one in layers]),
        (0.18, COLOURS[5], "drift of local models",
         [point["drift"].get(one["name"]) for one in layers]),
    ):  # fmt: skip
        lengths = [ratio(pair) for pair in pairs]
        places = [i + offset for i, length in enumerate(lengths) if length is not None]
        if places:
            shown = [length for length in lengths if length is not None]
            axes.barh(places, shown, height=0.34, color=colour, label=label)
    axes.axvline(1.0, color=QUIET_INK, linewidth=0.9)
    _dress_rows(axes, layers, "squared distance of clients, projected over plain")
    axes.tick_params(labelleft=False)


def _draw_along(axes: Axes, data: Mapping[str, Any]) -> None:
    rounds = [point["round"] for point in data["points"]]
    for i, row in enumerate(zip(*(rows(point) for point in data["points"]), strict=True)):
        axes.plot(
            rounds, [layer["share"]["mean"] for layer in row], color=COLOURS[i % len(COLOURS)],
            linestyle=DASHES[i % len(DASHES)], linewidth=1.5, marker="o", markersize=3.0,
            label=row[0]["name"].replace("$", r"\$"),
        )  # fmt: skip
    axes.set_xlabel("round of plain FedAvg")
    axes.set_ylabel("mean component, mean over clients")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0.0, 1.02)
    _plain_frame(axes)


def _name_below(canvas: Figure, panels: Iterable[Axes]) -> None:
    """Say below each panel what its marks are: inside it, they would look like data.

    The figure grows by what that takes.
    """
    most = 0
    # Names and numbers left of the axes take a share of a panel, too.
    room = 72.0 * _INCHES * 0.8 - _BELOW * _LETTERS
    around = (_HANDLE + 2.0) * _LETTERS
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        if not handles:
            continue
        plain = [str(label).replace(r"\$", "$") for label in labels]
        lines = [folded(label, room - around, _LETTERS, cut=True) for label in plain]
        widths = [widest(own, _LETTERS) for own in lines]
        columns = 2 if 2 * (max(widths) + around) < room else 1
        most = max(most, -(-sum(map(len, lines)) // columns))
        axes.legend(
            handles, ["\n".join(own).replace("$", r"\$") for own in lines], frameon=False,
            fontsize=_LETTERS, handlelength=_HANDLE, ncols=columns, loc="upper left",
            bbox_to_anchor=(0.0, 0.0), borderaxespad=_BELOW,
        )  # fmt: skip
    canvas.set_figheight(_HIGH + most * 1.6 * _LETTERS / 72.0)


def _dress_rows(axes: Axes, layers: Sequence[Mapping[str, Any]], label: str) -> None:
    axes.set_yticks(range(len(layers)), [one["name"].replace("$", r"\$") for one in layers])
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(label)
    _plain_frame(axes)


def _plain_frame(axes: Axes) -> None:
    axes.grid(visible=True, axis="both", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
