from __future__ import annotations

import collections
import datetime
import functools
import os
import pickle
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import damaged, fuzz_tests
from hypothesis import strategies as st

from fedzmg.data.columns import Columns
from fedzmg.data.formats import images
from fedzmg.data.formats.images import FINE_TO_COARSE
from fedzmg.errors import InputError

FINE = [19, 29, 0, 99]
COARSE = [11, 15, 4, 13]
PIXELS = np.random.default_rng(0).integers(0, 256, (4, 3072), np.uint8)
BINARY = b"".join(
    bytes([coarse, fine]) + row.tobytes()
    for coarse, fine, row in zip(COARSE, FINE, PIXELS, strict=True)
)


def batch(rows: int = 4, **other: Any) -> dict[bytes, Any]:
    content = {
        b"filenames": [f"bos_taurus_s_{i:06d}.png".encode() for i in range(rows)],
        b"batch_label": b"training batch 1 of 1",
        b"fine_labels": FINE[:rows],
        b"coarse_labels": COARSE[:rows],
        b"data": PIXELS[:rows],
    }
    content.update({key.encode(): value for key, value in other.items()})
    return content


def python_2(rows: int = 4) -> bytes:
    """Write a pickle as cPickle of Python 2 does, instruction by instruction."""
    memory = iter(range(1, 200))

    def put() -> bytes:
        return b"q" + bytes([next(memory)])

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value + put()

    def listed(items: list[bytes]) -> bytes:
        return b"]" + put() + b"(" + b"".join(items) + b"e"

    def number(value: int) -> bytes:
        return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)

    data = PIXELS[:rows].tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n" + put() + b"cnumpy\nndarray\n" + put()
        + b"K\x00\x85" + text(b"b") + b"\x87R" + put()
        + b"(K\x01" + b"\x8a\x01" + bytes([rows]) + number(3072) + b"\x86"
        + b"cnumpy\ndtype\n" + put() + text(b"u1") + b"K\x00K\x01\x87R" + put()
        + b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89T" + struct.pack("<I", len(data)) + data + b"tb"
    )  # fmt: skip
    items = (
        text(b"filenames") + listed([text(b"a.png"), text(b"b.png")])
        + text(b"batch_label") + text(b"training batch 1 of 1")
        + text(b"fine_labels") + listed([number(i) for i in FINE[:rows]])
        + text(b"coarse_labels") + listed([number(i) for i in COARSE[:rows]])
        + text(b"data") + array
    )  # fmt: skip
    return b"\x80\x02}" + put() + b"(" + items + b"u."


def same(columns: Columns, rows: int = 4) -> None:
    x = columns.array("x")
    assert (x.shape, x.dtype) == ((rows, 3, 32, 32), np.uint8)
    for image, colour, i, j in ((0, 0, 0, 0), (1, 2, 31, 5), (rows - 1, 1, 7, 30)):
        assert x[image, colour, i, j] == PIXELS[image, colour * 1024 + i * 32 + j]
    np.testing.assert_array_equal(x.reshape(rows, 3072), PIXELS[:rows])
    assert columns.array("y").tolist() == FINE[:rows]
    assert columns.array("coarse").tolist() == COARSE[:rows]
    assert columns.array("y").dtype == columns.array("coarse").dtype == np.int64
    assert columns.owners is None


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_binary_files_follow_each_other(tmp_path: Path) -> None:
    assert collections.Counter(FINE_TO_COARSE) == dict.fromkeys(range(20), 5)
    first = put(tmp_path / "1.bin", BINARY[: 3 * 3074])
    second = put(tmp_path / "2.bin", BINARY[3 * 3074 :])
    same(images.read_cifar_binary([first, second]))


BAD_RECORDS = {
    "": b"",
    "12295": BINARY[:-1],
    "coarse label 20": BINARY[:3074] + b"\x14" + BINARY[3075:],
    "fine label 100": BINARY[:3075] + b"\x64" + BINARY[3076:],
    "coarse label 5 in row 2": BINARY[:6148] + b"\x05" + BINARY[6149:],
}


@pytest.mark.parametrize("value", BAD_RECORDS)
def test_bad_records_are_refused(tmp_path: Path, value: str) -> None:
    path = put(tmp_path / "bad.bin", BAD_RECORDS[value])
    with pytest.raises(InputError, match=f"bad.bin.*{value}"):
        images.read_cifar_binary([path])


def test_a_pickle_of_python_2(tmp_path: Path) -> None:
    data = python_2()
    content = pickle.loads(data, encoding="bytes")  # the one that was made above
    np.testing.assert_array_equal(content[b"data"], PIXELS)
    same(images.read_cifar_python([put(tmp_path / "train", data)]))


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize("text", [False, True])
def test_pickles_of_python_3(tmp_path: Path, protocol: int, text: bool) -> None:
    content = {key.decode() if text else key: value for key, value in batch().items()}
    data = pickle.dumps(content, protocol=protocol)
    same(images.read_cifar_python([put(tmp_path / "train", data)]))
    older = data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    if protocol < 4:  # later ones say how long a name is
        same(images.read_cifar_python([put(tmp_path / "older", older)]))


