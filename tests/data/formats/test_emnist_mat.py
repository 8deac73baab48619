from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from fuzzing import damaged, fuzz_tests
from test_arrays import rows_of

from fedzmg.data.formats import images
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
    return images.read_mat([path], split=split, **kwargs)


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
        str(w): [i for i in order if writers[i] == w] for w in sorted(set(writers.tolist()))
    }


@pytest.mark.parametrize(
    ("dataset", "match"),
    [
        (emnist(images=None), "images"),
        (emnist(images=np.zeros((7, 784))), "images"),
        (emnist(labels=np.zeros((6, 1))), "labels"),
        (emnist(labels=np.full((7, 1), 0.5)), "labels hold 0.5"),
        (emnist(labels=np.full((7, 1), np.nan)), "hold nan in row 0"),
        (emnist(labels="letters"), "labels"),
        ({"test": part(3, 1)}, "train"),
        ({"train": np.zeros((3, 3))}, "train"),
    ],
)
def test_other_layouts_are_refused(tmp_path: Path, dataset: Any, match: str) -> None:
    with pytest.raises(InputError, match=f"a.mat.*{match}"):
        read(tmp_path, mat(dataset))


def test_other_files_are_refused(tmp_path: Path) -> None:
    valid = mat(emnist())
    newer = b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM"
    for data, match in {
        newer: "7.3",
        b"": "cannot be read",
        b"PK\x03\x04" + bytes(200): "cannot be read",
        valid[:128]: "dataset",
        valid[:-100]: "cannot be read",
    }.items():
        with pytest.raises(InputError, match=match):
            read(tmp_path, data)
    with pytest.raises(InputError, match="unknown split 'tset': did you mean 'test'"):
        read(tmp_path, valid, "tset")
    with pytest.raises(InputError, match="give one"):
        images.read_mat([tmp_path / "a.mat"] * 2, split="train")


# As NIST's: SciPy may crash on uncompressed files with damaged headers.
COMPRESSED = mat({"train": part(2, 0), "test": part(1, 1)})


test_damaged_files, test_many_damaged_files = fuzz_tests(
    images.read_mat, damaged(COMPRESSED), 25, 3000
)
