"""The one error a user can cause, and the nearest-name hint that goes with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave cannot be used; the message is one line with the value and a remedy.

    The command line prints it and exits with code 2; Python callers catch a ``ValueError``.
    """


class Interrupted(Exception):
    """Ctrl-C, after everything finished so far was kept."""

    def __init__(self, done: int, rounds: int) -> None:
        super().__init__()
        self.done, self.rounds = done, rounds


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """An ``InputError`` for a name that is not in a table, with the nearest known name.

    >>> str(unknown("task", "digit", ["digits", "plays"]))
    "unknown task 'digit': did you mean 'digits'? (known: digits, plays)"
    >>> str(unknown("task", "xyz", ["digits", "plays"]))
    "unknown task 'xyz' (known: digits, plays)"
    """
    names = sorted(known)
    # "cohort" is meant for "protocol.cohort": compare with the last part of a name, too.
    ends = [known_name for known_name in names if known_name.rpartition(".")[2] == name]
    close = ends or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f": did you mean {close[0]!r}?" if close else ""
    return InputError(f"unknown {kind} {name!r}{hint} (known: {', '.join(names)})")