BAD: dict[str, tuple[Any, str]] = {
    "list": ([1, 2], "cannot be read"),
    "too few labels": (batch(fine_labels=FINE[:3]), "fine_labels"),
    "label true": (batch(coarse_labels=[*COARSE[:3], True]), "coarse_labels"),
    "label 100": (batch(fine_labels=[*FINE[:3], 100]), "fine label 100 in row 3"),
    "labels disagree": (batch(coarse_labels=[11, 14, 4, 13]), "coarse label 14 in row 1"),
    "narrow": (batch(data=PIXELS[:, :100].copy()), "data"),
    "no image": (batch(0), "fine_labels"),
    "deep": (b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".", ""),
    "list in itself": (b"\x80\x02]q\x00h\x00a.", ""),
    "claims 4 GiB": (b"\x80\x02T\xff\xff\xff\x7fabc.", ""),
    "no end": (b"\x80\x02}", ""),
    "empty": (b"", ""),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_pickles_are_refused(tmp_path: Path, case: str) -> None:
    content, message = BAD[case]
    data = content if isinstance(content, bytes) else pickle.dumps(content, protocol=4)
    with pytest.raises(InputError, match=f"bad: .*{message}") as caught:
        images.read_cifar_python([put(tmp_path / "bad", data)])
    assert "\n" not in str(caught.value)


class Runs:
    """Calls something when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.parts = function, arguments

    def __reduce__(self) -> Any:
        return self.parts


class Plain:
    pass


def _hostile(trap: str) -> dict[str, bytes]:
    touch = f"open({trap!r}, 'w').close()"
    objects = {
        "system": Runs(os.system, f"touch {trap}"),
        "eval": Runs(eval, touch),
        "exec": Runs(exec, touch),
        "open": Runs(open, trap, "w"),
        "Popen": Runs(subprocess.Popen, ["touch", trap]),
        "getattr": Runs(getattr, "", "join"),
        "partial": functools.partial(os.system, f"touch {trap}"),
        "object": Plain(),
        "class": Plain,
        "date": datetime.date(2000, 1, 1),
        "scalar": np.float64(3),
        "load": Runs(np.load, trap),
    }
    pickles = {
        f"{name} {protocol}": pickle.dumps(content, protocol=protocol)
        for name, value in objects.items()
        for protocol in range(6)
        for content in ({**batch(), b"more": value},)
    }
    command = f"S'touch {trap}'\n".encode()
    return {
        **pickles,
        "global": b"cos\nsystem\n(" + command + b"tR.",
        "inst": b"(" + command + b"ios\nsystem\n.",
        "obj": b"(cos\nsystem\n" + command + b"o.",
        "new object": b"\x80\x02c" + b"os\nsystem\n)\x81.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"Pos.system\n.",
        "other class": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n"
        b"cnumpy\ndtype\nK\x00\x85U\x01b\x87R.",
        "attribute": b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93.",
        "function": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(U\x01atR.",
        "buffer": b"\x80\x05\x97.",
    }


def test_hostile_pickles_are_refused_and_run_nothing(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    cases = _hostile(str(trap))
    # The trap works: otherwise its absence would prove nothing.
    pickle.loads(cases["eval 2"], encoding="bytes")
    assert trap.exists()
    trap.unlink()
    for name, data in cases.items():
        with pytest.raises(InputError, match="bad: ") as caught:
            images.read_cifar_python([put(tmp_path / "bad", data)])
        assert "\n" not in str(caught.value), name
        assert not trap.exists(), name


def test_every_cut_is_refused(tmp_path: Path) -> None:
    data = python_2(1)
    for end in [*range(0, 400, 9), *range(len(data) - 30, len(data), 3)]:
        with pytest.raises(InputError):
            images.read_cifar_python([put(tmp_path / "cut", data[:end])])


@st.composite
def scrambled(draw: st.DrawFn) -> bytes:
    """Instructions of a small pickle with changes where they matter, not among the pixels."""
    data = bytearray(python_2(1))
    pixels = data.index(PIXELS[0].tobytes())
    places = [*range(pixels), *range(pixels + 3072, len(data))]
    for place in draw(st.lists(st.sampled_from(places), min_size=1, max_size=5)):
        data[place] = draw(
            st.one_of(st.integers(0, 255), st.sampled_from(b"()]}tesuabqhKUTR.N\x85"))
        )
    return bytes(data)


PICKLES = [python_2(1), *(pickle.dumps(batch(1), protocol=protocol) for protocol in (3, 4))]


test_damaged_pickles, test_many_damaged_pickles = fuzz_tests(
    images.read_cifar_python, st.one_of(damaged(*PICKLES), scrambled()), 50, 4000
)
test_damaged_records, test_many_damaged_records = fuzz_tests(
    images.read_cifar_binary, damaged(BINARY[:6148]), 25, 1000
)
