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
    close = _close(name, names)
    hint = f": did you mean {close[0]!r}?" if close else ""
    return InputError(f"unknown {kind} {name!r}{hint} (known: {', '.join(names)})")


def _close(name: str, names: list[str]) -> list[str]:
    """The name that was meant, if one is likely.

    >>> known = ["client.form", "client.lr", "protocol.cohort"]
    >>> [_close(name, known) for name in ("cohort", "server.lr", "client.lrr", "client.mu")]
    [['protocol.cohort'], ['client.lr'], ['client.lr'], []]
    """
    table, _, last = name.rpartition(".")
    # "cohort" is meant for "protocol.cohort".
    ends = [found for found in names if found.rpartition(".")[2] == last]
    # What all names of a table begin with does not make one of them near.
    inside = {found.rpartition(".")[2]: found for found in names if found.startswith(f"{table}.")}
    if ends or not (table and inside):
        return ends or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return [inside[near] for near in difflib.get_close_matches(last, inside, n=1, cutoff=0.5)]
