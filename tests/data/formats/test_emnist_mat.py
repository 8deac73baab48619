from __future__ import annotations

import io
import struct
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from fuzzing import damaged, read_or_refuse
from hypothesis import HealthCheck, given, settings
from test_arrays import refuse_to_allocate, rows_of

from fedzmg.data.formats import emnist_mat, rows
from fedzmg.errors import InputError


def part(rows: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "images": rng.integers(0, 256, (rows, 784), dtype=np.uint8),
        "labels": np.arange(rows, dtype=np.float64)[:, None],
        "writers": rng.integers(0, 3, (rows, 1)).astype(np.uint16) * 20,
    }


def mat(dataset: Any, *, packed: bool = True, **more: Any) -> bytes:
    file = io.BytesIO()
    scipy.io.savemat(file, {**more, "dataset": dataset}, do_compression=packed)
    return file.getvalue()


def emnist(**changes: Any) -> dict[str, Any]:
    train = {k: v for k, v in {**part(7, 0), **changes}.items() if v is not None}
    return {"train": train, "test": part(3, 1), "mapping": np.array([[0, 48], [1, 49]])}


def read(folder: Path, data: bytes, split: str = "train", **kwargs: Any) -> Any:
    path = folder / "a.mat"
    path.write_bytes(data)
    return emnist_mat.read([path], split=split, **kwargs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("split", ["train", "test"])
def test_files_that_scipy_wrote(tmp_path: Path, packed: bool, split: str) -> None:
    dataset = emnist()
    columns = read(tmp_path, mat(dataset, packed=packed, other=np.eye(40)), split)
    expected = dataset[split]
    writers = expected["writers"][:, 0]
    order = sorted(range(len(writers)), key=lambda i: (writers[i], i))
    assert columns.array("y").tolist() == order
    assert columns.array("y").dtype == np.int64
    # MATLAB shows reshape(images(i, :), 28, 28), which fills columns first.
    upright = [expected["images"][i].reshape(28, 28, order="F") for i in order]
    np.testing.assert_array_equal(columns.array("x"), upright)
    assert rows_of(columns) == {
        f"w{w:04d}": [i for i in order if writers[i] == w] for w in sorted(set(writers.tolist()))
    }


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.float32, np.int64])
def test_labels_of_every_type(tmp_path: Path, dtype: Any) -> None:
    labels = np.array([5, 0, 61, 1, 2, 3, 4], dtype)[:, None]
    columns = read(tmp_path, mat(emnist(labels=labels, writers=None)))
    assert columns.array("y").tolist() == [5, 0, 61, 1, 2, 3, 4]
    assert columns.owners is None


