"""Tests of class counts per client, by hand on tiny sets and for the presets."""

from __future__ import annotations

import numpy as np
import pytest

from fedzmg import tasks
from fedzmg.data.columns import Columns, Owners, Strings
from fedzmg.data.heterogeneity import DEFAULT_PARTITIONS, embedded_columns, owners_of, population
from fedzmg.data.text import CHARACTERS
from fedzmg.errors import InputError


def texts(*snippets: str, clients: dict[str, int]) -> Columns:
    encoded = [s.encode() for s in snippets]
    ends = np.cumsum([0, *(len(e) for e in encoded)])
    column = Strings(np.frombuffer(b"".join(encoded), np.uint8), ends)
    return Columns({"text": column}, Owners(tuple(clients), np.cumsum([0, *clients.values()])))


def test_characters_are_counted_over_all_snippets_of_a_client() -> None:
    found = population(
        texts("abba", "b", "zé", clients={"one": 2, "none": 0, "two": 1}),
        classes=None,
        partition=None,
    )
    assert found.unit == "characters"
    assert found.names == ("one", "two")
    assert found.notes == ("1 clients hold nothing and are left out",)
    one, two = found.counts
    a, b, z = (CHARACTERS.index(c) for c in "abz")
    assert (one[a], one[b], one.sum()) == (2, 3, 5)
    assert (two[z], two[-1], two.sum()) == (1, 1, 2), "a character of two bytes is one, unknown"
    assert found.labels[-1] == "*"


def test_embedded_digits_are_dealt_out_as_the_preset_does() -> None:
    found = population(
        embedded_columns("digits", "train"),
        classes=10,
        partition={**DEFAULT_PARTITIONS["digits", "train"], "seed": 0},
    )
    train = tasks.get("digits").train
    expected = np.zeros((len(train), 10), np.int64)
    np.add.at(expected, (owners_of(train.offsets), train.examples.y.numpy()), 1)
    np.testing.assert_array_equal(found.counts, expected)
    assert found.partition is not None
    assert found.partition["name"] == "dirichlet"
    assert len(found.partition["fingerprint"]) == 64


def test_rows_are_sorted_by_their_new_client() -> None:
    y = np.arange(20) % 4
    columns = Columns({"x": y.astype(np.uint8).reshape(-1, 1, 1), "y": y})
    found = population(columns, classes=4, partition={"name": "iid", "clients": 3, "seed": 1})
    np.testing.assert_array_equal(found.columns.array("x")[:, 0, 0], found.columns.array("y"))
    assert found.counts.sum() == 20
    assert found.counts.sum(1).tolist() == np.diff(found.columns.owners.offsets).tolist()  # type: ignore[union-attr]


def test_impossible_populations_are_refused() -> None:
    pooled = Columns({"x": np.zeros((2, 1, 1)), "y": np.zeros(2, np.int64)})
    with pytest.raises(InputError, match="--partition"):
        population(pooled, classes=None, partition=None)
    with pytest.raises(InputError, match="text"):
        population(texts("ab", clients={"a": 1}), classes=None, partition={"name": "iid"})
    with pytest.raises(InputError, match="'plays' has no split 'test'"):
        embedded_columns("plays", "test")
