"""Partitions: nothing is dealt twice, sizes and skew are as asked for, and bits do not change."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedzmg.data import heterogeneity
from fedzmg.data.federated import FederatedData
from fedzmg.data.formats.images import FINE_TO_COARSE
from fedzmg.data.partition import (
    PARTITIONS,
    UNUSED,
    Partition,
    dirichlet,
    dirichlet_by_label,
    iid,
    make,
    natural,
    pachinko,
    quantity,
    shards,
)
from fedzmg.errors import InputError

LABELS = np.random.default_rng(0).integers(0, 10, 2000)


EQUAL = {"iid": {}, "dirichlet": {"alpha": 0.5}}
OF_LABELS: dict[str, dict[str, Any]] = {**EQUAL, "shards": {}, "quantity": {"alpha": 0.5}}


def shares(owners: npt.NDArray[np.int64], clients: int) -> npt.NDArray[np.float64]:
    """Label distribution of every client."""
    counts = np.zeros((clients, 10))
    np.add.at(counts, (owners, LABELS), 1)
    return counts / counts.sum(1, keepdims=True)


def test_labels_divided_by_dirichlet_shares() -> None:
    """Sizes and labels are unequal, more so for a small alpha; every client has the minimum."""
    skews = []
    for alpha in (0.1, 1.0, 100.0):
        owners = dirichlet_by_label(LABELS, 20, alpha=alpha, minimum=5, seed=3)
        sizes = np.bincount(owners, minlength=20)
        assert (len(sizes), sizes.sum()) == (20, len(LABELS))
        assert sizes.min() >= 5
        skews.append((skew(owners, 20), sizes.std()))
    assert skews == sorted(skews, reverse=True)
    assert [s for _, s in skews] == sorted((s for _, s in skews), reverse=True)
    # The share of one of two clients is Beta(2, 2): mean 1/2, variance 1/20.
    ones = np.zeros(1000, np.int64)
    drawn = [dirichlet_by_label(ones, 2, alpha=2.0, minimum=1, seed=s).mean() for s in range(400)]
    assert np.mean(drawn) == pytest.approx(0.5, abs=0.04)
    assert np.var(drawn) == pytest.approx(0.05, rel=0.2)
    with pytest.raises(InputError, match=r"alpha = 1e-05.*minimum = 10"):
        dirichlet_by_label(LABELS, 50, alpha=1e-5)


def skew(owners: npt.NDArray[np.int64], clients: int) -> float:
    """Mean total variation distance from the pooled label distribution; 0 is none."""
    pooled = np.bincount(LABELS, minlength=10) / len(LABELS)
    return float(0.5 * np.abs(shares(owners, clients) - pooled).sum(1).mean())


@pytest.mark.parametrize("name", OF_LABELS)
@given(data=st.data(), seed=st.integers(0, 20))
@settings(max_examples=30)
def test_everything_is_dealt_in_sizes_as_asked_for(name: str, data: Any, seed: int) -> None:
    labels = np.array(data.draw(st.lists(st.integers(-2, 5), min_size=1, max_size=40)))
    clients = data.draw(st.integers(1, len(labels)))
    each = data.draw(st.integers(1, len(labels) // clients))
    alpha = data.draw(st.sampled_from([1e-3, 0.1, 1.0, 100.0]))
    extreme = data.draw(st.sampled_from([1e-300, alpha, 1e300]))
    options = {
        "iid": {},
        "dirichlet": {"alpha": alpha},
        "shards": {"per_client": each},
        "quantity": {"alpha": extreme, "minimum": each},
    }[name]
    owners = PARTITIONS[name](labels, clients, seed=seed, **options)
    assert (owners.shape, owners.dtype) == (labels.shape, np.int64)
    sizes = np.bincount(owners, minlength=clients)
    assert len(sizes) == clients
    assert sizes.sum() == len(labels)
    if name in EQUAL:
        assert sizes.max() - sizes.min() <= 1
    elif name == "quantity":
        assert sizes.min() >= each
    else:
        floor = len(labels) // (clients * each)
        assert each * floor <= sizes.min() <= sizes.max() <= each * (floor + 1)
        # A cut through the sorted labels can split at most one more label per shard.
        pairs = set(zip(owners.tolist(), labels.tolist(), strict=True))
        assert len(pairs) <= clients * each + len(set(labels.tolist())) - 1


@pytest.mark.parametrize(
    ("seed", "hashes"),
    [
        (0, ("453d08f6114dd826", "575fdd10e1b4494e", "3bd9d291bf498f55")),
        (3, ("975cfbb32b30fef2", "dddb529fb0aa28d8", "243c03fe46e8296f")),
    ],
)
def test_results_of_earlier_versions_stay_the_same(seed: int, hashes: tuple[str, ...]) -> None:
    labels = np.arange(1000) * 7 % 10
    found = (
        iid(labels, 7, seed=seed),
        dirichlet(labels, 20, alpha=0.1, seed=seed),
        dirichlet(labels, 9, alpha=5.0, seed=seed),
    )
    digests = [hashlib.sha256(owners.astype("<i8").tobytes()).hexdigest() for owners in found]
    assert tuple(digest[:16] for digest in digests) == hashes


def test_small_alpha_means_strong_skew() -> None:
    found = [skew(dirichlet(LABELS, 20, alpha=alpha), 20) for alpha in (0.01, 0.1, 1.0, 1000.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.6
    assert found[-1] < 0.15


# Shards


def test_shards_as_in_the_fedavg_paper() -> None:
    """60,000 digits, 100 clients of two shards of 300: at most two labels each."""
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 6000))
    owners = shards(labels, 100)
    counts = heterogeneity.label_counts(labels, owners, classes=10)
    assert (counts.sum(1) == 600).all()
    assert set(counts.ravel()) <= {0, 300, 600}
    # Two of 200 shards have the same label with probability 19 / 199.
    assert 0 < np.sum(heterogeneity.distinct(counts) == 1) < 30
    # Of one label, nobody gets a run of the file.
    of_three = owners[labels == 3]
    assert (of_three[1:] != of_three[:-1]).mean() > 0.9


# Quantity


def test_sizes_follow_the_dirichlet_distribution() -> None:
    """A share of symmetric Dirichlet(a) over k has the variance (k - 1) / k^2 / (k a + 1)."""
    sizes = np.array([
        np.bincount(quantity(np.zeros(10_000, int), 4, alpha=0.5, seed=s), minlength=4)
        for s in range(200)
    ])  # fmt: skip
    found = (sizes / 10_000).var(axis=0).mean()
    assert found == pytest.approx(3 / 16 / (4 * 0.5 + 1), rel=0.15)
    assert np.abs(sizes.mean(axis=0) / 10_000 - 0.25).max() < 5 * np.sqrt(0.0625 / 200)


# Natural


def test_natural_owners_are_the_sorted_ids() -> None:
    ids = np.array(["role b", "role a", "role c", "role a"])
    owners = natural(ids)
    assert owners.tolist() == [1, 0, 2, 0]
    data = FederatedData.from_arrays(np.arange(4.0)[:, None], np.arange(4), ids)
    assert data.counts.tolist() == np.bincount(owners).tolist()
    assert natural([7, 3, 7], clients=2).tolist() == [1, 0, 1]
    assert make("natural", ["b", "a", "b"]).owners.tolist() == [1, 0, 1]


# Pachinko


def cifar100(per_label: int, clients: int, seed: int) -> npt.NDArray[np.int64]:
    """Label counts of a split of plain CIFAR-100 labels."""
    fine = np.random.default_rng(5).permutation(np.repeat(np.arange(100), per_label))
    owners = pachinko(fine, np.array(FINE_TO_COARSE)[fine], clients, seed=seed)
    # Each image is used once.
    assert (owners >= 0).all()
    assert (np.bincount(owners, minlength=clients) == 100).all()
    return heterogeneity.label_counts(fine, owners, classes=100)


@pytest.fixture(scope="module")
def splits_train() -> list[npt.NDArray[np.int64]]:
    return [cifar100(500, 500, seed) for seed in range(6)]


@pytest.fixture(scope="module")
def splits_test() -> list[npt.NDArray[np.int64]]:
    return [cifar100(100, 100, seed) for seed in range(8)]


# Mean over clients [low, high] and deviation over clients of twelve runs of the procedure.
BANDS = {
    "train": {
        "distinct": (21.4, 22.2, 6.4),
        "entropy": (0.570, 0.581, 0.086),
        "gini": (0.878, 0.883, 0.043),
        "kl": (1.929, 1.980, 0.40),
        "dominant_share": (0.169, 0.176, 0.067),
    },
    "test": {
        "distinct": (19.4, 21.6, 6.3),
        "entropy": (0.546, 0.581, 0.082),
        "gini": (0.879, 0.897, 0.040),
        "kl": (1.931, 2.091, 0.38),
        "dominant_share": (0.165, 0.192, 0.059),
    },
}


@pytest.mark.parametrize("part", BANDS)
def test_pachinko_falls_into_the_acceptance_bands(
    part: str, request: pytest.FixtureRequest
) -> None:
    splits = request.getfixturevalue(f"splits_{part}")
    reports = [
        heterogeneity.describe(counts, [str(i) for i in range(len(counts))]) for counts in splits
    ]
    for measure, (low, high, sd) in BANDS[part].items():
        means = np.array([report["summary"][measure]["mean"] for report in reports])
        assert low <= means.mean() <= high, measure
        # The ends are the extremes of twelve seeds; other seeds go a little beyond.
        assert np.mean((low <= means) & (means <= high)) > 0.6, measure
        slack = 0.5 * (high - low)
        assert means.min() > low - slack, measure
        assert means.max() < high + slack, measure
        deviations = [report["summary"][measure]["sd"] for report in reports]
        assert np.mean(deviations) == pytest.approx(sd, rel=0.1), measure


def test_later_clients_are_more_skewed(splits_train: list[npt.NDArray[np.int64]]) -> None:
    labels = np.array([heterogeneity.distinct(counts) for counts in splits_train])
    assert labels[:, :100].mean() == pytest.approx(23.0, abs=0.8)
    assert labels[:, -100:].mean() == pytest.approx(16.9, abs=1.2)


def test_groups_of_ten_fall_into_the_bands_of_the_papers_table(
    splits_train: list[npt.NDArray[np.int64]],
) -> None:
    """Nine of ten groups lie in the bands; all that the paper printed does, too."""
    bands = {"distinct": (17.9, 25.0), "entropy": (0.524, 0.616), "gini": (0.860, 0.904),
             "kl": (1.380, 1.730)}  # fmt: skip
    names = [str(i) for i in range(500)]
    groups = [
        heterogeneity.describe(counts, names, sample=10, reference="pooled", seed=seed)
        for counts in splits_train
        for seed in range(50)
    ]
    for measure, (low, high) in bands.items():
        means = np.array([group["summary"][measure]["mean"] for group in groups])
        assert 0.84 < np.mean((low <= means) & (means <= high)) < 0.95, measure
        printed, _ = heterogeneity.PAPER["cifar100"]["summary"][measure]
        assert low <= printed <= high
    deviations = np.array([group["summary"]["kl"]["sd"] for group in groups])
    assert deviations.mean() == pytest.approx(0.264, abs=0.012)
    # Against all clients, that is uniform, the divergence would not fit the printed 1.57.
    apart = [
        heterogeneity.describe(splits_train[0], names, sample=10, reference="global", seed=seed)
        for seed in range(50)
    ]
    assert min(group["summary"]["kl"]["mean"] for group in apart) > 1.62


def literal(rng: np.random.Generator, clients: int, per_client: int) -> npt.NDArray[np.int64]:
    """The procedure word for word, for three coarse labels of two fine ones with six examples."""
    left = [6] * 6
    counts = np.zeros((clients, 6), dtype=np.int64)
    for client in range(clients):
        below = {c: [y for y in (2 * c, 2 * c + 1) if left[y]] for c in range(3)}
        below = {c: fine for c, fine in below.items() if fine}
        root = dict(zip(below, rng.dirichlet([0.3] * len(below)), strict=True))
        theta = {
            c: dict(zip(fine, rng.dirichlet([2.0] * len(fine)), strict=True))
            for c, fine in below.items()
        }
        for _ in range(per_client):
            weights = np.array(list(root.values()))
            c = int(rng.choice(list(root), p=weights / weights.sum()))
            weights = np.array(list(theta[c].values()))
            y = int(rng.choice(list(theta[c]), p=weights / weights.sum()))
            left[y] -= 1
            counts[client, y] += 1
            if not left[y]:
                del theta[c][y]
                if not theta[c]:
                    del root[c]
    return counts


def test_pachinko_is_the_literal_procedure() -> None:
    """Drawing many labels at once must not change the distribution, also when they run out."""
    fine = np.repeat(np.arange(6), 6)
    rng = np.random.default_rng(11)
    slow = np.array([literal(rng, 3, 12) for _ in range(100)])
    fast = np.array([
        heterogeneity.label_counts(
            fine, pachinko(fine, fine // 2, 3, per_client=12, root=0.3, leaf=2.0, seed=s), classes=6
        )
        for s in range(200)
    ])  # fmt: skip
    for measure in (
        lambda counts: np.count_nonzero(counts, axis=-1),
        lambda counts: counts.max(axis=-1),
        lambda counts: (counts**2).sum(axis=-1),
        lambda counts: counts.reshape(*counts.shape[:-1], 3, 2).sum(-1).max(-1),
    ):
        one, two = measure(slow).astype(float), measure(fast).astype(float)
        error = np.sqrt(one.var(axis=0) / len(one) + two.var(axis=0) / len(two))
        assert (np.abs(one.mean(axis=0) - two.mean(axis=0)) <= 4 * error + 1e-12).all()


@pytest.mark.parametrize(("root", "leaf"), [(1e-300, 1e-300), (1e-6, 1e300), (1e300, 1e-3)])
def test_extreme_concentrations_still_deal_everything(root: float, leaf: float) -> None:
    fine = np.repeat(np.arange(12), 10)
    owners = pachinko(fine, fine // 3, 6, per_client=20, root=root, leaf=leaf, seed=3)
    assert np.bincount(owners).tolist() == [20] * 6


def test_what_no_client_takes_is_unused_and_random() -> None:
    fine = np.tile(np.arange(4), 250)
    owners = pachinko(fine, fine // 2, 3, per_client=100, root=10.0, leaf=10.0)
    assert np.sum(owners == UNUSED) == 700
    assert np.bincount(owners[owners >= 0]).tolist() == [100, 100, 100]
    assert abs(np.mean(np.flatnonzero(owners >= 0)) - 500) < 5 * 289 / np.sqrt(300)


def test_pachinko_does_not_care_what_labels_are_called() -> None:
    fine = np.random.default_rng(2).integers(0, 8, 400)
    plain = pachinko(fine, fine // 2, 4, per_client=50, seed=7)
    renamed = pachinko(3 * fine - 50, 100 + fine // 2, 4, per_client=50, seed=7)
    np.testing.assert_array_equal(plain, renamed)
    assert (plain != pachinko(fine, fine // 2, 4, per_client=50, seed=8)).mean() > 0.2


# What cannot be done


FEW = np.array([0, 1, 1, 2])
ONE_EACH = {"clients": 2, "per_client": 1}


ALPHAS = (0.0, -1.0, np.nan, np.inf, "1", True)


@pytest.mark.parametrize(
    ("name", "labels", "options", "match"),
    [
        *((name, FEW, {"clients": n, **OF_LABELS[name]}, f"clients = {n}")
          for name in OF_LABELS for n in (0, -1, 5, 2.0)),
        *((name, FEW[:0], {"clients": 1, **OF_LABELS[name]}, "shape .0,") for name in OF_LABELS),
        *(("quantity", FEW, {"clients": 2, "alpha": a}, f"alpha = {a!r}") for a in ALPHAS),
        ("natural", [], {}, r"shape \(0,\)"),
        ("natural", [[1], [2]], {}, r"shape \(2, 1\)"),
        ("natural", np.array(["a", None], dtype=object), {}, "sorted"),
        ("natural", [0.0, np.nan], {}, "nan"),
        ("natural", [1, 2, 1], {"clients": 5}, "clients = 5"),
        ("shards", FEW, {"clients": 2, "per_client": 3}, "per_client = 3.* 6"),
        ("shards", FEW, {"clients": 2, "per_client": 1.5}, "per_client = 1.5"),
        ("pachinko", FEW, {"clients": 2, "coarse": FEW}, "per_client = 100.* 200"),
        ("pachinko", FEW, {"clients": 2}, "coarse"),
        ("pachinko", FEW, {**ONE_EACH, "coarse": [0, 1, 1]}, r"coarse labels have shape \(3,\)"),
        ("pachinko", FEW, {**ONE_EACH, "coarse": [0, 1, 2, 2]}, "label 1 .*example 2"),
        ("pachinko", FEW, {**ONE_EACH, "coarse": FEW, "root": 0}, "root = 0"),
        ("dirichlet", np.zeros((4, 2), int), {"clients": 2, "alpha": 1.0}, r"shape \(4, 2\)"),
        ("dirichlet", FEW, {"clients": 2}, "alpha"),
        ("dirichlet", FEW, {"clients": 2, "alhpa": 0.5}, "'alhpa': did you mean 'alpha'"),
        ("dirichlt", FEW, {"clients": 2}, "'dirichlt': did you mean 'dirichlet'"),
        ("iid", FEW, {}, "clients"),
        ("iid", FEW, {"clients": 2, "alpha": 0.5}, "alpha"),
        ("iid", FEW, {"clients": 2, "seed": 0.5}, "seed = 0.5"),
    ],
)  # fmt: skip
def test_impossible_partitions_are_refused(
    name: str, labels: Any, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        make(name, labels, **options)


# By name, with a record


@pytest.mark.parametrize(
    ("name", "options", "recorded"),
    [
        ("iid", {}, {}),
        ("dirichlet", {"alpha": 0.3}, {"alpha": 0.3}),
        ("shards", {}, {"per_client": 2}),
        ("quantity", {"alpha": 1}, {"alpha": 1, "minimum": 1}),
        ("pachinko", {"per_client": 90}, {"per_client": 90, "root": 0.1, "leaf": 10.0}),
    ],
)
def test_a_partition_can_be_made_again_from_its_record(
    name: str, options: dict[str, Any], recorded: dict[str, Any]
) -> None:
    coarse = LABELS // 2
    one = make(name, LABELS, 20, coarse=coarse, seed=9, **options)
    kept = json.loads(json.dumps(one.as_dict()))
    assert kept["options"] == recorded
    again = make(kept["name"], LABELS, 20, coarse=coarse, seed=kept["seed"], **kept["options"])
    np.testing.assert_array_equal(again.owners, one.owners)
    assert again.fingerprint() == kept["fingerprint"]
    assert make(name, LABELS, 20, coarse=coarse, seed=10, **options).fingerprint() != (
        one.fingerprint()
    )


def test_a_fingerprint_is_the_hash_of_the_owners_alone() -> None:
    made = Partition("iid", {}, 0, np.array([1, 0, -1]))
    content = b"".join(value.to_bytes(8, "little", signed=True) for value in (1, 0, -1))
    assert made.fingerprint() == hashlib.sha256(content).hexdigest()
    assert Partition("natural", {}, 7, np.array([1, 0, -1])).fingerprint() == made.fingerprint()
