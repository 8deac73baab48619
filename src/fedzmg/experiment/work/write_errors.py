"""What a user is told when results cannot be written, such as on a full disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from fedzmg.errors import InputError


@contextlib.contextmanager
def named_write_errors(place: Path | None) -> Iterator[None]:
    """Turn what the system says into one line with the place and the remedy.

    Args:
        place: where results go; None if nothing is written, so that the error is another one.

    Raises:
        InputError: instead of an error of the system.
    """
    try:
        yield
    except OSError as error:
        if place is None:
            raise
        raise InputError(
            f"cannot write to {place}: {error.strerror or error}; what was kept is whole, run the "
            "same command again once there is room"
        ) from None
