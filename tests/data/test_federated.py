"""Grouping examples by client, and what is refused."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedzmg.data.federated import FederatedData
from fedzmg.errors import InputError


def of_client(data: FederatedData, client: int) -> list[float]:
    first, last = data.offsets[client : client + 2]
    return data.examples.x[first:last].tolist()


@given(st.lists(st.sampled_from(["ann", "bob", "cy", "di"]), min_size=1, max_size=30))
def test_grouping(owners: list[str]) -> None:
    """Against plain lists: each client's examples, in the order in which they came."""
    x = np.arange(len(owners), dtype=np.int64)
    data = FederatedData.from_arrays(x, -x, owners)
    wanted: dict[str, list[int]] = {}
    for i, owner in enumerate(owners):
        wanted.setdefault(owner, []).append(i)
    assert data.names == tuple(sorted(wanted))
    assert len(data) == len(wanted)
    assert data.counts.tolist() == [len(wanted[name]) for name in data.names]
    for k, name in enumerate(data.names):
        assert of_client(data, k) == wanted[name]
    assert torch.equal(data.examples.y, -data.examples.x)
    assert int(data.offsets[0]) == 0
    assert int(data.offsets[-1]) == len(owners)


def test_names_fix_the_order() -> None:
    data = FederatedData.from_arrays([1.0, 2.0, 3.0], [0, 0, 0], [7, 8, 7], names=[8, 7])
    assert data.names == ("8", "7")
    assert (of_client(data, 0), of_client(data, 1)) == ([2.0], [1.0, 3.0])


def test_arrays_are_copied_with_their_type() -> None:
    for dtype in (np.uint8, np.int16, np.float64, np.float16, np.bool_):
        x = np.arange(8).reshape(2, 4).astype(dtype)[::-1, ::2]
        kept = x.copy()
        data = FederatedData.from_arrays(x, [0, 1], [0, 1])
        x[:] = 0
        np.testing.assert_array_equal(data.examples.x.numpy(), kept, strict=True)


@pytest.mark.parametrize(
    ("names", "named"),
    [(["a", "b", "c"], "'c'"), (["a"], "names"), (["a", "b", "a"], "names"), ([], "names")],
)
def test_wrong_names_are_refused(names: list[str], named: str) -> None:
    with pytest.raises(InputError, match=named):
        FederatedData.from_arrays([1.0, 2.0], [0, 0], ["a", "b"], names=names)


@pytest.mark.parametrize(
    ("x", "y", "clients", "named"),
    [
        ([1.0, 2.0], [0], ["a", "b"], r"training data .*\(2,\).*\(1,\)"),
        ([], [], [], "training data holds no example"),
        ([1.0, 2.0], [0, 0], ["a"], "1 client ids for 2 examples"),
        ([[1.0, 2.0], [np.nan, 0.0]], [0, 0], ["a", "b"], "inputs .* example 1"),
        ([1.0, 2.0], [np.inf, 0.0], ["a", "b"], "targets .* example 0"),
        ([[1.0], [1.0, 2.0]], [0, 0], ["a", "b"], "training data inputs"),
        (np.array([{}, {}]), [0, 0], ["a", "b"], "training data inputs"),
        ([1.0, 2.0], [0, 0], [None, "a"], "client ids"),
    ],
)
def test_invalid_arrays_are_refused(x: Any, y: Any, clients: Any, named: str) -> None:
    with pytest.raises(InputError, match=named) as caught:
        FederatedData.from_arrays(x, y, clients)
    assert "\n" not in str(caught.value)


def test_double_precision_is_rounded_only_for_a_training_in_less() -> None:
    x, y = np.array([0.1, 0.2]), np.array([1.0, 2.0])
    data = FederatedData.from_arrays(x, y, [0, 1])
    for dtype in (torch.float32, torch.float64):
        moved = data.to(torch.device("cpu"), dtype)
        assert torch.equal(moved.examples.x, torch.tensor(x, dtype=dtype))
        assert torch.equal(moved.examples.y, torch.tensor(y, dtype=dtype))
    assert moved.fingerprint() == data.fingerprint()
    assert moved.names == data.names


# Fingerprints.

X = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=np.float32)
Y = np.array([0, 1, 0])
IDS = ["a", "b", "a"]


def fingerprint(x: Any = X, y: Any = Y, ids: Any = IDS, names: Any = None) -> str:
    return FederatedData.from_arrays(x, y, ids, names).fingerprint()


def test_equal_data_have_equal_fingerprints() -> None:
    assert fingerprint() == fingerprint(X.copy(), torch.from_numpy(Y), np.array(IDS))
    assert fingerprint() == fingerprint(np.asfortranarray(X), Y.tolist(), tuple(IDS))
    # Interleaving clients differently is the same data as long as each keeps its order.
    assert fingerprint() == fingerprint(X[[1, 0, 2]], Y[[1, 0, 2]], ["b", "a", "a"])


def test_anything_that_changes_training_changes_the_fingerprint() -> None:
    nudged = X.copy()
    nudged[2, 1] = np.nextafter(np.float32(6.0), np.float32(7.0))
    others = [
        fingerprint(nudged),
        fingerprint(y=np.array([0, 1, 1])),
        fingerprint(ids=["a", "b", "b"]),
        fingerprint(ids=["a", "a", "a"]),
        fingerprint(ids=["a", "c", "a"]),
        fingerprint(names=["b", "a"]),
        fingerprint(X[[2, 1, 0]]),
        fingerprint(X[:, ::-1]),
        fingerprint(X[:, :, None]),
        fingerprint(X.astype(np.float16)),
        fingerprint(y=Y.astype(np.float32)),
    ]
    assert len({fingerprint(), *others}) == 1 + len(others)
    assert all(len(f) == 64 for f in others)


def test_fingerprint_is_frozen() -> None:
    """Stored runs are recognised by it: types, shapes and bytes of x, y and borders, then names."""
    digest = hashlib.sha256(b"torch.float32(3, 2)" + struct.pack("<6f", 1, 2, 5, 6, 3, 4))
    digest.update(b"torch.int64(3,)" + struct.pack("<3q", 0, 0, 1))
    digest.update(b"torch.int64(3,)" + struct.pack("<3q", 0, 2, 3) + b"a\x1fb")
    assert fingerprint() == digest.hexdigest()
    assert fingerprint().startswith("952571192db3cfb5")
