"""Timings as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

WIDTH = 175
"""Columns that the table needs; cut off, its figures would be worth nothing."""


def line(timing: Mapping[str, Any]) -> str:
    """One timing as one line, while the next is being measured."""
    return (
        f"{timing['workload']} {timing['engine']} {timing['precision']} x {timing['trials']}: "
        f"{timing['trial_round_ms']:.2f} ms per trial and round"
    )


def table(data: Mapping[str, Any]) -> Table:
    """All timings side by side."""
    facts = data["environment"]
    title = f"{facts['machine']}, torch {facts['torch']}"
    out = Table(title=title, title_justify="left", title_style="bold")
    for name in ("workload", "engine", "precision"):
        out.add_column(name)
    for name in (
        "trials", "ms / round", "ms / trial round", "steps / s", "of matmul", "of memory",
        "over floor", "not steps", "peak MiB", "padded", "cold s",
    ):  # fmt: skip
        out.add_column(name, justify="right")
    for t in data["timings"]:
        out.add_row(
            t["workload"], t["engine"], t["precision"], str(t["trials"]),
            f"{t['round_ms']:.1f}", f"{t['trial_round_ms']:.2f}", f"{t['steps_per_second']:,.0f}",
            f"{t['matmul_share']:.1%}", f"{t['bandwidth_share']:.1%}", f"{t['over_floor']:.1f} x",
            "" if t.get("outside_steps") is None else f"{t['outside_steps']:.1%}",
            f"{t['peak_mib']:,.0f}", f"{t['padded_over_useful']:.2f}", f"{t['cold_seconds']:.1f}",
        )  # fmt: skip
    return out
