"""Pixels that were stored as fractions: checked, and brought back to the bytes they came from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Array
from fedzmg.errors import InputError

NOT_BYTES = "values are not multiples of 1/255: kept as float32, which needs four times the room"
"""What to say of floats that :func:`as_bytes` does not take."""

_OFF = 1e-3


def check_fractions(rows: Array, place: Callable[[int], str]) -> None:
    """Refuse values that are not from 0 to 1; ``place`` names a row.

    Raises:
        InputError: for the first row with such a value, or with one that is not finite.
    """
    # NaN is the smallest and the largest of its array, and no comparison holds for it.
    if rows.size == 0 or (rows.min() >= 0 and rows.max() <= 1):
        return
    wrong = ~((rows >= 0) & (rows <= 1))
    row = int(np.argmax(wrong.reshape(len(rows), -1).any(axis=1)))
    value = float(rows[row][wrong[row]].flat[0])
    said = f"{value:g}" if np.isfinite(value) else "NaN" if np.isnan(value) else "infinity"
    raise InputError(f"{place(row)} has a pixel of {said}: expected values from 0 to 1")


def as_bytes(fractions: Array) -> npt.NDArray[np.uint8] | None:
    """Values from 0 to 1 as 0 to 255; None if one of them is no multiple of 1/255.

    >>> as_bytes(np.array([0.0, 0.2, 1.0])).tolist()
    [0, 51, 255]
    >>> as_bytes(np.array([0.5])) is None
    True
    """
    scaled = fractions * fractions.dtype.type(255)
    whole: Array = np.rint(scaled)
    scaled -= whole
    if scaled.size and not (scaled.max() <= _OFF and scaled.min() >= -_OFF):
        return None
    return whole.astype(np.uint8)
