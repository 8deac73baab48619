"""A diagnosis on a terminal: a table by layer, the way of a run, and the verdict.

Everything starts from the dictionary of a :class:`fedzmg.diagnose.Diagnosis`, as kept in JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedzmg.report.terminal.stacked import Column, stacked
from fedzmg.results.diagnosis import by_name, ratio, rows, when
from fedzmg.results.formatting import NONE

_STYLES = {"gain": "bold green", "little": "bold", "loss": "bold yellow", "unclear": "bold"}
_CAPTION = (
    "energy: share of clients' gradient energy. mean: share of it that is the mean over the "
    "inputs, ± sd over clients. forbidden: the same of the loss gradient; lost: what of that no "
    "bias can do instead. distance, drift: squared distance of clients' gradients, and of their "
    "local models, after the projection over before. diversity: 1 if clients agree."
)


def table(data: Mapping[str, Any], width: int) -> RenderableType:
    """The first point by layer, the way from there if there is one, and the verdict.

    Args:
        data: a diagnosis.
        width: of the terminal; columns that find no room go on below, with the names again.
    """
    point = data["points"][0]
    names = Column("layer", [layer["name"] for layer in rows(point)])
    steps = f" Local steps: lr {data['lr']:g}, {data['drifting']} clients."
    parts: list[RenderableType] = [
        Text(f"{data['task']}, {when(point)}: {_who(data)}\n", style="bold"),
        *stacked(names, _measured(data), width),
        Text(_CAPTION + (steps if point["drift"] else ""), style="table.caption"),
        Text(),
    ]
    if len(data["points"]) > 1:
        title = "Mean component along plain FedAvg by round, mean over clients\n"
        parts += [Text(title, style="bold"), *stacked(names, _along(data), width)]
    return Group(*parts, *_verdict(data["verdict"]))


def _measured(data: Mapping[str, Any]) -> list[Column]:
    point, centred = data["points"][0], by_name(data["centred"])
    layers = list(rows(point))
    columns = {
        "inputs": [f"{layer['inputs']:,}" if layer["inputs"] else "" for layer in layers],
        "energy": [_percent(layer["energy"]) for layer in layers],
        "mean": [_spread(layer["share"]) for layer in layers],
        "forbidden": [_percent(layer["forbidden"]) for layer in layers],
        "lost": [_percent(layer["lost"]) for layer in layers],
        "distance": [_percent(ratio(layer["distance"])) for layer in layers],
        "diversity": [_change(layer["diversity"]) for layer in layers],
        "drift": [_percent(ratio(point["drift"].get(layer["name"]))) for layer in layers],
    }
    if centred:
        columns["mean if inputs\nare centred"] = [
            _percent(centred[layer["name"]]["share"]["mean"]) for layer in layers
        ]
    return [Column(head, cells) for head, cells in columns.items()]


def _along(data: Mapping[str, Any]) -> list[Column]:
    return [
        Column(str(point["round"]), [_percent(layer["share"]["mean"]) for layer in rows(point)])
        for point in data["points"]
    ]


def _verdict(verdict: Mapping[str, Any]) -> tuple[RenderableType, ...]:
    evidence = Table.grid(padding=(0, 1, 0, 0))
    for line in verdict["evidence"]:
        evidence.add_row("  -", Text(line))
    summary = Text.assemble("verdict  ", (verdict["summary"], _STYLES[verdict["expect"]]))
    return summary, evidence


def _who(data: Mapping[str, Any]) -> str:
    looked = len(data["clients"])
    if looked == data["total"]:
        return f"{looked:,} client{'s' * (looked != 1)}"
    return f"{looked:,} of {data['total']:,} clients (seed {data['seed']})"


def _percent(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{100 * value:.1f} %" if 0.0005 < value < 0.0995 else f"{100 * value:.0f} %"


def _spread(share: Mapping[str, Any]) -> str:
    if share["mean"] is None or share["sd"] is None:
        return _percent(share["mean"])
    return f"{100 * share['mean']:.0f} ± {100 * share['sd']:.0f} %"


def _change(pair: Mapping[str, Any]) -> str:
    words = (NONE if value is None else f"{value:.3g}" for value in (pair["before"], pair["after"]))
    return " → ".join(words)
