"""Hold out rows for testing."""

from __future__ import annotations

import numpy as np

from fedzmg.data.columns import Columns, Owners
from fedzmg.errors import InputError
from fedzmg.seeds import stream


def hold_out(columns: Columns, share: float, *, seed: int = 0) -> tuple[Columns, Columns]:
    """Split each client's rows at random into training rows and a share of test rows.

    Every client keeps at least one row to train on. Rows without clients are split as one client's.

    Args:
        columns: all rows.
        share: share of each client's rows, between 0 and 1, rounded to whole rows.
        seed: seed of the random choice.
    """
    if not isinstance(columns, Columns):
        raise InputError(f"columns is a {type(columns).__name__}: pass the result of a reader")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise InputError(f"share = {share!r}: expected a number between 0 and 1, such as 0.2")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise InputError(f"seed = {seed!r}: expected a whole number")
    ends = np.array([0, columns.rows]) if columns.owners is None else columns.owners.offsets
    sizes = np.diff(ends)
    held = np.clip(np.rint(share * sizes).astype(np.int64), 0, np.maximum(sizes - 1, 0))
    if not held.any():
        raise InputError(f"share = {share} of no client's rows is a whole row: use a larger one")
    owner = np.repeat(np.arange(len(sizes)), sizes)
    shuffled = np.lexsort((stream(seed, "partition", "hold out").random(columns.rows), owner))
    first = np.arange(columns.rows) - ends[owner] < held[owner]
    test = np.sort(shuffled[first])
    train = np.sort(shuffled[~first])
    if columns.owners is None:
        return columns.take(train, None), columns.take(test, None)
    names = columns.owners.names
    borders = np.concatenate([[0], np.cumsum(held)])
    return (
        columns.take(train, Owners(names, ends - borders)),
        columns.take(test, Owners(names, borders)),
    )
