"""Encode characters as ids, and cut text, all clients end to end, into equal sequences."""

from string import ascii_letters
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Ids

Bytes: TypeAlias = npt.NDArray[np.uint8]
CHARACTERS = "".join(sorted("\n !$&',-.3:;?" + ascii_letters))  # the paper's 65, as their ids
VOCABULARY = len(CHARACTERS) + 1  # number of ids: the known characters, and one for every other
NO_TARGET = -1  # target where a padded sequence has no next character

Unknown: TypeAlias = Literal["last", "author"]  # id of unknown characters; author: the paper's 0
Remainder: TypeAlias = Literal["drop", "pad"]  # of a text that does not fill a sequence


def encode(text: Bytes, offsets: Ids, oov: Unknown = "last") -> tuple[Bytes, Ids]:
    """Encode UTF-8 text, one id per character; return the ids and the offsets between them."""
    table = np.full(256, VOCABULARY - 1 if oov == "last" else 0, dtype=np.uint8)
    table[np.frombuffer(CHARACTERS.encode(), dtype=np.uint8)] = np.arange(len(CHARACTERS))
    # All bytes of a character but its first have 10 as their highest bits.
    follows = (text & 0xC0) == 0x80
    if not follows.any():
        return table[text], offsets
    first = ~follows
    return table[text[first]], np.concatenate([[0], np.cumsum(first)])[offsets]


class Sequences(NamedTuple):
    """Windows of ``length + 1`` characters by client; inputs lack the last, targets the first."""

    inputs: Bytes
    targets: Ids  # next character of each input, or NO_TARGET
    offsets: Ids  # windows of client i: offsets[i] : offsets[i + 1]; maybe none


def sequences(ids: Bytes, offsets: Ids, length: int, remainder: Remainder = "drop") -> Sequences:
    """Cut every client's text into disjoint windows of ``length + 1`` characters."""
    size = length + 1
    full, rest = np.divmod(np.diff(offsets), size)
    counts = full + (rest > 1) if remainder == "pad" else full
    borders = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    starts = offsets[owner] + (np.arange(borders[-1]) - borders[owner]) * size
    real = np.minimum(offsets[owner + 1] - starts, size)
    column = np.arange(size)
    # Padding repeats the last real character, so every index stays inside of the client's text.
    windows = ids[starts[:, None] + np.minimum(column, real[:, None] - 1)]
    targets = np.where(column[1:] < real[:, None], windows[:, 1:], np.int64(NO_TARGET))
    return Sequences(windows[:, :-1], targets, borders)
