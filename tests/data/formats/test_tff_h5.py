from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from apart import Apart
from fuzzing import damaged
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from test_arrays import texts

import fedzmg
from fedzmg.data.columns import Columns
from fedzmg.data.formats import federated_files
from fedzmg.errors import InputError

Clients = Mapping[str, Mapping[str, Any]]
TEXT = h5py.string_dtype()


def write(target: Any, clients: Clients, libver: str | None = None, **storage: Any) -> Any:
    with h5py.File(target, "w", libver=libver) as file:
        file.create_group("examples")
        for client, datasets in clients.items():
            group = file.create_group(f"examples/{client}")
            for name, values in datasets.items():
                dtype = TEXT if name == "snippets" else None
                group.create_dataset(name, data=values, dtype=dtype, **storage)
    return target


def digits(*labels: int, pixel: float = 1.0) -> dict[str, Any]:
    pixels = np.full((len(labels), 28, 28), pixel, np.float32)
    return {"pixels": pixels, "label": np.array(labels, np.int32)}


def photos(*labels: int, seed: int = 0) -> dict[str, Any]:
    image = np.random.default_rng(seed).integers(0, 256, (len(labels), 32, 32, 3), np.uint8)
    return {"image": image, "label": np.array(labels), "coarse_label": np.array(labels) // 5}


def offsets(columns: Columns) -> list[int]:
    assert columns.owners is not None
    return columns.owners.offsets.tolist()


def test_images_of_writers_come_back_as_the_bytes_they_were(tmp_path: Path) -> None:
    level = np.arange(256, dtype=np.uint8).repeat(49).reshape(16, 28, 28)
    # Ten writers: names sort before numbers do, so f10 comes second.
    clients = {f"f{i}": {"pixels": (1 - level[i : i + 1] / 255).astype("f4")} for i in (2, 10, 1)}
    for name, datasets in clients.items():
        datasets["label"] = np.array([int(name[1:])], np.int32)
    columns = federated_files.read_h5([write(tmp_path / "a.h5", clients)])
    assert columns.owners is not None
    assert columns.owners.names == ("f1", "f10", "f2")
    assert offsets(columns) == [0, 1, 2, 3]
    assert columns.array("x").dtype == np.uint8
    np.testing.assert_array_equal(columns.array("x"), 255 - level[[1, 10, 2]])
    assert columns.array("y").tolist() == [1, 10, 2]
    assert columns.array("y").dtype == np.int64
    assert columns.notes == ()


@settings(max_examples=15)
@given(
    hnp.arrays(np.uint8, st.tuples(st.integers(1, 3), st.just(28), st.just(28))),
    st.sampled_from(["<f4", ">f4", "<f8"]),
    st.sampled_from([{}, {"compression": "gzip", "shuffle": True}, {"compression": "lzf"}]),
)
def test_any_bytes_survive(
    tmp_path_factory: pytest.TempPathFactory, level: Any, dtype: str, storage: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.h5"
    half = {"pixels": (level / 255).astype(dtype), "label": np.arange(len(level), dtype="u1")}
    columns = federated_files.read_h5([write(path, {"a": half, "b": half}, **storage)])
    np.testing.assert_array_equal(columns.array("x"), np.concatenate([level, level]))
    assert columns.array("y").tolist() == [*range(len(level))] * 2


def test_other_floats_are_kept_with_a_note(tmp_path: Path) -> None:
    clients = {"a": digits(1, pixel=0.2), "b": digits(2, pixel=0.3001)}
    columns = federated_files.read_h5([write(tmp_path / "a.h5", clients)])
    np.testing.assert_array_equal(columns.array("x")[:, 5, 7], np.array([0.2, 0.3001], np.float32))
    assert "float32" in columns.notes[0]


def test_photographs_come_channels_first(tmp_path: Path) -> None:
    clients = {"0": photos(7, 99), "1": photos(50, seed=1)}
    columns = federated_files.read_h5([write(tmp_path / "a.h5", clients)])
    x = columns.array("x")
    assert x.shape == (3, 3, 32, 32)
    assert x.dtype == np.uint8
    for i, j, k in ((0, 0, 0), (31, 2, 1), (4, 30, 2)):
        assert x[1, k, i, j] == clients["0"]["image"][1, i, j, k]
        assert x[2, k, i, j] == clients["1"]["image"][0, i, j, k]
    assert columns.array("y").tolist() == [7, 99, 50]
    assert columns.array("coarse").tolist() == [1, 19, 10]


def test_snippets_come_as_text(tmp_path: Path) -> None:
    speeches = {"ROMEO": ["What light?", "", "Ægle … 🙂"], "JULIET": ["Ay me!\nline"]}
    clients = {name: {"snippets": lines} for name, lines in speeches.items()}
    columns = federated_files.read_h5([write(tmp_path / "a.h5", clients)])
    assert texts(columns) == speeches["JULIET"] + speeches["ROMEO"]
    assert offsets(columns) == [0, 1, 4]


def test_files_follow_each_other(tmp_path: Path) -> None:
    first = write(tmp_path / "1.h5", {"b": digits(1, 2)})
    second = write(tmp_path / "2.h5", {"a": digits(3), "c": digits(), "d": digits(4)})
    columns = federated_files.read_h5([first, second])
    assert columns.owners is not None
    assert columns.owners.names == ("b", "a", "c", "d")
    assert offsets(columns) == [0, 2, 3, 3, 4]
    assert columns.array("y").tolist() == [1, 2, 3, 4]
    assert columns.notes == ("clients without any example: 1, the first is 'c'",)
    with h5py.File(first, "w") as file:
        file.create_dataset("examples/A/snippets", data=np.array([b"to be", b"or"], "S8"))
    assert texts(federated_files.read_h5([first])) == ["to be", "or"]


def _pixel(value: float) -> Clients:
    broken = digits(1, 2)
    broken["pixels"][1, 3, 4] = value
    return {"a": digits(0), "b": broken}


REFUSED: dict[str, tuple[Clients, str]] = {
    "NaN": (_pixel(np.nan), "client 'b': example 1 has a pixel of nan"),
    "too bright": (_pixel(1.5), "client 'b': example 1 has a pixel of 1.5"),
    "label too large": ({"a": digits(0, 62)}, "label 62 in row 1"),
    "shape": (
        {"a": digits(1), "b": {**digits(1), "pixels": np.ones((1, 28, 27), "f4")}},
        r"client 'b': .*'pixels' has shape \(1, 28, 27\)",
    ),
    "type": ({"a": {**digits(1), "label": np.ones(1)}}, "'label' has .*float64"),
    "lengths": ({"a": {**digits(1), "label": np.ones(2, "i4")}}, "'pixels': 1, 'label': 2"),
    "layout": ({"a": {"voice": np.ones(1)}}, "client 'a': .*voice"),
    "nobody": ({}, "no client"),
    "nothing": ({"a": digits()}, "no client has an example"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_content_is_refused_by_name(tmp_path: Path, case: str) -> None:
    clients, message = REFUSED[case]
    path = write(tmp_path / "a.h5", clients)
    with pytest.raises(InputError, match=message) as caught:
        federated_files.read_h5([path], classes=62)
    assert str(path) in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    first, second = (write(tmp_path / f"{i}.h5", {"a": digits(1)}) for i in range(2))
    with pytest.raises(InputError, match=r"1\.h5: client 'a' is also in .*0\.h5:"):
        federated_files.read_h5([first, second])
    with h5py.File(second, "w") as file:
        file["pixels"] = np.ones(3)
    with pytest.raises(InputError, match=r"1.h5: .*examples"):
        federated_files.read_h5([second])
    for data in (b"", b"PK", first.read_bytes()[:-100]):
        second.write_bytes(data)
        with pytest.raises(InputError, match=r"1.h5: cannot be read"):
            federated_files.read_h5([second])
    with h5py.File(second, "w") as file:
        file.create_dataset("examples/a/snippets", data=np.array([b"fine", b"\xff"], "S4"))
    with pytest.raises(InputError, match=r"client 'a': .* in row 1"):
        federated_files.read_h5([second])


@pytest.mark.parametrize("kind", ["soft", "external", "virtual", "storage"])
def test_data_in_other_files_are_refused(tmp_path: Path, kind: str) -> None:
    other = write(tmp_path / "other.h5", {"a": digits(1, 2)})
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["examples/a/pixels"] = digits(1, 2)["pixels"]
        group = file["examples/a"]
        if kind == "soft":
            file["label"] = np.ones(2, "i4")
            group["label"] = h5py.SoftLink("/label")
        elif kind == "external":
            group["label"] = h5py.ExternalLink(str(other), "examples/a/label")
        elif kind == "virtual":
            layout = h5py.VirtualLayout((2,), "i4")
            layout[:] = h5py.VirtualSource(str(other), "examples/a/label", (2,))
            group.create_virtual_dataset("label", layout)
        else:
            group.create_dataset("label", (2,), "i4", external=[(str(other), 0, 8)])
    with pytest.raises(InputError, match=r"client 'a'.*'label'"):
        federated_files.read_h5([tmp_path / "a.h5"])


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        blank = {"dtype": "f4", "chunks": (22000, 28, 28), "compression": "gzip"}
        file.create_dataset("examples/a/pixels", (22000, 28, 28), **blank)
        file["examples/a/label"] = np.zeros(22000, "i4")
    with pytest.raises(InputError, match="archive bomb"):
        federated_files.read_h5([tmp_path / "a.h5"])


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    pytest.importorskip("resource", reason="the memory of a process cannot be bounded here")
    child = Apart(Path(fedzmg.__path__[0]), "federated_files.read_h5")
    yield child
    child.close()


def _small_files() -> list[bytes]:
    rng = np.random.default_rng(0)
    pixels = (rng.integers(0, 256, (1, 28, 28)) / 255).astype("f4")
    contents: list[tuple[Clients, str | None, dict[str, Any]]] = [
        (
            {c: {"pixels": 0 * pixels, "label": np.ones(1, "i4")} for c in "ab"},
            None,
            {"chunks": True},
        ),
        ({c: digits(3) for c in "abc"}, "latest", {"compression": "gzip"}),
        ({c: photos(7) for c in "ab"}, None, {"compression": "gzip"}),
        ({c: {"snippets": ["ay", "", "wörd"]} for c in "ab"}, None, {}),
        ({c: {"snippets": ["ay", "", "wörd"]} for c in "ab"}, "latest", {}),
    ]
    return [
        write(io.BytesIO(), clients, libver, **storage).getvalue()
        for clients, libver, storage in contents
    ]


SMALL = _small_files()


def test_a_damaged_heap_of_strings_is_refused(tmp_path: Path) -> None:
    """The HDF5 library runs in circles on an object of no size."""
    path = tmp_path / "heap.h5"
    for whole in (file for file in SMALL if b"GCOL" in file):
        first = whole.index(b"GCOL") + 16
        path.write_bytes(whole)
        assert federated_files.read_h5([path]).rows == 6
        for size in (0, 2**62, 2**64 - 16):
            for index in (0, 1):
                header = struct.pack("<HHIQ", index, 0, 0, size)
                damage = whole[:first] + header + whole[first + 16 :]
                if (index, size) != (1, 0):
                    path.write_bytes(damage)
                    with pytest.raises(InputError, match="heap"):
                        federated_files.read_h5([path])


def check_damaged(tmp_path_factory: pytest.TempPathFactory, apart: Apart, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.h5"
    path.write_bytes(data)
    answer = apart.read(path)
    assert answer == "ok" or answer.startswith(f"refused: {path}"), answer


DAMAGED = given(data=st.one_of([damaged(file) for file in SMALL]))
test_damaged_files = settings(max_examples=40)(DAMAGED(check_damaged))
test_many_damaged_files = pytest.mark.slow(settings(max_examples=4000)(DAMAGED(check_damaged)))
