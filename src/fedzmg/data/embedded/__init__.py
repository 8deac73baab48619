"""Small real datasets that ship with the package; ``ORIGIN.md`` documents their sources."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Digits(NamedTuple):
    """Handwritten digits: uint8 [n, 28, 28], dark ink on 255; 8,000 to train, 2,000 to test."""

    train_x: npt.NDArray[np.uint8]
    train_y: npt.NDArray[np.int64]
    test_x: npt.NDArray[np.uint8]
    test_y: npt.NDArray[np.int64]


class Plays(NamedTuple):
    """Shakespeare's plays, sorted by speaker.

    The words of role ``i`` are ``text[offsets[i]:offsets[i + 1]]``: its speeches in the order of
    the play, with a newline between two lines and between two speeches.
    """

    text: npt.NDArray[np.uint8]  # all speeches as ASCII codes
    offsets: npt.NDArray[np.int64]  # start of each role in the text, and the length of the text
    roles: tuple[str, ...]  # unique names, of play and speaker, in alphabetical order


def _load(name: str) -> dict[str, npt.NDArray[Any]]:
    with np.load(Path(__file__).with_name(name), allow_pickle=False) as bundle:
        return dict(bundle)


def load_digits() -> Digits:
    """Load 10,000 MNIST digits, 8,000 to train on and 2,000 to test on."""
    arrays = _load("digits.npz")
    labels = {name: arrays[name].astype(np.int64) for name in ("train_y", "test_y")}
    return Digits(**{**arrays, **labels})


def load_plays() -> Plays:
    """Load the speeches of all roles in Shakespeare's plays."""
    arrays = _load("plays.npz")
    return Plays(arrays["text"], arrays["offsets"], tuple(map(str, arrays["role"])))
