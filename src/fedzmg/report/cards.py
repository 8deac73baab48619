"""Definition cards for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedzmg.report.tables import bytes_text


def card(data: Mapping[str, Any], task: str | None = None) -> RenderableType:
    """Draw what ``fedzmg.algorithms.card`` gathered."""
    parts: list[RenderableType] = [
        Text(f"{data['name']}  ({data['source']})", style="bold"),
        Text(data["summary"]),
    ]
    if data["inferred"]:
        parts.append(Text(f"inferred: {data['inferred']}", style="yellow"))
    more = "also: " + ", ".join(data["wrapper_options"])
    parts += [Text(), Text(data["about"]), Text(), _options(data), Text(more, style="dim")]
    parts += [Text(), _costs(data, task)]
    return Group(*parts)


def _options(data: Mapping[str, Any]) -> Table:
    table = Table(title="Options (--set KEY=VALUE)", title_justify="left")
    for head in ("key", "default", "range", "what it is"):
        table.add_column(head, overflow="fold")
    for option in data["options"]:
        default = option["default"]
        table.add_row(
            option["key"],
            "absent" if default is None else str(default),
            option["range"],
            option["doc"],
        )
    return table


def _costs(data: Mapping[str, Any], task: str | None) -> Table:
    costs = data["costs"]
    table = Table(title="Costs, scalars left out", title_justify="left")
    for head in ("", "models", *([f"{task}"] if task else [])):
        table.add_column(head, justify="right" if head else "left")
    for name, what in {
        "down": "travels to a client, every round",
        "up": "travels back",
        "client_keeps": "kept by a client between rounds",
        "server_keeps": "kept by the server besides the model",
    }.items():
        size = [bytes_text(costs[f"{name}_bytes"])] if f"{name}_bytes" in costs else []
        table.add_row(what, f"{costs[name]:g}", *size)
    return table
