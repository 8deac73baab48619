"""Damaged files, for readers that may say no but must not break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedzmg.errors import InputError


def damaged(*files: bytes) -> st.SearchStrategy[bytes]:
    """One of the files with bytes changed, cut off, left out or repeated; or no file at all."""
    often = max(1, 3 // len(files))
    return st.one_of(st.binary(max_size=300), *(_damage(file) for file in files * often))


@st.composite
def _damage(draw: st.DrawFn, file: bytes) -> bytes:
    data = bytearray(file)
    places = st.integers(0, len(file) - 1)
    match draw(st.integers(0, 9)):
        case 0:
            return file[: draw(places)]
        case 1:
            start = draw(places)
            del data[start : start + draw(st.integers(1, 40))]
        case 2:
            start, target = draw(places), draw(places)
            data[target:target] = data[start : start + draw(st.integers(1, 40))]
        case _:
            for place in draw(st.lists(places, min_size=1, max_size=4)):
                width = draw(st.sampled_from([1, 1, 2, 4, 8]))
                piece = draw(st.one_of(st.just(b"\0"), st.just(b"\xff"), st.binary(min_size=1)))
                data[place : place + width] = (piece * width)[: len(data[place : place + width])]
    return bytes(data)


def read_or_refuse(read: Callable[..., Any], path: Path, data: bytes) -> str | None:
    """Read what may be no file of the format; the message, which is one line and names the file."""
    path.write_bytes(data)
    message = None
    try:
        read([path])
    except InputError as error:
        message = str(error)
    assert message is None or (str(path) in message and "\n" not in message), message
    return message


def fuzz_tests(
    read: Callable[..., Any], strategy: st.SearchStrategy[bytes], quick: int, slow: int
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Make a quick and a slow test that a reader reads or refuses damaged files."""

    def test(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
        read_or_refuse(read, tmp_path_factory.getbasetemp() / "damaged", data)

    tests = (settings(max_examples=count)(given(data=strategy)(test)) for count in (quick, slow))
    first, second = tests
    return first, pytest.mark.slow(second)
