"""Characters and sequences, against a plain reading of the rules and against counts by hand."""

from __future__ import annotations

import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedzmg.data.text import (
    CHARACTERS,
    NO_TARGET,
    VOCABULARY,
    Remainder,
    Unknown,
    encode,
    sequences,
)


def stored(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Texts end to end as UTF-8, and where each begins."""
    parts = [text.encode() for text in texts]
    text = np.frombuffer(b"".join(parts), dtype=np.uint8)
    return text, np.cumsum([0, *map(len, parts)])


def test_vocabulary_is_the_papers() -> None:
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 65
    assert VOCABULARY == 66
    assert set(CHARACTERS) == set(string.ascii_letters) | set("\n !$&',-.3:;?")
    assert list(CHARACTERS) == sorted(CHARACTERS)
    assert CHARACTERS[0] == "\n"


@pytest.mark.parametrize(("oov", "other"), [("last", 65), ("author", 0)])
def test_unknown_characters_follow_the_rule(oov: Unknown, other: int) -> None:
    # Ids counted by hand: newline 0, space 1, '!' 2, ..., '3' 9, ':' 10, ';' 11, '?' 12, 'A' 13.
    text, offsets = stored(["\n !39A", '"z[é'])
    ids, borders = encode(text, offsets, oov)
    assert ids.tolist() == [0, 1, 2, 9, other, 13, other, 64, other, other]
    assert borders.tolist() == [0, 6, 10]
    assert ids.dtype == np.uint8


@given(
    st.lists(st.text(CHARACTERS + "éÆ…🙂[0", max_size=30), max_size=5),
    st.sampled_from(["last", "author"]),
)
def test_encode_reads_one_id_per_character(texts: list[str], oov: Unknown) -> None:
    ids, offsets = encode(*stored(texts), oov)
    unknown = {"last": 65, "author": 0}[oov]
    for i, text in enumerate(texts):
        expected = [CHARACTERS.find(c) if c in CHARACTERS else unknown for c in text]
        assert ids[offsets[i] : offsets[i + 1]].tolist() == expected
    assert len(offsets) == len(texts) + 1


@given(
    st.lists(st.integers(0, 40), max_size=6), st.integers(1, 9), st.sampled_from(["drop", "pad"])
)
def test_sequences_equal_a_plain_loop(sizes: list[int], length: int, remainder: Remainder) -> None:
    rng = np.random.default_rng(sum(sizes))
    clients = [rng.integers(0, 66, size).astype(np.uint8) for size in sizes]
    ids = np.concatenate([np.zeros(0, np.uint8), *clients])
    cut = sequences(ids, np.cumsum([0, *sizes]), length, remainder)
    for i, stream in enumerate(clients):
        expected = [
            stream[first : first + length + 1] for first in range(0, len(stream), length + 1)
        ]
        expected = [
            w for w in expected if len(w) == length + 1 or (remainder == "pad" and len(w) > 1)
        ]
        mine = slice(cut.offsets[i], cut.offsets[i + 1])
        assert cut.offsets[i + 1] - cut.offsets[i] == len(expected)
        for x, y, window in zip(cut.inputs[mine], cut.targets[mine], expected, strict=True):
            real = len(window) - 1
            assert x[:real].tolist() == window[:-1].tolist()
            assert y[:real].tolist() == window[1:].tolist()
            assert (y[real:] == NO_TARGET).all()
    assert cut.inputs.shape == (cut.offsets[-1], length) == cut.targets.shape
    assert cut.inputs.dtype == np.uint8


def test_counts_by_hand() -> None:
    """101 characters make one sequence of 100; the paper's rule needs 808 for a batch of 8."""
    sizes = [0, 1, 100, 101, 201, 202, 203, 204, 808, 807]
    ids = np.zeros(sum(sizes), np.uint8)
    borders = np.cumsum([0, *sizes])
    dropped = np.diff(sequences(ids, borders, 100).offsets)
    assert dropped.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 8, 7]
    padded = sequences(ids, borders, 100, "pad")
    assert np.diff(padded.offsets).tolist() == [0, 0, 1, 1, 2, 2, 2, 3, 8, 8]
    real = (padded.targets != NO_TARGET).sum(1)
    assert np.flatnonzero(real != 100).tolist() == [0, 3, 10, 26]
    assert real[[0, 3, 10, 26]].tolist() == [99, 99, 1, 99]
