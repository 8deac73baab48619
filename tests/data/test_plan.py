"""The batch plan: every example as often as it should be seen, in batches as they should be cut."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedzmg.data.plan import Batching, Stream, full_pass, local_stream, pad, sample_cohort

batchings = st.builds(Batching, st.integers(1, 7), st.integers(1, 4), st.booleans(), st.booleans())
addresses = st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(0, 5), st.integers(0, 2))


def plan(batching: Batching, count: int, first: int = 0, address: Any = (0, 1, 2, 0)) -> Stream:
    return local_stream(batching, *address, first, count)


def seen(stream: Stream) -> list[int]:
    """The real examples of a stream, in order."""
    return [int(i) for row, n in zip(stream.indices, stream.counts, strict=True) for i in row[:n]]


# Known answers.


@pytest.mark.parametrize(
    ("batching", "count", "counts", "closes"),
    [
        (Batching(4, 1), 10, [4, 4, 2], "..x"),
        (Batching(4, 2), 10, [4, 4, 2, 4, 4, 2], "..x..x"),
        (Batching(5, 2), 10, [5, 5, 5, 5], ".x.x"),
        (Batching(4, 2, keep_partial=False), 10, [4, 4, 4, 4], ".x.x"),
        (Batching(4, 2, straddle=True), 10, [4, 4, 4, 4, 4], "..x.x"),
        (Batching(4, 3, straddle=True), 5, [4, 4, 4, 3], ".xxx"),
        (Batching(4, 3, straddle=True, keep_partial=False), 5, [4, 4, 4], ".xx"),
        (Batching(4, 2, straddle=True), 4, [4, 4], "xx"),
        (Batching(20, 3), 7, [7, 7, 7], "xxx"),
        (Batching(20, 3, straddle=True), 7, [20, 1], "xx"),
        (Batching(20, 3, keep_partial=False), 7, [], ""),
        (Batching(20, 2, straddle=True, keep_partial=False), 7, [], ""),
        (Batching(1, 1), 3, [1, 1, 1], "..x"),
        (Batching(4, 2), 0, [], ""),
        (Batching(4, 2, straddle=True), 0, [], ""),
    ],
)
def test_how_a_client_is_cut(
    batching: Batching, count: int, counts: list[int], closes: str
) -> None:
    stream = plan(batching, count)
    assert stream.counts.tolist() == counts
    assert "".join(".x"[int(c)] for c in stream.closes) == closes
    assert len(stream) == len(counts)
    assert stream.indices.shape == (len(counts), batching.size)
    assert stream.keys.shape == (len(counts),)


@given(batchings, st.integers(0, 25), st.integers(0, 100), addresses)
def test_every_example_once_per_epoch(
    batching: Batching, count: int, first: int, address: tuple[int, ...]
) -> None:
    stream = plan(batching, count, first, address)
    order = seen(stream)
    own = set(range(first, first + count))
    # Padding, too, is never somebody else's data.
    assert set(stream.indices.ravel().tolist()) <= own
    assert batching.steps(count) == len(stream)
    if not batching.keep_partial:
        assert all(n == batching.size for n in stream.counts)
    if batching.keep_partial or batching.straddle:
        # Cut at the borders of epochs, each piece is a permutation; the last may be cut short.
        epochs = [order[i : i + count] for i in range(0, len(order), max(count, 1))]
        for epoch in epochs[:-1]:
            assert sorted(epoch) == sorted(own)
        if epochs:
            assert len(set(epochs[-1])) == len(epochs[-1])
        missing = batching.epochs * count - len(order)
        assert missing == (0 if batching.keep_partial else batching.epochs * count % batching.size)
    else:
        per_epoch = count // batching.size * batching.size
        assert len(order) == batching.epochs * per_epoch
        assert max(Counter(order).values(), default=0) <= batching.epochs
        for e in range(batching.epochs):
            part = order[e * per_epoch : (e + 1) * per_epoch]
            assert len(set(part)) == len(part)


@given(batchings, st.integers(1, 25))
def test_flags_close_each_epoch_where_its_last_example_lies(batching: Batching, count: int) -> None:
    stream = plan(batching, count)
    step_of = [step for step, n in enumerate(stream.counts) for _ in range(n)]
    whole = batching.straddle or batching.keep_partial
    length = count if whole else count // batching.size * batching.size
    ends = [e * length + length - 1 for e in range(batching.epochs)]
    expected = {step_of[end] for end in ends if 0 <= end < len(step_of)}
    assert set(np.flatnonzero(stream.closes).tolist()) == expected


# Addresses.


def test_a_plan_is_a_function_of_its_address() -> None:
    batching = Batching(4, 2)
    one, two = plan(batching, 30), plan(batching, 30)
    np.testing.assert_array_equal(one.indices, two.indices)
    np.testing.assert_array_equal(one.keys, two.keys)
    for address in [(1, 1, 2, 0), (0, 2, 2, 0), (0, 1, 3, 0), (0, 1, 2, 1)]:
        other = plan(batching, 30, address=address)
        assert seen(other) != seen(one)
        assert not set(other.keys.tolist()) & set(one.keys.tolist())


def test_where_a_clients_data_lies_does_not_change_its_order() -> None:
    near, far = plan(Batching(4, 2), 11), plan(Batching(4, 2), 11, first=1000)
    assert [i + 1000 for i in seen(near)] == seen(far)


def test_batch_size_does_not_change_the_order() -> None:
    """Studies that compare batch sizes see the same examples in the same order."""
    orders = {
        tuple(seen(plan(Batching(size, 2, straddle), 12)))
        for size in (1, 4, 5, 30)
        for straddle in (False, True)
    }
    assert len(orders) == 1


def test_orders_are_uniform() -> None:
    """Each of the six orders of three examples about equally often."""
    counts = Counter(tuple(seen(plan(Batching(3), 3, address=(0, r, 0, 0)))) for r in range(1200))
    assert len(counts) == 6
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 25  # chi-square, 5 degrees


# Cohorts.


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 40), st.data())
def test_cohort_without_replacement(seed: int, round_: int, population: int, data: Any) -> None:
    size = data.draw(st.integers(1, population))
    cohort = sample_cohort(seed, round_, population, size, replacement=False).tolist()
    assert len(cohort) == len(set(cohort)) == size
    assert set(cohort) <= set(range(population))
    assert cohort == sample_cohort(seed, round_, population, size, replacement=False).tolist()


@pytest.mark.parametrize("replacement", [False, True])
def test_cohorts_are_uniform_and_change_from_round_to_round(replacement: bool) -> None:
    cohorts = [sample_cohort(1, r, 20, 5, replacement=replacement).tolist() for r in range(1, 401)]
    counts = np.bincount(np.concatenate(cohorts), minlength=20)
    assert counts.sum() == 2000
    assert ((counts - 100) ** 2 / 100).sum() < 50  # chi-square, 19 degrees
    assert len({tuple(c) for c in cohorts}) > 390
    other = [sample_cohort(2, r, 20, 5, replacement=replacement).tolist() for r in range(1, 401)]
    assert sum(a == b for a, b in zip(cohorts, other, strict=True)) < 10


# Full passes and padding.


@given(st.integers(1, 9), st.integers(0, 100), st.integers(0, 30))
def test_full_pass_is_every_example_once_in_order(size: int, first: int, count: int) -> None:
    stream = full_pass(size, first, count)
    assert seen(stream) == list(range(first, first + count))
    assert len(stream) == -(-count // size)
    assert stream.indices.shape == (len(stream), size)
    assert not stream.closes.any()


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), batchings)
def test_padding_aligns_streams(sizes: list[int], batching: Batching) -> None:
    starts = np.concatenate([[0], np.cumsum(sizes)])
    streams = [plan(batching, n, int(starts[k]), (0, 1, k, 0)) for k, n in enumerate(sizes)]
    padded = pad(streams)
    longest = max(len(s) for s in streams)
    assert padded.indices.shape == padded.weights.shape == (len(sizes), longest, batching.size)
    assert padded.closes.shape == padded.keys.shape == (len(sizes), longest)
    assert padded.lengths.tolist() == [len(s) for s in streams]
    totals = padded.weights.sum(2)
    for k, stream in enumerate(streams):
        n = len(stream)
        np.testing.assert_allclose(totals[k, :n], 1, rtol=0, atol=1e-12)
        assert not totals[k, n:].any()
        assert not padded.closes[k, n:].any()
        np.testing.assert_array_equal(padded.closes[k, :n], stream.closes)
        np.testing.assert_array_equal(padded.keys[k, :n], stream.keys)
        for t in range(n):
            weighted = padded.weights[k, t] > 0
            real = int(stream.counts[t])
            assert weighted.tolist() == [True] * real + [False] * (batching.size - real)
            assert len(set(padded.weights[k, t, :real].tolist())) == 1
            assert padded.indices[k, t, :real].tolist() == stream.indices[t, :real].tolist()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 6))
def test_weights_of_a_full_pass_sum_to_one_over_the_client(sizes: list[int], size: int) -> None:
    """Every example counts the same, also those of a last batch that is not full."""
    padded = pad([full_pass(size, 0, n) for n in sizes], per_example=True)
    for k, n in enumerate(sizes):
        weights = padded.weights[k][padded.weights[k] > 0]
        np.testing.assert_allclose(weights, 1 / n, rtol=1e-12)
        assert len(weights) == n
