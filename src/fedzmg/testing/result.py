"""Result of a conformance check: rows, a table in plain text, and user tracebacks."""

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedzmg.errors import InputError
from fedzmg.results.formatting import aligned
from fedzmg.simulation.rule_errors import failing_method

_LIBRARIES = tuple(str(Path(str(m)).parent) for m in (torch.__file__, Path(__file__).parent))


class Violation(Exception):
    """A property that does not hold; the message has the numbers."""


class CheckRow(NamedTuple):
    """Result of one property."""

    property: str
    passed: bool
    seconds: float
    detail: str = ""  # one line: numbers, or the reason of a failure
    traceback: str = ""  # user code that raised an error


@dataclass(frozen=True)
class CheckResult:
    """Result of :func:`fedzmg.testing.check`."""

    algorithm: str
    rows: tuple[CheckRow, ...]

    @property
    def ok(self) -> bool:
        return all(row.passed for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        rows = [row._asdict() for row in self.rows]
        return {"algorithm": self.algorithm, "ok": self.ok, "rows": rows}

    def __str__(self) -> str:
        """Show a table, user tracebacks without repetitions, and the number of properties."""
        seen = [row.detail for row in self.rows]
        again = [not row.passed and row.detail in seen[:i] for i, row in enumerate(self.rows)]
        columns = {
            "property": [row.property for row in self.rows],
            "result": ["passed" if row.passed else "FAILED" for row in self.rows],
            "time": [f"{row.seconds:.1f} s" for row in self.rows],
            "": ["the same error" if a else text for a, text in zip(again, seen, strict=True)],
        }
        tracebacks = dict.fromkeys(row.traceback for row in self.rows if row.traceback)
        passed = sum(row.passed for row in self.rows)
        summary = f"{self.algorithm}: {passed} of {len(self.rows)} properties hold"
        return "\n".join([aligned(columns, words=4), *tracebacks, summary])


def failed_row(name: str, seconds: float, error: Exception) -> CheckRow:
    """Describe an error: a violated property, or a mistake in a rule with file and method."""
    if isinstance(error, Violation):
        return CheckRow(name, False, seconds, str(error))
    cause = error.__cause__ if isinstance(error, InputError) else error
    trace = "" if cause is None else _user_traceback(cause)
    if isinstance(error, InputError):
        return CheckRow(name, False, seconds, str(error), trace)
    place = failing_method(error.__traceback__)
    reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return CheckRow(name, False, seconds, f"{place}: {reason}" if place else reason, trace)


def _user_traceback(error: BaseException) -> str:
    """Format the frames outside of torch and this package, or all if there are no others."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    if not own:
        return "".join(traceback.format_exception(error)).rstrip()
    lines = [*traceback.format_list(own), *traceback.format_exception_only(error)]
    return "Traceback (most recent call last):\n" + "".join(lines).rstrip()
