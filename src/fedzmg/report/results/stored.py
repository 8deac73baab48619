"""Files of run directories, read whole; trouble is one line with the file's name."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from fedzmg.errors import InputError


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds.

    Raises:
        InputError: if it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InputError: if there is none.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no JSON object: restore or remove it")
    return values


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"{path} cannot be read ({error}): restore or remove it")
