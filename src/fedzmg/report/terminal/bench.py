"""Timings as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fedzmg.report.terminal.stacked import Column, stacked


def line(timing: Mapping[str, Any]) -> str:
    """One timing as one line, while the next is being measured."""
    return f"{_name(timing)}: {timing['trial_round_ms']:.2f} ms per trial and round"


def table(data: Mapping[str, Any], width: int) -> RenderableType:
    """All timings side by side.

    Args:
        data: what ``fedzmg bench --json`` prints.
        width: of the terminal; columns that find no room go on below, with the names again.
    """
    facts, timings = data["environment"], data["timings"]
    title = Text(f"{facts['machine']}, torch {facts['torch']}\n", style="bold")
    names = Column("workload", [_name(timing) for timing in timings])
    columns = [Column(head, [cell(timing) for timing in timings]) for head, cell in _CELLS.items()]
    return Group(title, *stacked(names, columns, width))


def _name(timing: Mapping[str, Any]) -> str:
    return f"{timing['workload']} {timing['engine']} {timing['precision']} x {timing['trials']}"


def _outside(timing: Mapping[str, Any]) -> str:
    share = timing.get("outside_steps")
    return "" if share is None else f"{share:.1%}"


_CELLS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "ms / round": lambda t: f"{t['round_ms']:.1f}",
    "ms / trial round": lambda t: f"{t['trial_round_ms']:.2f}",
    "steps / s": lambda t: f"{t['steps_per_second']:,.0f}",
    "of matmul": lambda t: f"{t['matmul_share']:.1%}",
    "of memory": lambda t: f"{t['bandwidth_share']:.1%}",
    "over floor": lambda t: f"{t['over_floor']:.1f} x",
    "not steps": _outside,
    "peak MiB": lambda t: f"{t['peak_mib']:,.0f}",
    "padded": lambda t: f"{t['padded_over_useful']:.2f}",
    "cold s": lambda t: f"{t['cold_seconds']:.1f}",
}
