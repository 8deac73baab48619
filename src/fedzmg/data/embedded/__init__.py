"""Small real datasets that ship with the package and load without a download.

``ORIGIN.md`` in this folder says where they come from and how they were selected.
"""

from __future__ import annotations

import hashlib
import io
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Digits", "Plays", "load_digits", "load_plays"]

_FILES = resources.files(__name__)

_SHA256 = {
    "digits.npz": "46842d8b191f8c75fed4b68479e399527db308d344f78150eb16b3925c7ab92d",
    "plays.npz": "98aca40b43765b7ffaf79ffec2cf658283542edecc2c92f86e48b47ef899476c",
}


class Digits(NamedTuple):
    """Handwritten digits, as many of each class.

    Attributes:
        train_x: Training images, uint8 of shape [8000, 28, 28]; the background is 255 and the
            ink is dark.
        train_y: Training labels, int64 of shape [8000], from 0 to 9.
        test_x: Test images, uint8 of shape [2000, 28, 28].
        test_y: Test labels, int64 of shape [2000].
    """

    train_x: npt.NDArray[np.uint8]
    train_y: npt.NDArray[np.int64]
    test_x: npt.NDArray[np.uint8]
    test_y: npt.NDArray[np.int64]


class Plays(NamedTuple):
    """Shakespeare's plays, sorted by who speaks.

    The words of role ``i`` are ``text[offsets[i]:offsets[i + 1]]``: its speeches in the order of
    the play, with a newline between two lines and between two speeches.

    Attributes:
        text: All speeches as ASCII codes, uint8.
        offsets: Where each role starts in the text, int64 of shape [roles + 1]; the last entry
            is the length of the text.
        roles: Unique name of each role, made of play and speaker, in alphabetical order.
    """

    text: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    roles: tuple[str, ...]


def _load(name: str) -> dict[str, npt.NDArray[Any]]:
    """Read an embedded file.

    Args:
        name: File name inside this package.

    Returns:
        Its arrays by name.

    Raises:
        ValueError: If the file is missing or is not the one that was released.
    """
    try:
        content = _FILES.joinpath(name).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"embedded file {name} is missing: reinstall fedzmg") from None
    if hashlib.sha256(content).hexdigest() != _SHA256[name]:
        raise ValueError(f"embedded file {name} is damaged: reinstall fedzmg")
    with np.load(io.BytesIO(content), allow_pickle=False) as bundle:
        return {key: bundle[key] for key in bundle.files}


def load_digits() -> Digits:
    """Load 10,000 MNIST digits, 8,000 to train on and 2,000 to test on.

    Returns:
        The images and labels.

    Raises:
        ValueError: If the embedded file is missing or damaged.
    """
    arrays = _load("digits.npz")
    return Digits(
        train_x=arrays["train_x"],
        train_y=arrays["train_y"].astype(np.int64),
        test_x=arrays["test_x"],
        test_y=arrays["test_y"].astype(np.int64),
    )


def load_plays() -> Plays:
    """Load the speeches of all roles in Shakespeare's plays.

    Returns:
        The text and the roles.

    Raises:
        ValueError: If the embedded file is missing or damaged.
    """
    arrays = _load("plays.npz")
    return Plays(
        text=arrays["text"],
        offsets=arrays["offsets"],
        roles=tuple(str(name) for name in arrays["role"]),
    )
