"""Measures of heterogeneity against golden numbers, other libraries and their definitions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from fedzmg.data.heterogeneity import (
    MEASURES,
    PAPER,
    describe,
    distinct,
    dominant,
    entropy,
    gini,
    kl,
    label_counts,
)
from fedzmg.errors import InputError

# Worked out by hand for two clients with four classes.
CLIENT, OTHER = [5, 0, 3, 2], [1, 4, 0, 5]
PAIR = np.array([CLIENT, OTHER])

tables = st.tuples(st.integers(1, 5), st.integers(1, 8)).flatmap(
    lambda shape: arrays(np.int64, shape, elements=st.integers(0, 30))
)


def filled(table: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same clients, none of them empty."""
    table = table.copy()
    table[table.sum(axis=1) == 0, 0] = 1
    return table


def test_golden_client() -> None:
    assert distinct(PAIR)[0] == 3
    assert entropy(PAIR)[0] == pytest.approx(0.7427376486136673, abs=1e-9)
    assert entropy(PAIR)[0] * np.log(4) == pytest.approx(1.0296530140645737, abs=1e-9)
    assert entropy(PAIR, "present")[0] == pytest.approx(0.9372305632161295, abs=1e-9)
    assert gini(PAIR)[0] == pytest.approx(0.4, abs=1e-9)
    assert gini(np.array([[5, 3, 2]]))[0] == pytest.approx(0.2, abs=1e-9)
    assert kl(PAIR, np.ones(4))[0] == pytest.approx(0.3566413470553171, abs=1e-9)
    assert kl(PAIR, PAIR.sum(0))[0] == pytest.approx(0.3514338084638945, abs=1e-9)
    which, share = dominant(PAIR)
    assert (which[0], share[0]) == (0, 0.5)


@given(table=tables.map(filled))
@settings(max_examples=25)
def test_entropy_and_divergence_agree_with_scipy(table: npt.NDArray[np.int64]) -> None:
    pooled = table.sum(axis=0)
    for row, found, present, away in zip(
        table, entropy(table), entropy(table, "present"), kl(table, pooled), strict=True
    ):
        nats = stats.entropy(row)
        classes, used = len(row), np.count_nonzero(row)
        assert found == pytest.approx(nats / np.log(classes) if classes > 1 else 0.0, abs=1e-9)
        assert present == pytest.approx(nats / np.log(used) if used > 1 else 0.0, abs=1e-9)
        assert away == pytest.approx(stats.entropy(row, pooled), abs=1e-9)


@given(table=tables.map(filled))
@settings(max_examples=25)
def test_gini_is_the_mean_difference_of_all_pairs(table: npt.NDArray[np.int64]) -> None:
    for row, found in zip(table, gini(table), strict=True):
        pairs = sum(abs(int(a) - int(b)) for a in row for b in row)
        assert found == pytest.approx(pairs / (2 * len(row) * row.sum()), abs=1e-12)


@given(table=tables.map(filled))
@settings(max_examples=25)
def test_bounds(table: npt.NDArray[np.int64]) -> None:
    clients, classes = table.shape
    names = [str(i) for i in range(clients)]
    report = describe(table, names, reference="global")
    for row in report["clients"]:
        assert 1 <= row["distinct"] <= min(classes, row["volume"])
        assert 0.0 <= row["entropy"] <= 1.0
        assert 0.0 <= row["gini"] <= 1 - 1 / classes + 1e-12
        assert 0.0 <= row["kl"] <= np.log(table.sum() / row["volume"]) + 1e-9
        assert 1 / row["distinct"] - 1e-12 <= row["dominant_share"] <= 1.0
    np.testing.assert_array_less(entropy(table) - 1e-12, entropy(table, "present") + 1e-12)
    json.dumps(report, allow_nan=False)


