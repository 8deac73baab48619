from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import damaged, fuzz_tests
from test_arrays import rows_of

from fedzmg.data.formats.images import read_idx
from fedzmg.errors import InputError

# Two images of 2 x 3, byte by byte as the format says.
IMAGES = bytes.fromhex("00000803 00000002 00000002 00000003 010203040506 0708090a0b0c")
LABELS = bytes.fromhex("00000801 00000002 07 03")


def write(folder: Path, **files: bytes) -> list[Path]:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in files]


def images_of(shape: tuple[int, int, int], data: bytes) -> bytes:
    return struct.pack(">HBBIII", 0, 8, 3, *shape) + data


def labels_of(data: bytes) -> bytes:
    return struct.pack(">HBBI", 0, 8, 1, len(data)) + data


def packed(data: bytes) -> bytes:
    """Without the time in its header, so that names of tests are the same in every process."""
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize("pack_images", [bytes, gzip.compress])
@pytest.mark.parametrize("pack_labels", [bytes, gzip.compress])
@pytest.mark.parametrize("swap", [False, True])
def test_known_bytes(tmp_path: Path, pack_images: Any, pack_labels: Any, swap: bool) -> None:
    paths = write(tmp_path, a=pack_images(IMAGES), b=pack_labels(LABELS))
    columns = read_idx(paths[::-1] if swap else paths)
    assert columns.array("x").tolist() == [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]]
    assert columns.array("x").dtype == np.uint8
    assert columns.array("y").tolist() == [7, 3]
    assert columns.array("y").dtype == np.int64
    assert columns.owners is None


def test_transposed_images_are_turned_upright(tmp_path: Path) -> None:
    columns = read_idx(write(tmp_path, a=IMAGES, b=LABELS), transposed=True)
    assert columns.array("x").tolist() == [[[1, 4], [2, 5], [3, 6]], [[7, 10], [8, 11], [9, 12]]]


WRITERS = {
    "bytes": struct.pack(">HBBI", 0, 8, 1, 4) + bytes([17, 2, 17, 2]),
    "words": struct.pack(">HBBI4i", 0, 0x0C, 1, 4, 17, 2, 17, 2),
    "lines": b"17\n2\r\n17\n2\n",
    "packed": gzip.compress(b"17\n2\n17\n 2"),
}


@pytest.mark.parametrize("writers", WRITERS.values(), ids=WRITERS)
def test_rows_are_sorted_by_writer(tmp_path: Path, writers: bytes) -> None:
    files = write(
        tmp_path, i=images_of((4, 1, 2), bytes(range(8))), l=labels_of(bytes(range(4))), w=writers
    )
    columns = read_idx(files[:2], writers=files[2])
    assert rows_of(columns) == {"2": [1, 3], "17": [0, 2]}
    assert columns.array("x")[:, 0].tolist() == [[2, 3], [6, 7], [0, 1], [4, 5]]


def test_writers_may_have_names_or_large_numbers(tmp_path: Path) -> None:
    files = write(tmp_path, i=IMAGES, l=LABELS, w="Ünal\nBo".encode(), n=b"1234567\n8")
    assert rows_of(read_idx(files[:2], writers=files[2])) == {"Bo": [3], "Ünal": [7]}
    assert rows_of(read_idx(files[:2], writers=files[3])) == {"8": [3], "1234567": [7]}


@pytest.mark.parametrize(
    ("writers", "match"),
    [
        (b"a\n", "1 client ids for 2"),
        (b"\na", "client id in row 0 is empty"),
        (b"a\n\xff", "row 1"),
        (packed(bytes([65]) * 2**22), "1 client ids for 2"),
        (labels_of(b"abc"), "3 client ids for 2"),
    ],
)
def test_writers_that_do_not_fit_are_refused(tmp_path: Path, writers: bytes, match: str) -> None:
    files = write(tmp_path, i=IMAGES, l=LABELS, w=writers)
    with pytest.raises(InputError, match=match) as caught:
        read_idx(files[:2], writers=files[2])
    assert str(files[2]) in str(caught.value)


@pytest.mark.parametrize(
    ("images", "labels", "match"),
    [
        (LABELS, LABELS, "one file of images"),
        (IMAGES, labels_of(b"123"), "3 labels for 2"),
        (IMAGES[:-1], LABELS, "a: shape"),
        (packed(IMAGES + b"!"), LABELS, "a: shape"),
        (packed(IMAGES)[:-6] + b"\0\0\0\0\0\0", LABELS, "CRC"),
        (packed(IMAGES) + b"garbage", LABELS, "cannot be read"),
        (b"\x89PNG\r\n", LABELS, "89504e47"),
        (images_of((0, 28, 28), b""), labels_of(b""), r"a: shape \(0"),
        (struct.pack(">HBBIIIf", 0, 0x0D, 3, 1, 1, 1, 1), LABELS, "00000d03"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tmp_path: Path, images: bytes, labels: bytes, match: str
) -> None:
    with pytest.raises(InputError, match=match):
        read_idx(write(tmp_path, a=images, b=labels))


@pytest.mark.parametrize(
    ("shape", "zeros", "match"),
    [
        ((2, 2, 3), 2**22, r"shape \(2, 2, 3\)"),
        ((2**32 - 1, 2**32 - 1, 28), 2**20, "archive bomb"),
        ((2**16, 64, 64), 2**20, "archive bomb"),
        ((2**13, 64, 64), 2**20, r"shape \(8192"),
    ],
    ids=["small header", "absurd header", "large header", "header beyond the data"],
)
def test_archive_bombs_are_refused(
    tmp_path: Path, shape: tuple[int, int, int], zeros: int, match: str
) -> None:
    path = tmp_path / "images"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(images_of(shape, b""))
        for _ in range(zeros // 2**20):
            file.write(bytes(2**20))
    paths = [path, *write(tmp_path, labels=LABELS)]
    with pytest.raises(InputError, match=match):
        read_idx(paths)


def read_one(paths: list[Path]) -> None:
    """Read a damaged file as images, as labels and as writers."""
    files = write(paths[0].parent, i=IMAGES, l=LABELS, w=b"a\nb")
    refusals = []
    for damage in range(3):
        chosen = [paths[0] if number == damage else file for number, file in enumerate(files)]
        try:
            read_idx(chosen[:2], writers=chosen[2])
        except InputError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]


FILES = (IMAGES, packed(IMAGES), LABELS, packed(LABELS), b"a\nb", labels_of(b"12"))
test_damaged_files, test_many_damaged_files = fuzz_tests(read_one, damaged(*FILES), 25, 3000)
