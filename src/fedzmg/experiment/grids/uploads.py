"""Clients of a grid with unusual uploads: a line for the first one, and when ten times larger."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedzmg.simulation import Record
from fedzmg.storage.formats import append_log, log_lines

LOG = "uploads.jsonl"
ACTIONS = ("flagged", "rejected")
MOST_CLIENTS, MOST_LOGGED = 50, 100_000
"""Clients of a point that are named, and lines of the log, at most."""


class UploadLog:
    """Largest unusual upload of every client, by trial."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOG
        self._lines = 0
        self._known: dict[tuple[int, str, str], dict[str, Any]] = {}
        """The last line by trial, action and client."""
        remedy = f"restore it, or remove {directory} to start again"
        self._take(log_lines(self._path, _checked, remedy))

    def _take(self, lines: Collection[dict[str, Any]]) -> None:
        self._lines += len(lines)
        self._known |= {(line["trial"], line["action"], line["client"]): line for line in lines}

    def add(self, records: Mapping[int, Record]) -> None:
        """Log what is new in a round; ``records`` are those of trials that still train."""
        lines = [
            _line(trial, record.round, client, action, ratio)
            for trial, record in records.items()
            for action in ACTIONS
            for client, ratio in getattr(record, action)
            if (known := self._known.get((trial, action, client))) is None
            or math.inf > known["ratio"] <= ratio / 10
        ]
        lines = lines[: max(MOST_LOGGED - self._lines, 0)]
        if lines:
            append_log(self._path, lines)
            self._take(lines)

    def by_point(self, seeds: int) -> dict[int, list[dict[str, Any]]]:
        """Return the clients of every point, flagged ones first, each with its largest upload."""
        found: dict[int, dict[tuple[str, str], dict[str, Any]]] = defaultdict(dict)
        for (trial, action, client), line in self._known.items():
            largest = found[trial // seeds].setdefault((action, client), line)
            if (line["ratio"], -line["round"]) > (largest["ratio"], -largest["round"]):
                found[trial // seeds][action, client] = line
        return {point: _shown(clients.values()) for point, clients in found.items()}


def _shown(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    order = sorted(lines, key=lambda line: (line["action"], -line["ratio"], line["client"]))
    return [{k: v for k, v in line.items() if k != "trial"} for line in order[:MOST_CLIENTS]]


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    trial, client, action = int(values["trial"]), str(values["client"]), str(values["action"])
    ratio, round_ = float(values["ratio"]), int(values["round"])
    if action not in ACTIONS or math.isnan(ratio):
        raise ValueError(action)
    return _line(trial, round_, client, action, ratio)


def _line(trial: int, round_: int, client: str, action: str, ratio: float) -> dict[str, Any]:
    return {"trial": trial, "round": round_, "client": client, "action": action, "ratio": ratio}
