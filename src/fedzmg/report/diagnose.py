"""A diagnosis for people: a table by layer, the verdict, and a figure.

Everything starts from the dictionary of a :class:`fedzmg.diagnose.Diagnosis`, as kept in JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedzmg.report.numbers import NONE
from fedzmg.report.style import COLOURS, DASHES, GRID, QUIET_INK, STYLE, laid_out

WIDTH = 106
"""Columns that the table needs."""
_STYLES = {"gain": "bold green", "little": "bold", "loss": "bold yellow"}
_INCHES = 4.6
_CAPTION = (
    "energy: share of clients' gradient energy. mean: share of it that is the mean over the "
    "inputs, ± sd over clients. forbidden: the same of the loss gradient; lost: what of that no "
    "bias can do instead. distance, drift: squared distance of clients' gradients, and of their "
    "local models, after the projection over before. diversity: 1 if clients agree."
)


def table(data: Mapping[str, Any]) -> RenderableType:
    """The first point by layer, the way from there if there is one, and the verdict."""
    parts: list[RenderableType] = [_layers(data)]
    if len(data["points"]) > 1:
        parts.append(_along(data))
    parts.append(_verdict(data["verdict"]))
    return Group(*parts)


def _layers(data: Mapping[str, Any]) -> Table:
    point = data["points"][0]
    out = Table(
        title=f"{data['task']}, {_when(point)}: {_who(data)}",
        title_justify="left",
        title_style="bold",
        caption=_CAPTION + (_steps(data) if point["drift"] else ""),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    out.add_column("layer", overflow="fold", min_width=11)
    heads = ["inputs", "energy", "mean", "forbidden", "lost", "distance", "diversity", "drift"]
    centred = _by_name(data["centred"])
    if centred:
        heads.append("mean if inputs\nare centred")
    for head in heads:
        out.add_column(head, justify="right", no_wrap=True)
    for layer in _rows(point):
        cells = [
            layer["name"],
            f"{layer['inputs']:,}" if layer["inputs"] else "",
            _percent(layer["energy"]),
            _spread(layer["share"]),
            _percent(layer["forbidden"]),
            _percent(layer["lost"]),
            _kept(layer["distance"]),
            _change(layer["diversity"]),
            _kept(point["drift"].get(layer["name"])),
        ]
        if centred:
            cells.append(_percent(centred[layer["name"]]["share"]["mean"]))
        out.add_row(*cells)
    return out


def _along(data: Mapping[str, Any]) -> RenderableType:
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    out.add_column("layer", overflow="fold", min_width=11)
    for point in data["points"]:
        out.add_column(f"{point['round']}", justify="right", no_wrap=True)
    for row in zip(*(_rows(point) for point in data["points"]), strict=True):
        out.add_row(row[0]["name"], *(_percent(layer["share"]["mean"]) for layer in row))
    # Not the table's own title, which is broken where the table is narrow.
    title = "\nMean component along plain FedAvg by round, mean over clients"
    return Group(Text(title, style="bold"), out)


def _verdict(verdict: Mapping[str, Any]) -> Text:
    text = Text.assemble("\nverdict  ", (verdict["summary"], _STYLES[verdict["expect"]]))
    for line in verdict["evidence"]:
        text.append(f"\n  - {line}")
    return text


def figure(data: Mapping[str, Any]) -> Figure:
    """Draw every client's mean share by layer, what the projection leaves, and the way of a run.

    Returns:
        A figure that belongs to no window.
    """
    moving = len(data["points"]) > 1
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
        canvas = Figure(
            figsize=(_INCHES * (3 if moving else 2) + 0.6, 4.4), dpi=100.0, facecolor="white",
            layout=layout,
        )  # fmt: skip
        FigureCanvasAgg(canvas)
        title = f"{data['task']}, {_when(data['points'][0])}: expect {data['verdict']['expect']}"
        canvas.suptitle(
            title.replace("$", r"\$"), x=0.012, ha="left", fontsize=11.0, fontweight="bold"
        )
        panels = canvas.subplots(1, 3 if moving else 2, squeeze=False)[0]
        _draw_shares(panels[0], data)
        _draw_left(panels[1], data)
        if moving:
            _draw_along(panels[2], data)
        return laid_out(canvas)


def _draw_shares(axes: Axes, data: Mapping[str, Any]) -> None:
    layers = list(_rows(data["points"][0]))
    centred = _by_name(data["centred"])
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
    axes.legend(frameon=False, fontsize=8.0, loc="best")


def _draw_left(axes: Axes, data: Mapping[str, Any]) -> None:
    point = data["points"][0]
    layers = list(_rows(point))
    for offset, colour, label, pairs in (
        (-0.18, COLOURS[2], "distance of gradients", [one["distance"] for one in layers]),
        (0.18, COLOURS[5], "drift of local models",
         [point["drift"].get(one["name"]) for one in layers]),
    ):  # fmt: skip
        lengths = [_ratio(pair) for pair in pairs]
        places = [i + offset for i, length in enumerate(lengths) if length is not None]
        if places:
            shown = [length for length in lengths if length is not None]
            axes.barh(places, shown, height=0.34, color=colour, label=label)
    axes.axvline(1.0, color=QUIET_INK, linewidth=0.9)
    _dress_rows(axes, layers, "squared distance of clients, projected over plain")
    axes.tick_params(labelleft=False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8.0, loc="best")


def _draw_along(axes: Axes, data: Mapping[str, Any]) -> None:
    rounds = [point["round"] for point in data["points"]]
    for i, row in enumerate(zip(*(_rows(point) for point in data["points"]), strict=True)):
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
    axes.legend(frameon=False, fontsize=8.0)
    _plain_frame(axes)


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


def _rows(point: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from point["layers"]
    yield point["whole"]


def _by_name(measurement: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    return {} if measurement is None else {one["name"]: one for one in _rows(measurement)}


def _when(point: Mapping[str, Any]) -> str:
    return "before training" if point["round"] == 0 else f"after round {point['round']}"


def _who(data: Mapping[str, Any]) -> str:
    looked = len(data["clients"])
    if looked == data["total"]:
        return f"{looked:,} clients"
    return f"{looked:,} of {data['total']:,} clients (seed {data['seed']})"


def _steps(data: Mapping[str, Any]) -> str:
    return f" Local steps: lr {data['lr']:g}, {data['drifting']} clients."


def _percent(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{100 * value:.1f} %" if 0.0005 < value < 0.0995 else f"{100 * value:.0f} %"


def _spread(share: Mapping[str, Any]) -> str:
    if share["mean"] is None or share["sd"] is None:
        return _percent(share["mean"])
    return f"{100 * share['mean']:.0f} ± {100 * share['sd']:.0f} %"


def _ratio(pair: Mapping[str, Any] | None) -> float | None:
    if pair is None or pair["before"] is None or pair["after"] is None or pair["before"] <= 0.0:
        return None
    return float(pair["after"] / pair["before"])


def _kept(pair: Mapping[str, Any] | None) -> str:
    return _percent(_ratio(pair))


def _change(pair: Mapping[str, Any]) -> str:
    words = (NONE if value is None else f"{value:.3g}" for value in (pair["before"], pair["after"]))
    return " → ".join(words)