def test_a_handful_of_images_packs_labels_into_tags(tmp_path: Path) -> None:
    few = {"train": part(2, 0) | {"labels": np.array([[4], [9]], np.uint8)}}
    assert sorted(read(tmp_path, mat(few, packed=False)).array("y").tolist()) == [4, 9]


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (emnist(images=None), "has no images or no labels"),
        (emnist(labels=None), "has no images or no labels"),
        (emnist(images=np.zeros((0, 784), np.uint8)), "has no images"),
        (emnist(images=np.zeros((7, 785), np.uint8)), r"shape \(7, 785\): expected bytes"),
        (emnist(images=np.zeros((7, 784))), "expected bytes"),
        (emnist(labels=np.zeros((6, 1))), "labels: 6 for 7 images"),
        (emnist(labels=np.full((7, 1), 0.5)), "labels hold 0.5 in row 0"),
        (emnist(labels=np.full((7, 1), np.nan)), "hold nan in row 0"),
        (emnist(writers=np.full((7, 1), -3)), "writers: -3 in row 0"),
        (emnist(labels="letters"), "labels is a MATLAB char: expected numbers"),
        (emnist(writers=np.array([[1], ["a"]], object)), "is a MATLAB cell"),
        ({"test": part(3, 1)}, "dataset has no train"),
        (np.zeros((3, 3)), "is no struct"),
        ({"train": np.zeros((3, 3))}, "is no struct"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_other_layouts_are_refused(tmp_path: Path, dataset: Any, packed: bool, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        read(tmp_path, mat(dataset, packed=packed), allocate=refuse_to_allocate)
    assert str(tmp_path / "a.mat") in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    valid = mat(emnist())
    newer = b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM"
    for data, said in {
        newer: r"MATLAB 7.3: save it again in MATLAB with save\(..., '-v7'\)",
        b"\x89HDF\r\n\x1a\n": "MATLAB 7.3",
        b"": "no MATLAB file of version 5",
        b"PK\x03\x04" + bytes(200): "no MATLAB file of version 5",
        valid[:128]: "no variable 'dataset'",
        valid[:-100]: "cut off or damaged: get the file again",
    }.items():
        with pytest.raises(InputError, match=said):
            read(tmp_path, data)
    with pytest.raises(InputError, match="unknown split 'tset': did you mean 'test'"):
        read(tmp_path, valid, "tset")
    with pytest.raises(InputError, match="give one at a time"):
        emnist_mat.read([tmp_path / "a.mat"] * 2, split="train")


def test_one_changed_pixel_is_noticed_in_packed_files(tmp_path: Path) -> None:
    data = mat(emnist(images=np.zeros((7, 784), np.uint8)))
    body = bytearray(zlib.decompress(data[136:]))
    body[len(body) // 3] ^= 1
    changed = zlib.compress(bytes(body))[:-4] + data[-4:]  # keep the old check sum
    with pytest.raises(InputError, match="damaged"):
        read(tmp_path, data[:128] + struct.pack("<II", 15, len(changed)) + changed)


@pytest.mark.parametrize(("kind", "name"), [(3, "object"), (16, "function"), (17, "object")])
def test_objects_and_functions_are_refused(tmp_path: Path, kind: int, name: str) -> None:
    data = bytearray(mat(emnist(), packed=False))
    flags = struct.pack("<III", 6, 8, 9)  # first matrix of bytes: the images
    place = data.index(flags) + 8
    data[place] = kind
    with pytest.raises(InputError, match=f"dataset.train.images: holds a MATLAB {name}"):
        read(tmp_path, bytes(data))
    data = bytearray(mat(emnist(), packed=False))
    data[144] = kind  # class of the variable itself
    with pytest.raises(InputError, match=f"holds a MATLAB {name}"):
        read(tmp_path, bytes(data))


def test_images_that_unpack_to_a_thousand_times_their_size_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_ALWAYS_FINE", 2**20)  # a small bomb packs faster
    count = 4000
    bomb = {"train": {"images": np.zeros((count, 784), np.uint8), "labels": np.zeros((count, 1))}}
    with pytest.raises(InputError, match="archive bomb"):
        read(tmp_path, mat(bomb), allocate=refuse_to_allocate)


SMALL = {"train": part(2, 0), "test": part(1, 1)}
VALID = [mat(SMALL, packed=False)[:700], mat(SMALL, packed=False), mat(SMALL)]


def attack(folder: Path, data: bytes) -> None:
    read_or_refuse(partial(emnist_mat.read, split="train"), folder / "a.mat", data)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=damaged(*VALID))
def test_damaged_files_raise_only_the_documented_error(tmp_path: Path, data: bytes) -> None:
    attack(tmp_path, data)


@pytest.mark.slow
@settings(max_examples=3000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=damaged(*VALID))
def test_damaged_files_for_longer(tmp_path: Path, data: bytes) -> None:
    attack(tmp_path, data)


@pytest.mark.slow
def test_every_byte_of_the_structure_may_be_wrong(tmp_path: Path) -> None:
    valid = mat(SMALL, packed=False)
    for place in range(128, 700):
        for value in (0, 1, 0x7F, 0x80, 0xFF):
            data = bytearray(valid)
            data[place] = value
            attack(tmp_path, bytes(data))
