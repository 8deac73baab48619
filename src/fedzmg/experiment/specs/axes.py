"""The axes of a grid: numbers to try, by option."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from fedzmg.errors import InputError
from fedzmg.storage.formats import flat

PAPER_RATES = [10.0 ** (-3 + i / 2) for i in range(9)]
"""The paper's learning rates, for clients and servers: half decades from 1e-3 to 10."""

Axes: TypeAlias = dict[str, list[float]]


def dotted(axes: Any) -> Any:
    """``{"client": {"lr": [...]}}``, as TOML reads ``client.lr = [...]``, with dotted keys."""
    if not isinstance(axes, Mapping):
        return axes
    found = flat(axes, keep_empty=True)
    for key, value in found.items():
        if isinstance(value, str) and value != "paper":
            raise InputError(f'{key} = {value!r}: expected a list of numbers, or "paper"')
    return {key: PAPER_RATES if v == "paper" else v for key, v in found.items()}


def checked(axes: Axes) -> Axes:
    """The same axes in rising order.

    Raises:
        InputError: for a list that is empty, repeats a number or holds one that is not finite.
    """
    for key, values in axes.items():
        if not values or len(set(values)) != len(values) or not all(map(math.isfinite, values)):
            raise InputError(f"{key} = {values!r}: give at least one finite number, each once")
    return {key: sorted(values) for key, values in axes.items()}
