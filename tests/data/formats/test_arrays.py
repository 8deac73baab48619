from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import damaged, fuzz_tests
from hypothesis import given, settings
from hypothesis import strategies as st

from fedzmg.data.columns import Columns
from fedzmg.data.formats import arrays, common
from fedzmg.errors import InputError


def rows_of(columns: Columns) -> dict[str, list[Any]]:
    """Each client's rows of y, read off the offsets."""
    assert columns.owners is not None
    names, offsets = columns.owners
    y = columns.array("y")
    return {name: y[a:b].tolist() for name, (a, b) in zip(names, pairwise(offsets), strict=True)}


def texts(columns: Columns, name: str = "text") -> list[str]:
    text, offsets = columns.strings(name)
    return [text[a:b].tobytes().decode() for a, b in pairwise(offsets)]


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["b", "a", "10", "9", "é"]), min_size=1, max_size=30))
def test_every_client_gets_its_own_rows(clients: list[str]) -> None:
    columns = arrays.from_arrays(np.zeros((len(clients), 1)), range(len(clients)), clients)
    expected = {name: [i for i, c in enumerate(clients) if c == name] for name in set(clients)}
    assert rows_of(columns) == expected


def test_strings_become_text_and_names_become_classes() -> None:
    columns = arrays.from_arrays(["Hé", "", "you"], ["dog", "cat", "dog"], ["b", "b", "a"])
    assert texts(columns) == ["you", "Hé", ""]
    assert columns.array("y").tolist() == [1, 1, 0]
    assert columns.notes == ("classes: cat, dog",)
    assert columns.classes == ("cat", "dog")


def test_arrays_of_objects_count_as_what_they_hold() -> None:
    columns = arrays.from_arrays(*(np.array(v, object) for v in (["p", "q"], [3, 1], [7, 5])))
    assert (rows_of(columns), texts(columns)) == ({"5": [1], "7": [3]}, ["q", "p"])
    for x in ([[1, 2.5], [3, 4]], [1, 2.5]):
        made = arrays.from_arrays(np.array(x, object), [0, 1]).array("x")
        assert (made.tolist(), made.dtype) == (x, np.float64)


