"""Randomness by address: frozen, distinct, well spread, and free of global state."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedzmg.seeds import key, step_keys, stream, torch_stream

PURPOSES = ["init", "cohort", "order", "dropout", "partition", "probe"]
seeds = st.integers(0, 2**64)
purposes = st.sampled_from(PURPOSES)
places = st.lists(
    st.one_of(
        st.integers(0, 10**6), st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]))
    ),
    max_size=4,
).map(tuple)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ((0, "cohort", 1), 1959747768230413124),
        ((7, "order", 3, 12, 0), 8893249988685649678),
        ((2**40, "init", "fc.weight"), 3617540331300690196),
        ((0, "init", ""), 78674709482838876),
        ((-1, "partition", "iid"), 512807229697668420),
    ],
)
def test_keys_are_frozen(address: tuple[int, str, int | str], expected: int) -> None:
    """Another addressing would change every published curve: never in silence."""
    assert key(*address) == expected  # type: ignore[arg-type]


def test_streams_are_frozen() -> None:
    """Raw words of the bit generator, which NumPy guarantees; not its distributions."""
    words = stream(5, "order", 1, 2).bit_generator.random_raw(3).tolist()
    assert words == [6743522038177478910, 7599057601493622835, 5780352767855101569]
    assert torch_stream(5, "init", "x").initial_seed() == key(5, "init", "x")


def test_step_keys_are_frozen() -> None:
    assert step_keys(np.array([key(0, "dropout", 1, 2, 0)]), 4)[0].tolist() == [
        8669139702445735091,
        8134831428789320035,
        1236543933080301513,
        6583510692003435059,
    ]


def splitmix64(state: int, count: int) -> list[int]:
    """The published generator, in unbounded integers."""
    found = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        found.append(z ^ (z >> 31))
    return found


@given(seeds, places, st.integers(0, 20))
def test_step_keys_are_splitmix64_of_the_address(
    seed: int, place: tuple[int | str, ...], steps: int
) -> None:
    expected = [z % 2**63 for z in splitmix64(key(seed, "dropout", *place), steps)]
    found = step_keys(np.array([key(seed, "dropout", *place)]), steps)[0]
    assert found.dtype == np.int64
    assert found.tolist() == expected


@given(seeds, purposes, places, seeds, purposes, places)
def test_equal_keys_mean_equal_addresses(
    seed: int,
    purpose: str,
    place: tuple[int | str, ...],
    other_seed: int,
    other_purpose: str,
    other_place: tuple[int | str, ...],
) -> None:
    left = key(seed, purpose, *place)  # type: ignore[arg-type]
    right = key(other_seed, other_purpose, *other_place)  # type: ignore[arg-type]
    assert 0 <= left < 2**63
    same = (seed, purpose, place) == (other_seed, other_purpose, other_place)
    assert (left == right) == same


def test_numbers_and_their_spellings_are_different_places() -> None:
    keys = [key(0, "init", 1), key(0, "init", "1"), key(0, "init", 1, ""), key(0, "init", "int:1")]
    assert len({*keys, key(0, "init", 11), key(0, "init", 1, 1)}) == 6


def test_global_generators_are_neither_read_nor_written() -> None:
    def state() -> tuple[object, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002

    before = state()
    first = stream(1, "order", 2).integers(0, 10**9, 5).tolist()
    words = torch.randint(0, 10**9, (5,), generator=torch_stream(1, "init", "x")).tolist()
    step_keys(np.array([key(1, "dropout")]), 3)
    assert state() == before
    random.seed(7)
    torch.manual_seed(7)
    assert stream(1, "order", 2).integers(0, 10**9, 5).tolist() == first
    assert torch.randint(0, 10**9, (5,), generator=torch_stream(1, "init", "x")).tolist() == words
