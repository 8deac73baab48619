"""Samplers and local work: exact probabilities, fixed addresses, one line for bad choices."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedzmg import InputError, Participation
from fedzmg.data.federated import Examples, FederatedData
from fedzmg.data.plan import Batching, LocalWork, local_stream, sample_cohort
from fedzmg.data.sampling import Sampler, inclusion_probabilities

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "samplers.json").read_text())
COUNTS = [1, 2, 3, 4, 10]
FOURS = Batching(4)


def clients(counts: list[int]) -> FederatedData:
    total = sum(counts)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    columns = Examples(torch.zeros(total, 1), torch.zeros(total, dtype=torch.int64))
    return FederatedData(columns, offsets, tuple(f"c{i}" for i in range(len(counts))))


def sampler(
    participation: Participation,
    cohort: int = 3,
    counts: list[int] = COUNTS,
    *,
    replacement: bool = False,
) -> Sampler:
    return Sampler(participation, clients(counts), cohort, replacement=replacement)


def frequencies(chosen: Sampler, rounds: int = 4000, population: int = 5) -> Any:
    drawn = [client for r in range(1, rounds + 1) for client in chosen.draw(7, r)]
    return np.bincount(drawn, minlength=population) / rounds


# Cohorts.


def test_uniform_cohorts_are_those_of_the_protocol() -> None:
    for replacement in (False, True):
        chosen = sampler(Participation(), replacement=replacement)
        for r in range(1, 6):
            known = sample_cohort(3, r, 5, 3, replacement=replacement).tolist()
            assert chosen.draw(3, r) == known


def test_draws_by_examples_have_the_golden_probabilities() -> None:
    counts = np.array(GOLDEN["pps_n_k"], dtype=np.int64)
    found = inclusion_probabilities(counts, GOLDEN["pps_m"])
    np.testing.assert_allclose(found, GOLDEN["pps_inclusion"], rtol=1e-15)
    np.testing.assert_allclose(counts / counts.sum() / found, GOLDEN["pps_weights"], rtol=1e-15)
    by_examples = sampler(Participation(sampler="examples"))
    assert all(len(set(by_examples.draw(0, r))) == 3 for r in range(1, 200))
    # Five standard deviations of 4000 draws.
    np.testing.assert_allclose(frequencies(by_examples), found, atol=5 * 0.5 / 4000**0.5)
    twice = sampler(Participation(sampler="examples"), cohort=8, replacement=True)
    np.testing.assert_allclose(frequencies(twice), 8 * counts / counts.sum(), atol=0.15)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.data(), st.integers(0, 3))
def test_draws_by_examples_are_distinct_and_of_fixed_size(
    counts: list[int], data: st.DataObject, seed: int
) -> None:
    held = sum(n > 0 for n in counts)
    if not held:
        return
    size = data.draw(st.integers(1, held))
    chances = inclusion_probabilities(np.array(counts), size)
    assert chances.sum() == pytest.approx(size)
    assert chances.max() <= 1
    cohort = sampler(Participation(sampler="examples"), size, counts).draw(seed, 1)
    assert len(set(cohort)) == size
    assert all(chances[client] > 0 for client in cohort)
    assert set(np.flatnonzero(chances == 1)) <= set(cohort)


def test_uniform_mean_is_unbiased_for_draws_by_examples() -> None:
    counts, values = [4, 5, 6, 7, 8], np.array([1.0, -1.0, 2.0, 0.5, 3.0])
    chances = inclusion_probabilities(np.array(counts), 3)
    target = float(np.array(counts) @ values / sum(counts))
    assert chances @ values / 3 == pytest.approx(target, rel=1e-14)
    weighted = frequencies(sampler(Participation(sampler="examples"), 3, counts)) @ values / 3
    assert weighted == pytest.approx(target, abs=0.05)


def test_poisson_cohorts_are_independent_and_vary() -> None:
    golden, counts = GOLDEN["poisson_q0.5"], np.array(COUNTS)
    values, shares = np.array(golden["x"]), counts / counts.sum()
    half = sampler(Participation(sampler="poisson"), 5, [*COUNTS, *COUNTS])
    sizes = [len(half.draw(1, r)) for r in range(1, 801)]
    assert min(sizes) == 0 or min(sizes) <= 1
    assert np.mean(sizes) == pytest.approx(5, abs=0.3)
    assert np.var(sizes) == pytest.approx(2.5, abs=0.6)
    # All subsets of five clients, each as likely as the other: the known means of estimators.
    subsets = [np.array(mask, dtype=bool) for mask in product([False, True], repeat=5)]
    unbiased = [(shares / 0.5 * values)[s].sum() for s in subsets]
    ratio = [values[s] @ counts[s] / max(counts[s].sum(), 1) for s in subsets]
    assert np.mean(unbiased) == pytest.approx(golden["horvitz_thompson_mean"], rel=1e-14)
    assert np.mean(unbiased) == pytest.approx(golden["target"], rel=1e-14)
    assert np.mean(ratio) == pytest.approx(golden["ratio_mean_empty_is_0"], rel=1e-14)
    # The sampler draws each of them: the first five of ten clients with rate 1/2.
    drawn = [[c for c in half.draw(2, r) if c < 5] for r in range(1, 4001)]
    found = [values[s] @ counts[s] / counts[s].sum() if s else 0.0 for s in drawn]
    assert np.mean(found) == pytest.approx(golden["ratio_mean_empty_is_0"], abs=0.1)
    assert len({tuple(s) for s in drawn}) == 32


def test_schedule_repeats_names_and_numbers() -> None:
    chosen = sampler(Participation(sampler="schedule", schedule=[[0, "c3"], [], ["c1"]]))
    assert [chosen.draw(5, r) for r in range(1, 6)] == [[0, 3], [], [1], [0, 3], []]


def test_own_function_gets_an_address_and_the_examples() -> None:
    seen: list[Any] = []

    def largest(round_: int, key: int, population: int, examples: Any) -> Any:
        seen.append((round_, key, population, examples.tolist()))
        assert not examples.flags.writeable
        return np.argsort(-examples)[: 1 + key % 2]

    chosen = sampler(Participation(sampler=largest))
    first = [chosen.draw(0, r) for r in (1, 2, 3, 4)]
    assert [chosen.draw(0, r) for r in (4, 3, 2, 1)] == first[::-1]
    assert {tuple(cohort) for cohort in first} <= {(4,), (4, 3)}
    assert [s[0] for s in seen] == [1, 2, 3, 4, 4, 3, 2, 1]
    assert len({s[1] for s in seen}) == 4
    assert seen[0][2:] == (5, COUNTS)

    def broken(*_: Any) -> Any:
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        sampler(Participation(sampler=broken)).draw(0, 1)


@pytest.mark.parametrize(
    ("choice", "value"),
    [
        (lambda: Participation(sampler="poison"), "poisson"),
        (lambda: Participation(sampler="schedule"), "None"),
        (lambda: Participation(schedule=[[0]]), "uniform"),
        (lambda: Participation(sampler="schedule", schedule=[[], []]), r"\[\[\], \[\]\]"),
        (lambda: Participation(sampler="schedule", schedule=[0]), r"\[0\]"),
        (lambda: Participation(sampler="schedule", schedule=["ab"]), "ab"),
        (lambda: Participation(sampler="schedule", schedule=[[0.5]]), "0.5"),
        (lambda: Participation(epochs=1, steps=2), "steps = 2"),
        (lambda: Participation(epochs=0), "epochs = 0"),
        (lambda: Participation(epochs=float("nan")), "nan"),
        (lambda: Participation(steps=2.5), "2.5"),
        (lambda: Participation(steps=True), "True"),
        (lambda: Participation(steps=[5, 2]), r"\[5, 2\]"),
        (lambda: Participation(epochs=[1, 2, 3]), r"\[1, 2, 3\]"),
        (lambda: Participation(steps=10**4000), "10000"),
        (lambda: sampler(Participation(sampler="schedule", schedule=[["c9"]])), "c9"),
        (lambda: sampler(Participation(sampler="schedule", schedule=[[0], [5]])), "5"),
        (lambda: sampler(Participation(sampler="schedule", schedule=[[2, 2]])), "2, 2"),
        (lambda: sampler(Participation(sampler="examples"), 3, [1, 0, 0, 5]), "cohort = 3"),
        (lambda: sampler(Participation(sampler="poisson"), replacement=True), "replacement"),
        (lambda: sampler(Participation(sampler=lambda *_: [7])).draw(0, 1), "7"),
        (lambda: sampler(Participation(sampler=lambda *_: [1, 1])).draw(0, 1), "1, 1"),
        (lambda: sampler(Participation(sampler=lambda *_: ["c1"])).draw(0, 1), "c1"),
        (lambda: sampler(Participation(sampler=lambda *_: None)).draw(0, 1), "None"),
        (lambda: work(Participation(steps=lambda *_: 1.5)).plan(0, 1, 0, 9), "1.5"),
        (lambda: work(Participation(epochs=lambda *_: -1)).plan(0, 1, 0, 9), "-1"),
        (lambda: work(Participation(epochs=lambda *_: None)).plan(0, 1, 0, 9), "None"),
    ],
)
def test_bad_choices_are_named(choice: Callable[[], Any], value: str) -> None:
    with pytest.raises(InputError, match=value) as caught:
        choice()
    assert "\n" not in str(caught.value)


# Local work.


def work(participation: Participation, batching: Batching = FOURS, extra: int = 0) -> Any:
    return LocalWork(participation, batching, extra)


def steps_of(participation: Participation, batching: Batching, count: int, extra: int = 0) -> Any:
    """Streams as the planner cuts them."""
    planned, steps = work(participation, batching, extra).plan(0, 1, 2, count)
    stream = local_stream(planned, 0, 1, 2, 0, 0, count)
    return stream if steps is None else stream[:steps]


@pytest.mark.parametrize(
    ("fields", "batching", "count", "extra", "counts", "closes"),
    [
        ({}, Batching(4, 1), 10, 1, [4, 4, 2, 4, 4, 2], "..x..x"),
        ({"epochs": 2}, Batching(4, 1), 10, 0, [4, 4, 2, 4, 4, 2], "..x..x"),
        ({"epochs": 0.5}, Batching(4), 10, 0, [4, 4], ".."),
        ({"epochs": 1.5}, Batching(4), 10, 0, [4, 4, 2, 4, 4], "..x.."),
        ({"epochs": 0.5}, Batching(4), 10, 1, [4, 4, 2, 4, 4], "..x.."),
        ({"epochs": 0.01}, Batching(4), 10, 0, [4], "."),
        ({"epochs": 0.01}, Batching(4), 0, 0, [], ""),
        ({"epochs": 3}, Batching(4, 1, straddle=True), 5, 0, [4, 4, 4, 3], ".xxx"),
        ({"epochs": 1.6}, Batching(4, 1, straddle=True), 5, 0, [4, 4], ".x"),
        ({"epochs": 7}, Batching(3, 1, straddle=True), 7, 0, [3] * 16 + [1], "..x.x.x..x.x.x..x"),
        ({"steps": 1}, Batching(4, 9), 10, 0, [4], "."),
        ({"steps": 5}, Batching(4, 9), 10, 0, [4, 4, 2, 4, 4], "..x.."),
        ({"steps": 5}, Batching(4, 9, straddle=True), 10, 0, [4] * 5, "..x.x"),
        ({"steps": 4}, Batching(20, 1, straddle=True), 7, 0, [20] * 4, "xxxx"),
        ({"steps": 3}, Batching(4, 1, keep_partial=False), 10, 0, [4] * 3, ".x."),
        ({"steps": 3}, Batching(20, 1, keep_partial=False), 7, 0, [7] * 3, "xxx"),
        ({"epochs": 2}, Batching(20, 1, True, False), 7, 0, [14], "x"),
        ({"steps": 2}, Batching(4), 10, 1, [4, 4, 2, 4, 4], "..x.."),
        ({"steps": 3}, Batching(4), 0, 0, [], ""),
    ],
)
def test_work_of_a_client(
    fields: Any, batching: Batching, count: int, extra: int, counts: list[int], closes: str
) -> None:
    stream = steps_of(Participation(**fields), batching, count, extra)
    assert stream.counts.tolist() == counts
    assert "".join(".x"[int(c)] for c in stream.closes) == closes
    assert work(Participation(**fields), batching, extra).steps(count) == len(counts)


def test_no_epochs_are_one_step() -> None:
    none = Participation(epochs=lambda *_: 0)
    assert steps_of(none, Batching(4), 10, 0).counts.tolist() == [4]
    assert steps_of(none, Batching(4), 10, 1).counts.tolist() == [4, 4, 2]


batchings = st.builds(Batching, st.integers(1, 7), st.integers(1, 4), st.booleans(), st.booleans())


@given(batchings, st.integers(1, 25), st.integers(1, 40), st.integers(0, 2))
def test_less_work_is_a_prefix_of_more(
    batching: Batching, count: int, steps: int, extra: int
) -> None:
    few = steps_of(Participation(steps=steps), batching, count, extra)
    many = steps_of(Participation(steps=steps + 3), batching, count, extra)
    assert len(few) >= steps
    if not extra:
        assert (len(few), len(many)) == (steps, steps + 3)
    for name in ("indices", "keys", "closes"):
        assert (getattr(many, name)[: len(few)] == getattr(few, name)).all()
    usual = steps_of(Participation(epochs=batching.epochs), batching, count)
    plain = local_stream(batching, 0, 1, 2, 0, 0, count)
    assert len(usual) >= 1
    if len(plain):
        assert (usual.indices == plain.indices).all()


def test_ranges_are_drawn_by_address() -> None:
    whole = work(Participation(steps=(2, 5)))
    drawn = [whole.plan(0, r, c, 50)[1] for r in range(1, 101) for c in range(20)]
    assert drawn == [whole.plan(0, r, c, 50)[1] for r in range(1, 101) for c in range(20)]
    shares = np.bincount(drawn, minlength=6) / len(drawn)
    np.testing.assert_allclose(shares, [0, 0, 0.25, 0.25, 0.25, 0.25], atol=0.05)
    assert whole.steps(50) == 5
    other = [whole.plan(1, r, c, 50)[1] for r in range(1, 101) for c in range(20)]
    assert np.mean(np.array(drawn) == other) == pytest.approx(0.25, abs=0.05)
    # Real bounds give parts of epochs: between 1 and 13 steps of 13.
    real = work(Participation(epochs=(0.01, 1.0)))
    parts = {real.plan(0, 1, c, 50)[1] for c in range(300)}
    assert parts == set(range(1, 14))
    assert real.steps(50) == 13


def test_own_work_function_gets_an_address() -> None:
    seen: list[tuple[int, ...]] = []

    def own(client: int, round_: int, examples: int, key: int) -> float:
        seen.append((client, round_, examples))
        return 0 if client == 0 else 1 + key % 3

    planned = work(Participation(steps=own))
    assert planned.plan(0, 4, 0, 9)[1] == 1
    assert planned.plan(0, 4, 3, 9) == planned.plan(0, 4, 3, 9)
    assert seen[:2] == [(0, 4, 9), (3, 4, 9)]