@given(table=tables.map(filled), seed=st.integers(0, 9))
@settings(max_examples=25)
def test_names_of_classes_and_order_of_clients_do_not_matter(
    table: npt.NDArray[np.int64], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    mixed = table[:, rng.permutation(table.shape[1])][rng.permutation(len(table))]
    names = [str(i) for i in range(len(table))]
    one, two = describe(table, names), describe(mixed, names)
    for measure in MEASURES:
        assert one["summary"][measure] == pytest.approx(two["summary"][measure], abs=1e-9)


@pytest.mark.parametrize("classes", [2, 10, 66, 100])
def test_known_ends(classes: int) -> None:
    even = np.full((1, classes), 7)
    assert gini(even)[0] == 0.0
    assert entropy(even)[0] == entropy(even, "present")[0] == pytest.approx(1.0)
    assert kl(even, np.ones(classes))[0] == pytest.approx(0.0, abs=1e-12)
    single = np.zeros((1, classes), dtype=int)
    single[0, 1] = 7
    assert gini(single)[0] == pytest.approx((classes - 1) / classes)
    assert kl(single, np.ones(classes))[0] == pytest.approx(np.log(classes))
    for base in ("classes", "present"):
        found = float(entropy(single, base)[0])
        assert found == 0.0
        assert not np.signbit(found)


def test_divergence_from_what_lacks_a_class_is_infinite() -> None:
    assert kl(np.array([[1, 1]]), [1, 0]).tolist() == [np.inf]
    assert kl(np.array([[1, 0]]), [1, 1]) == pytest.approx(np.log(2))


# The paper's numbers decide between definitions


def most_even(volume: int, labels: int, share: float, classes: int) -> npt.NDArray[np.int64]:
    """The counts of largest entropy with so many labels and such a dominant share."""
    top = round(share * volume)
    rest, more = divmod(volume - top, labels - 1)
    counts = np.zeros(classes, dtype=np.int64)
    counts[:labels] = [top, *[rest + 1] * more, *[rest] * (labels - 1 - more)]
    return counts[None]


def least_even(volume: int, labels: int, share: float, classes: int) -> npt.NDArray[np.int64]:
    """The counts of smallest entropy: few large labels, the others occur once."""
    top, left = round(share * volume), volume - round(share * volume) - (labels - 1)
    counts = np.zeros(classes, dtype=np.int64)
    counts[:labels] = 1
    counts[0] = top
    for label in range(1, labels):
        more = min(left, top - 1)
        counts[label] += more
        left -= more
    return counts[None]


@pytest.mark.parametrize("row", PAPER["cifar100"]["clients"], ids=lambda row: row["client"])
def test_cifar100_fits_only_the_logarithm_of_all_classes(row: dict[str, Any]) -> None:
    facts = row["volume"], row["distinct"], row["dominant_share"], 100
    low, high = least_even(*facts), most_even(*facts)
    assert entropy(low)[0] - 0.005 <= row["entropy"] <= entropy(high)[0] + 0.005
    assert row["entropy"] < entropy(low, "present")[0] - 0.005
    if row["client"] == "435":
        ends = [float(entropy(c, base)[0]) for base in ("present", "classes") for c in (low, high)]
        assert ends == pytest.approx([0.504, 0.749, 0.316, 0.470], abs=0.001)


def test_shakespeare_fits_only_the_logarithm_of_the_characters_present() -> None:
    row = PAPER["shakespeare"]["clients"][2]
    high = most_even(row["volume"], row["distinct"], row["dominant_share"], 66)
    assert entropy(high)[0] == pytest.approx(0.733, abs=0.001)
    assert entropy(high)[0] < row["entropy"] < entropy(high, "present")[0]


# Counting


@given(pairs=st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 3)), max_size=30))
def test_counts_add_up(pairs: list[tuple[int, int]]) -> None:
    owners, labels = ([pair[i] for pair in pairs] for i in (0, 1))
    counts = label_counts(labels, owners, classes=4, clients=5)
    for client in range(5):
        for label in range(4):
            assert counts[client, label] == pairs.count((client, label))


@pytest.mark.parametrize(
    ("labels", "owners", "match"),
    [
        ([0, 1], [0], r"\(2,\).*\(1,\)"),
        ([0, 3], [0, 0], "label 3 of example 1"),
        ([0, 1], [0, 7], "client 7"),
        ([0.0, 1.0], [0, 0], "float64"),
    ],
)
def test_impossible_counts_are_refused(labels: Any, owners: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        label_counts(labels, owners, classes=3, clients=2)


# Reports


def test_the_reference_is_the_sample_or_everybody() -> None:
    table = np.random.default_rng(0).integers(0, 20, (30, 6))
    names = [f"c{i}" for i in range(30)]
    for reference in ("pooled", "global"):
        report = describe(table, names, sample=5, reference=reference, seed=1)
        chosen = [names.index(row["client"]) for row in report["clients"]]
        whole = table[chosen].sum(0) if reference == "pooled" else table.sum(0)
        expected = [stats.entropy(table[i], whole) for i in chosen]
        assert [row["kl"] for row in report["clients"]] == pytest.approx(expected)
        np.testing.assert_array_equal(report["counts"], table[chosen])


def test_a_sample_is_random_without_repeats_and_fixed_by_its_seed() -> None:
    table = np.ones((100, 3), dtype=int)
    names = [f"c{i:02}" for i in range(100)]
    drawn = [
        [row["client"] for row in describe(table, names, sample=10, seed=seed)["clients"]]
        for seed in [*range(100), 3]
    ]
    assert drawn.pop() == drawn[3]
    assert all(len(set(sample)) == 10 and sample == sorted(sample) for sample in drawn)
    often = np.array([sum(name in sample for sample in drawn) for name in names])
    assert abs(often - 10).max() < 5 * np.sqrt(100 * 0.1 * 0.9)


def test_a_report_survives_json_and_lists_rows_for_csv() -> None:
    report = describe(PAIR, ["a", "b"], name="two", labels=["w", "x", "y", "z"], sample=2, seed=4)
    kept = json.loads(json.dumps(report))
    assert kept["name"] == "two"
    assert kept["counts"] == PAIR.tolist()
    assert kept == report
    assert kept["clients"][1]["dominant_class"] == "z"
    assert (kept["sample"], kept["seed"], kept["total"]) == (2, 4, 2)
    assert set(kept["summary"]) == set(MEASURES)
    alone = json.loads(json.dumps(describe(np.array([[4, 1]]), ["a"])))
    assert alone["summary"]["volume"] == {"mean": 5.0, "sd": None}


@pytest.mark.parametrize(
    ("counts", "options", "match"),
    [
        ([1, 2], {}, r"shape \(2,\)"),
        ([[0.5, 1.0], [1.0, 1.0]], {}, "whole numbers"),
        ([[1, 1]], {}, "2 names of clients"),
        ([[1, 1], [0, 0]], {}, "client 'b'"),
        ([[1, 1], [1, 0]], {"sample": 3}, "sample = 3"),
        ([[1, 1], [1, 0]], {"labels": ["x"]}, "1 of classes"),
        ([[1, 1], [1, 0]], {"entropy": "presents"}, "'presents': did you mean 'present'"),
    ],
)
def test_impossible_descriptions_are_refused(
    counts: Any, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        describe(counts, ["a", "b"], **options)
