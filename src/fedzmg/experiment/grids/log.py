"""What a grid writes down: lines of JSON by trial and round, only ever added."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from fedzmg.errors import InputError
from fedzmg.files import append, log_bytes
from fedzmg.simulation import Record

Rows: TypeAlias = dict[tuple[int, int], dict[str, Any]]
"""Lines by trial and round."""


class GridTrial(NamedTuple):
    """One training of a grid."""

    options: dict[str, float]
    seed: int

    def line(self, number: int, record: Record, by_test: float | None = None) -> dict[str, Any]:
        """What the log says of an evaluated round."""
        return {
            "trial": number,
            "round": record.round,
            "seed": self.seed,
            **self.options,
            "metric": record.metric,
            **({} if by_test is None else {"test_metric": by_test}),
            "loss": record.loss,
            "train_loss": record.train_loss,
            "diverged": record.diverged,
            "seconds": record.seconds,
        }


class Log:
    """Lines of JSON, only ever added; of lines for the same trial and round the last counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the lines of a round together."""
        text = "".join(f"{json.dumps(_words(row), allow_nan=False)}\n" for row in rows)
        append(self.path, text.encode())

    def lines(self) -> list[dict[str, Any]]:
        """Every line in the order of writing.

        Raises:
            InputError: for a line that is damaged and was not merely broken off.
        """
        found: list[dict[str, Any]] = []
        lines = log_bytes(self.path).splitlines()
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
                for key, value in values.items():
                    if value in ("nan", "inf", "-inf"):
                        values[key] = float(value)
                int(values["trial"]), int(values["round"])
            except (ValueError, TypeError, KeyError, AttributeError):
                if number == len(lines) or not line.endswith(b"}"):
                    continue
                raise InputError(
                    f"{self.path}, line {number} is damaged: restore it, or remove "
                    f"{self.path.parent} to start again"
                ) from None
            found.append(values)
        return found

    def read(self) -> Rows:
        """Every line by trial and round.

        Raises:
            InputError: for a line that is damaged and was not merely broken off.
        """
        return {(line["trial"], line["round"]): line for line in self.lines()}


def _words(row: Mapping[str, Any]) -> dict[str, Any]:
    """Strict JSON has no word for what is not finite, so it is written as a string."""
    return {
        k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
    }
