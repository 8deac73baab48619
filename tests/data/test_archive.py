from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedzmg.data import sources
from fedzmg.data.cache import SILENT
from fedzmg.errors import InputError

MEMBERS = {"set/train.bin": b"a" * 5000, "set/deep/test.bin": b"b" * 700, "set/notes.txt": b"hi"}
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
}


def tar_bytes(members: dict[str, bytes], kind: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as box:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            box.addfile(info, io.BytesIO(data))
    return COMPRESSORS[kind](out.getvalue())


def zip_bytes(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as box:
        for name, data in members.items():
            box.writestr(zipfile.ZipInfo(name), data, method)
    return out.getvalue()


def unpack(
    tmp_path: Path, data: bytes, name: str = "a", wanted: Sequence[str] = ("*",)
) -> dict[str, bytes]:
    path = tmp_path / name
    path.write_bytes(data)
    into = tmp_path / "out"
    files = sources.extract(path, into, wanted, SILENT)
    return {file.relative_to(into).as_posix(): file.read_bytes() for file in files}


@pytest.fixture(autouse=True)
def _small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_BYTES", 10**6)


def refused(tmp_path: Path, data: bytes) -> str:
    with pytest.raises(InputError) as caught:
        unpack(tmp_path, data)
    shutil.rmtree(tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "a") in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["zip", *(f"tar.{c}" for c in COMPRESSORS)])
def test_members_come_out_whatever_the_archive_is_called(tmp_path: Path, kind: str) -> None:
    data = zip_bytes(MEMBERS) if kind == "zip" else tar_bytes(MEMBERS, kind[4:])
    assert unpack(tmp_path, data) == MEMBERS
    assert sources.is_packed(tmp_path / "a")
    (tmp_path / "out").rename(tmp_path / "first")
    wanted = unpack(tmp_path, data, wanted=["*T.BIN", "*n.bin"])
    assert sorted(wanted) == ["set/deep/test.bin", "set/train.bin"]


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "lzma"])
def test_a_single_file_is_called_what_it_was_before(tmp_path: Path, kind: str) -> None:
    data = COMPRESSORS[kind](b"snippets" * 1000)
    assert unpack(tmp_path, data, f"plays.h5.{kind}") == {"plays.h5": b"snippets" * 1000}
    assert sources.is_packed(tmp_path / f"plays.h5.{kind}")
    # With another name it is not unpacked, or this one would be called a bomb.
    shutil.rmtree(tmp_path / "out")
    bomb = COMPRESSORS[kind](bytes(3 * 10**6))
    assert unpack(tmp_path, bomb, f"other.txt.{kind}", ["*.h5"]) == {}


@pytest.mark.parametrize("name", ["../evil", "set/../../evil", "/evil", "..\\evil", "C:/evil"])
@pytest.mark.parametrize("make", [tar_bytes, zip_bytes])
def test_members_cannot_leave_the_folder(
    tmp_path: Path, make: Callable[[dict[str, bytes]], bytes], name: str
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "a").write_bytes(make({"fine": b"1", name: b"2"}))
    with contextlib.suppress(InputError):
        sources.extract(inner / "a", inner / "out", ["*"], SILENT)
    assert [p.name for p in tmp_path.iterdir()] == ["inner"]
    assert {p.name for p in inner.iterdir()} <= {"a", "out"}
    assert not Path("/evil").exists()


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE]
)
def test_links_and_devices_are_not_unpacked(tmp_path: Path, kind: bytes) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as box:
        info = tarfile.TarInfo("set/thing")
        info.type, info.linkname = kind, "/etc/passwd"
        box.addfile(info)
    assert unpack(tmp_path, out.getvalue()) == {}


@pytest.mark.parametrize(
    "data",
    [
        tar_bytes({"zeros": bytes(3 * 10**6)}, "xz"),
        tar_bytes({f"{i}": bytes(10**5) for i in range(30)}, "gz"),
        zip_bytes({"zeros": bytes(3 * 10**6)}),
        zip_bytes({f"{i}": bytes(10**5) for i in range(30)}),
        gzip.compress(b"x" * (3 * 10**6)),
    ],
    ids=["tar-one", "tar-many", "zip-one", "zip-many", "gz"],
)
def test_a_bomb_is_not_unpacked(tmp_path: Path, data: bytes) -> None:
    assert len(data) < 20_000
    assert "1000000 bytes" in refused(tmp_path, data)


@pytest.mark.parametrize("kind", ["zip", *(f"tar.{c}" for c in COMPRESSORS), "gz", "bz2", "xz"])
def test_a_truncated_archive_is_refused(tmp_path: Path, kind: str) -> None:
    noise = bytes(range(256)) * 40
    members = {"train.bin": noise[::-1] * 3, "test.bin": noise}
    data = zip_bytes(members) if kind == "zip" else (
        COMPRESSORS[kind](noise) if kind in COMPRESSORS else tar_bytes(members, kind[4:])
    )  # fmt: skip
    for end in (len(data) // 3, len(data) // 2):
        assert "is damaged" in refused(tmp_path, data[:end])


@pytest.mark.parametrize("kind", ["zip", "tar.gz", "tar.bz2", "tar.xz", "gz"])
def test_a_changed_byte_is_noticed(tmp_path: Path, kind: str) -> None:
    noise = bytes(hash((i, 7)) % 256 for i in range(5000))
    made = zip_bytes({"train.bin": noise}, zipfile.ZIP_STORED) if kind == "zip" else (
        gzip.compress(noise) if kind == "gz" else tar_bytes({"train.bin": noise}, kind[4:])
    )  # fmt: skip
    data = bytearray(made)
    data[len(data) // 2] ^= 0xFF
    assert "is damaged" in refused(tmp_path, bytes(data))


def test_other_files_are_refused(tmp_path: Path) -> None:
    for data in (b"just text", b""):
        assert "not an archive" in refused(tmp_path, data)
        assert not sources.is_packed(tmp_path / "a")
    with pytest.raises(InputError, match="none"):
        sources.extract(tmp_path / "none", tmp_path / "out", ["*"], SILENT)


@settings(max_examples=40)
@given(st.data())
def test_nothing_but_the_documented_error_escapes(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["zip", "tar.", "tar.gz", "tar.bz2", "tar.xz", "gz", "lzma"]))
    members = {"set/train.bin": b"abc" * 300, "x": b""}
    made = zip_bytes(members) if kind == "zip" else (
        COMPRESSORS[kind](b"x" * 900) if kind in COMPRESSORS else tar_bytes(members, kind[4:])
    )  # fmt: skip
    mutated = bytearray(made)
    for _ in range(data.draw(st.integers(1, 6))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del mutated[data.draw(st.integers(0, len(mutated))) :]
    with tempfile.TemporaryDirectory() as folder:
        path, into = Path(folder) / "a", Path(folder) / "deep" / "out"
        path.write_bytes(mutated)
        sources.is_packed(path)
        message = ""
        try:
            sources.extract(path, into, ["*"], SILENT)
        except InputError as error:
            message = str(error)
        assert "\n" not in message
        assert sorted(p.name for p in Path(folder).iterdir()) in (["a"], ["a", "deep"])
