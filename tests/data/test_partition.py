"""Partitions: everything dealt out once, in equal sizes, as skewed as asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedzmg.data.partition import PARTITIONS, dirichlet, iid
from fedzmg.errors import InputError

LABELS = np.random.default_rng(0).integers(0, 10, 2000)


def shares(owners: npt.NDArray[np.int64], clients: int) -> npt.NDArray[np.float64]:
    """Label distribution of every client."""
    counts = np.zeros((clients, 10))
    np.add.at(counts, (owners, LABELS), 1)
    return counts / counts.sum(1, keepdims=True)


def skew(owners: npt.NDArray[np.int64], clients: int) -> float:
    """Mean total variation distance from the pooled label distribution; 0 is none."""
    pooled = np.bincount(LABELS, minlength=10) / len(LABELS)
    return float(0.5 * np.abs(shares(owners, clients) - pooled).sum(1).mean())


@pytest.mark.parametrize("name", PARTITIONS)
@given(data=st.data(), seed=st.integers(0, 20))
@settings(max_examples=40)
def test_everything_is_dealt_in_equal_sizes(name: str, data: Any, seed: int) -> None:
    labels = np.array(data.draw(st.lists(st.integers(-2, 5), min_size=1, max_size=40)))
    clients = data.draw(st.integers(1, len(labels)))
    more = (
        {"alpha": data.draw(st.sampled_from([1e-3, 0.1, 1.0, 100.0]))}
        if name == "dirichlet"
        else {}
    )
    owners = PARTITIONS[name](labels, clients, seed=seed, **more)
    assert owners.shape == labels.shape
    assert owners.dtype == np.int64
    counts = np.bincount(owners, minlength=clients)
    assert len(counts) == clients
    assert counts.max() - counts.min() <= 1
    assert counts.min() >= 1


@pytest.mark.parametrize(("name", "more"), [("iid", {}), ("dirichlet", {"alpha": 0.5})])
def test_a_partition_is_a_function_of_its_seed(name: str, more: dict[str, float]) -> None:
    one, two, other = (PARTITIONS[name](LABELS, 20, seed=seed, **more) for seed in (4, 4, 5))
    np.testing.assert_array_equal(one, two)
    assert (one != other).mean() > 0.5


def test_iid_is_not_skewed() -> None:
    owners = iid(LABELS, 10)
    # A random client of 200 examples of ten labels lies about 0.5 * 10 * 0.8 * sigma away.
    assert skew(owners, 10) < 0.12
    assert abs(np.corrcoef(owners, LABELS)[0, 1]) < 5 / np.sqrt(len(LABELS))
    assert abs(np.corrcoef(owners, np.arange(len(LABELS)))[0, 1]) < 5 / np.sqrt(len(LABELS))


def test_small_alpha_means_strong_skew() -> None:
    found = [skew(dirichlet(LABELS, 20, alpha=alpha), 20) for alpha in (0.01, 0.1, 1.0, 1000.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.6
    assert found[-1] < 0.15


def test_tiny_alpha_gives_clients_one_label_while_it_lasts() -> None:
    """Two labels, two clients: whoever likes different labels gets nothing else."""
    labels = np.repeat([0, 1], 50)
    purest = []
    for seed in range(12):
        owners = dirichlet(labels, 2, alpha=1e-4, seed=seed)
        purest.append(max(np.mean(labels[owners == 0]), 1 - np.mean(labels[owners == 0])))
    # Those who like the same label share it equally, and then the other one.
    assert all(p == 1.0 or p < 0.6 for p in purest)
    assert 2 <= purest.count(1.0) <= 10


def test_different_seeds_give_clients_different_tastes() -> None:
    favourite = [
        tuple(shares(dirichlet(LABELS, 5, alpha=0.05, seed=s), 5).argmax(1)) for s in range(6)
    ]
    assert len(set(favourite)) > 3


def test_examples_of_a_label_are_dealt_at_random() -> None:
    """Not in the order of the file: what lies first must not go to whom comes first."""
    owners = dirichlet(np.zeros(1000, dtype=np.int64), 2, alpha=1.0)
    assert abs(owners[:500].mean() - 0.5) < 5 * 0.5 / np.sqrt(500)
    assert (owners[1:] != owners[:-1]).mean() < 0.6


@pytest.mark.parametrize("clients", [0, -1, 4])
@pytest.mark.parametrize("name", PARTITIONS)
def test_impossible_numbers_of_clients_are_refused(name: str, clients: int) -> None:
    more = {"alpha": 1.0} if name == "dirichlet" else {}
    with pytest.raises(InputError) as caught:
        PARTITIONS[name](np.array([0, 1, 1]), clients, **more)
    assert str(caught.value) == f"clients = {clients}: expected 1 to 3, the number of examples"


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan")])
def test_impossible_alpha_is_refused(alpha: float) -> None:
    with pytest.raises(InputError) as caught:
        dirichlet(LABELS, 10, alpha=alpha)
    assert str(caught.value) == f"alpha = {alpha!r}: expected a number > 0"
