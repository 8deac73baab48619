"""What a grid writes down: lines of JSON by trial and round, only ever added."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from fedzmg.simulation import Record
from fedzmg.storage.files import append
from fedzmg.storage.formats import json_words, log_lines

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
        text = "".join(f"{json.dumps(json_words(row), allow_nan=False)}\n" for row in rows)
        append(self.path, text.encode())

    def lines(self) -> list[dict[str, Any]]:
        """Every line in the order of writing.

        Raises:
            InputError: for a line that is damaged and was not merely broken off.
        """
        return log_lines(
            self.path, _parsed, f"restore it, or remove {self.path.parent} to start again"
        )

    def read(self) -> Rows:
        """Every line by trial and round.

        Raises:
            InputError: for a line that is damaged and was not merely broken off.
        """
        return {(line["trial"], line["round"]): line for line in self.lines()}


def _parsed(values: dict[str, Any]) -> dict[str, Any]:
    int(values["trial"]), int(values["round"])
    return {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in values.items()}
