"""What our own files hold: TOML, JSON and logs of JSON lines, each with one reader for all.

Runs, grids and reports read the same files, so what counts as damage, what is no more than a line
that a crash broke off, and the words for both are the same everywhere.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fedzmg.errors import InputError
from fedzmg.storage.files import log_bytes

T = TypeVar("T")

RESTORE = "restore or remove it"
"""The usual way out of damage; callers who know a better one name it."""


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds.

    Raises:
        InputError: if it cannot be read.
    """
    text = _text(path, "TOML", "correct or restore it")
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _invalid(path, "TOML", error, "correct or restore it") from None


def read_json(path: Path, remedy: str = RESTORE) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: the file.
        remedy: what a user can do about damage.

    Raises:
        InputError: if there is none.
    """
    text = _text(path, "JSON", remedy)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(path, "JSON", error, remedy) from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no JSON object: {remedy}")
    return values


def log_lines(path: Path, parse: Callable[[Any], T], remedy: str = RESTORE) -> list[T]:
    """The lines of a log in the order of writing; one that a crash broke off is no damage.

    Args:
        path: the log, which may be compressed; without a file there are no lines.
        parse: makes something of a line's values. A ``ValueError``, ``TypeError``, ``KeyError`` or
            ``AttributeError`` says that they are not what they should be.
        remedy: what a user can do about damage.

    Raises:
        InputError: for a line that is damaged and was not merely broken off.
    """
    lines = log_bytes(path).splitlines()
    wrong = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
    try:
        # All in one go is much faster; whatever is wrong gets a closer look.
        return list(map(parse, json.loads(b"[" + b",".join(lines) + b"]")))
    except wrong:
        pass
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(parse(json.loads(line)))
        except wrong:
            # The next line of a log that goes on supersedes what a crash broke off.
            if number < len(lines) and line.endswith(b"}"):
                raise InputError(f"{path}, line {number} is damaged: {remedy}") from None
    return found


def flat(values: Mapping[str, Any], *, keep_empty: bool = False) -> dict[str, Any]:
    """Tables in tables by dotted names.

    Args:
        values: a table.
        keep_empty: whether a table without anything in it stays; it has no names of its own.

    >>> flat({"task": "digits", "client": {"lr": 0.1, "decay": {"rate": 0.9}}, "server": {}})
    {'task': 'digits', 'client.lr': 0.1, 'client.decay.rate': 0.9}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(value, Mapping) or (keep_empty and not value):
            found[key] = value
        else:
            inner = flat(value, keep_empty=keep_empty)
            found |= {f"{key}.{name}": v for name, v in inner.items()}
    return found


def json_words(value: Any) -> Any:
    """The same, ready for strict JSON: a number that is not finite becomes a word.

    ``float`` reads the word back, so nothing is lost.

    >>> json_words({"loss": float("nan"), "spread": (1.0, float("inf"))})
    {'loss': 'nan', 'spread': [1.0, 'inf']}
    """
    return _strict(value, str)


def json_nulls(value: Any) -> Any:
    """The same, ready for strict JSON: a number that is not finite becomes null.

    >>> json_nulls({"loss": float("nan"), "spread": (1.0, float("inf"))})
    {'loss': None, 'spread': [1.0, None]}
    """
    return _strict(value, lambda _: None)


def _strict(value: Any, instead: Callable[[float], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(inner, instead) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner, instead) for inner in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(path: Path, kind: str, remedy: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}; see that it is there and may be read"
        ) from None
    except UnicodeDecodeError as error:
        raise _invalid(path, kind, error, remedy) from None


def _invalid(path: Path, kind: str, error: Exception, remedy: str) -> InputError:
    return InputError(f"{path} is not valid {kind} ({error}): {remedy}")
