"""Every client's rows are parted, none is lost, and the seed decides which are held out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedzmg.data.columns import Columns, Owners, Strings
from fedzmg.data.formats.common import pack
from fedzmg.data.partition import hold_out
from fedzmg.errors import InputError


def numbered(sizes: list[int]) -> Columns:
    """Every row knows its number, as a number and as a word."""
    rows = sum(sizes)
    names = tuple(f"c{i}" for i in range(len(sizes)))
    return Columns(
        {"y": np.arange(rows), "text": pack([f"row {i}" for i in range(rows)], "here")},
        Owners(names, np.cumsum([0, *sizes])),
        ("a note",),
        ("no", "yes"),
    )


def words(strings: Strings) -> list[str]:
    ends = strings.offsets
    return [bytes(strings.text[a:b]).decode() for a, b in pairwise(ends)]


def held(columns: Columns) -> dict[str, list[int]]:
    """Numbers of rows by client."""
    assert columns.owners is not None
    names, ends = columns.owners
    y = columns.array("y").tolist()
    assert words(columns.strings("text")) == [f"row {i}" for i in y]
    return {name: y[ends[i] : ends[i + 1]] for i, name in enumerate(names)}


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(lambda sizes: max(sizes) > 5),
    st.floats(0.1, 0.95),
    st.integers(0, 5),
)
def test_every_client_is_parted(sizes: list[int], share: float, seed: int) -> None:
    columns = numbered(sizes)
    train, test = hold_out(columns, share, seed=seed)
    assert (train.classes, test.notes) == (("no", "yes"), ("a note",))
    mine, theirs = held(train), held(test)
    for (name, rows), size in zip(held(columns).items(), sizes, strict=True):
        assert sorted(mine[name] + theirs[name]) == rows
        assert len(theirs[name]) == min(round(share * size), max(size - 1, 0))
        assert mine[name] == sorted(mine[name])


def test_the_seed_decides_which_rows() -> None:
    columns = numbered([50, 50])
    parts = [held(hold_out(columns, 0.5, seed=seed)[1]) for seed in (0, 0, 1)]
    assert parts[0] == parts[1] != parts[2]
    # One draw for both would hold out the same places of each.
    assert [i + 50 for i in parts[0]["c0"]] != parts[0]["c1"]


def test_rows_of_nobody_are_parted_too() -> None:
    train, test = hold_out(Columns({"y": np.arange(10)}), 0.3)
    assert (train.rows, test.rows, train.owners) == (7, 3, None)


@pytest.mark.parametrize("share", [0, 1, 1.5, -0.1, float("nan"), True, "0.2"])
def test_another_share_is_refused(share: object) -> None:
    with pytest.raises(InputError, match=r"share = .*: expected a number between 0 and 1"):
        hold_out(numbered([9]), share)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="use a larger one"):
        hold_out(numbered([1, 2]), 0.1)