@pytest.mark.parametrize(
    ("x", "y", "clients", "match"),
    [
        ([], [], [], "no row"),
        ([1.0, np.nan], [0, 1], [0, 1], "row 1 holds NaN"),
        ([1.0, 2.0], [0], [0, 1], "1 labels for 2"),
        ([1.0, 2.0], [0, -1], [0, 1], "label -1 in row 1"),
        ([1.0, 2.0], [0, None], [0, 1], "labels"),
        ([1.0, 2.0], [0, 2**64], [0, 1], "labels"),
        ([1.0, 2.0], [0, 1], ["a", ""], "client id in row 1 is empty"),
        ([1.0, 2.0], [0, 1], ["a", "\ud800"], "client ids: .* row 1"),
        ([[1.0], [2.0, 3.0]], [0, 1], [0, 1], "rows of equal shape"),
        ([1j, 2j], [0, 1], [0, 1], "complex128"),
        (["a", None], [0, 1], [0, 1], "None in row 1"),
        (np.array([[1, None], [2, 3]]), [0, 1], [0, 1], "type object"),
        (np.array([[1, "a"], [2, 3]], object), [0, 1], [0, 1], "type object"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(x: Any, y: Any, clients: Any, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        arrays.from_arrays(x, y, clients)
    assert "\n" not in str(caught.value)


def test_labels_must_be_among_the_classes() -> None:
    ids, names = common.labels(["b", "a"], "f", ("b", "a", "c"))
    assert (ids.tolist(), names) == ([0, 1], ("b", "a", "c"))
    with pytest.raises(InputError, match="row 1: unknown class 'dgo': did you mean 'dog'"):
        common.labels(["dog", "dgo"], "f", ("dog",))
    with pytest.raises(InputError, match="label 2 in row 0"):
        common.labels([2], "f", ("a", "b"))
    with pytest.raises(InputError, match="name each class once"):
        common.labels(["a"], "f", ("a", "a"))


X = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
Y = np.array([3, 1, 2, 0])
CLIENTS = np.array(["b", "a", "b", "c"])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize(
    "x",
    [
        X,
        np.asfortranarray(X),
        X.astype(">f4"),
        X.astype(np.uint8),
        X > 3,
        np.array(["p", "qq", "", "ré"]),
    ],
    ids=["float", "fortran", "big-endian", "bytes", "bool", "text"],
)
def test_npz_holds_what_numpy_wrote(tmp_path: Path, save: Callable[..., None], x: Any) -> None:
    save(tmp_path / "a.npz", x=x, y=Y.astype(np.uint8), client=CLIENTS, more=Y)
    columns = arrays.read_arrays([tmp_path / "a.npz"])
    order = [1, 0, 2, 3]
    if x.dtype.kind == "U":
        assert texts(columns) == x[order].tolist()
    else:
        assert columns.array("x").dtype.isnative
        np.testing.assert_array_equal(columns.array("x"), x[order])
    assert rows_of(columns) == {"a": [1], "b": [3, 2], "c": [0]}
    assert columns.notes == ("arrays not used: 'more'",)


def npz(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


def npy(array: Any, *, pickled: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=pickled)
    return file.getvalue()


def header(shape: tuple[int, ...], descr: str = "|u1") -> bytes:
    file = io.BytesIO()
    fields = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, fields)  # type: ignore[no-untyped-call]
    return file.getvalue()


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({"x": npy(X)}, "'y'"),
        ({"x": npy(X), "y": npy(Y[:3])}, "3 labels for 4"),
        ({"x": npy(X * np.nan), "y": npy(Y)}, "x: row 0 holds NaN"),
        ({"x": npy(X)[:-3], "y": npy(Y)}, "array 'x'"),
        ({"x": npy(X), "y": npy(Y), "client": npy(Y), "clients": npy(Y)}, "'clients'"),
        ({"x": header((10**12,)), "y": npy(Y)}, "array 'x'"),
        ({"x": header((4,), "|V3") + bytes(12), "y": npy(Y)}, "expected numbers"),
        ({"x": b"garbage", "y": npy(Y)}, "cannot be read"),
    ],
)
def test_npz_that_does_not_fit_is_refused(
    tmp_path: Path, members: dict[str, bytes], match: str
) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(npz(**members))
    with pytest.raises(InputError, match=match) as caught:
        arrays.read_arrays([path])
    assert str(path) in str(caught.value)


def test_zeros_that_unpack_to_a_thousand_times_their_size_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "_SMALL", 2**20)  # a small bomb packs faster
    path = tmp_path / "a.npz"
    count = 2**21
    path.write_bytes(npz(x=header((count,)) + bytes(count), y=npy(Y)))
    with pytest.raises(InputError, match="archive bomb"):
        arrays.read_arrays([path])


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    bait = np.array([_Touch(str(trap))] * 4, dtype=object)
    path = tmp_path / "a.npz"
    path.write_bytes(npz(x=npy(bait, pickled=True), y=npy(Y)))
    with pytest.raises(InputError, match="array 'x'"):
        arrays.read_arrays([path])
    path.write_bytes(npz(x=pickle.dumps(_Touch(str(trap))), y=npy(Y)))
    with pytest.raises(InputError, match="array 'x'"):
        arrays.read_arrays([path])
    assert not trap.exists()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(npy(X))
    os.mkfifo(tmp_path / "pipe")
    for name, match in {"": "not a regular", "pipe": "not a regular", "a.npz": "cannot be"}.items():
        with pytest.raises(InputError, match=match):
            arrays.read_arrays([tmp_path / name])


VALID = [
    npz(x=npy(X), y=npy(Y), clients=npy(CLIENTS)),
    npz(x=npy(np.asfortranarray(X)), y=npy(np.array(["a", "b", "b", "a"]))),
]


test_damaged_files, test_many_damaged_files = fuzz_tests(
    arrays.read_arrays, damaged(*VALID), 30, 3000
)
