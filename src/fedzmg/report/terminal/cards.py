"""Definition cards for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedzmg.report.terminal.prose import prose
from fedzmg.report.terminal.tables import listing
from fedzmg.results.formatting import bytes_text


def card(data: Mapping[str, Any], width: int, task: str | None = None) -> RenderableType:
    """Draw what ``fedzmg.algorithms.card`` gathered."""
    parts: list[RenderableType] = [
        Text(f"{data['name']}  ({data['source']})", style="bold"),
        Text(data["summary"]),
    ]
    if data["inferred"]:
        parts.append(Text(f"inferred: {data['inferred']}", style="yellow"))
    parts += [Text(), Text(prose(data["about"], width)), Text(), _options(data, width)]
    if data["wrapper_options"]:
        parts.append(Text("also: " + ", ".join(data["wrapper_options"]), style="dim"))
    parts += [Text(), _costs(data, width, task)]
    return Group(*parts)


def _options(data: Mapping[str, Any], width: int) -> Table:
    rows = [
        (
            option["key"],
            "absent" if option["default"] is None else str(option["default"]),
            option["range"],
            option["doc"],
        )
        for option in data["options"]
    ]
    heads = ("key", "default", "range", "what it is")
    return listing(heads, rows, width, title="Options (--set KEY=VALUE)")


def _costs(data: Mapping[str, Any], width: int, task: str | None) -> Table:
    costs, sizes = data["costs"], ["models", *([task] if task else [])]
    rows = []
    for name, what in {
        "down": "travels to a client, every round",
        "up": "travels back",
        "client_keeps": "kept by a client between rounds",
        "server_keeps": "kept by the server besides the model",
    }.items():
        size = [bytes_text(costs[f"{name}_bytes"])] if f"{name}_bytes" in costs else []
        rows.append([what, f"{costs[name]:g}", *size])
    return listing(["", *sizes], rows, width, title="Costs, scalars left out", right=sizes)
