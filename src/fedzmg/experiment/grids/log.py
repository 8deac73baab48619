"""Logs of grids: JSON lines by trial and round, append-only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from fedzmg.storage.formats import log_lines

Rows: TypeAlias = dict[tuple[int, int], dict[str, Any]]
"""Lines of a log by trial and round."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a grid's log in the order of writing.

    Raises:
        InputError: for a damaged line.
    """
    return log_lines(path, _parsed, f"restore it, or remove {path.parent} to start again")


def read_rows(path: Path) -> Rows:
    """Read a grid's log by trial and round; a later line supersedes an earlier one."""
    return {(line["trial"], line["round"]): line for line in read_lines(path)}


def _parsed(values: dict[str, Any]) -> dict[str, Any]:
    int(values["trial"]), int(values["round"])
    return {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in values.items()}
