from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from test_column_store import ALONE
from test_fetch import Recorder

from fedzmg.data import catalog
from fedzmg.data.sources import SOURCES, Remote, Source
from fedzmg.errors import InputError

REAL = os.environ.get("FEDZMG_REAL_DATA")
needs_real = pytest.mark.skipif(
    REAL is None, reason="FEDZMG_REAL_DATA names no folder of real data"
)


def write_images(path: Path, clients: dict[str, int], *, classes: int = 10, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, rows in clients.items():
            group = file.create_group(f"examples/{name}")
            pixels = rng.integers(0, 256, (rows, 28, 28)).astype(np.float32) / np.float32(255)
            group["pixels"] = pixels
            group["label"] = (np.arange(rows) % classes).astype(np.int32)
    return path


def write_plays(path: Path, clients: dict[str, list[str]]) -> Path:
    with h5py.File(path, "w") as file:
        for name, snippets in clients.items():
            file.create_dataset(
                f"examples/{name}/snippets", data=snippets, dtype=h5py.string_dtype()
            )
    return path


def write_idx(path: Path, values: np.ndarray[Any, Any]) -> Path:
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    data = header + values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Source:
    """A set of the catalog, only smaller."""
    made = replace(SOURCES["emnist10"], counts={"train": (2, 7), "test": (2, 3)}, remotes=())
    monkeypatch.setitem(SOURCES, "tiny", made)
    monkeypatch.delenv("FEDZMG_MIRROR", raising=False)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return made


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    return make_pair(tmp_path / "files")


def make_pair(folder: Path, seed: int = 0, stem: str = "my") -> list[Path]:
    return [
        write_images(folder / f"{stem}_train.h5", {"a": 4, "b": 3}, seed=seed),
        write_images(folder / f"{stem}_test.h5", {"a": 1, "b": 2}, seed=seed),
    ]


def tar_bz2(files: list[Path], to: Path) -> Path:
    with tarfile.open(to, "w:bz2") as box:
        for file in files:
            box.add(file, file.name)
    return to


def left(cache: Path) -> list[str]:
    """List a data folder without its locks."""
    files = (p.relative_to(cache).as_posix() for p in cache.rglob("*"))
    return sorted(f for f in files if not f.startswith("locks") and f != "tmp")


def test_the_catalog_is_complete() -> None:
    for known in SOURCES.values():
        assert tuple(known.counts) == ("train", "test")
        for remote in known.remotes:
            assert re.fullmatch(r"https://[\w./~-]+/[\w.-]+", remote.url)
            assert re.fullmatch(r"[0-9a-f]{64}", remote.sha256)


def test_files_are_imported_and_mapped(tiny: Source, pair: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in ("tmp/tiny/0-official", "sets/tiny/data-0123456789ab/.train.01234567"):
        (cache / name).mkdir(parents=True)  # left by a killed process
    made = catalog.import_files("tiny", pair, cache)
    assert made.notes == ()
    assert len(list((cache / "sets" / "tiny").glob("data-*"))) == 1
    loaded = catalog.load("tiny", cache)
    assert loaded.fingerprint == made.fingerprint
    train, test = loaded.splits["train"], loaded.splits["test"]
    assert isinstance(train.array("x").base, np.memmap)
    assert train.owners is not None
    assert train.owners.names == ("a", "b")
    np.testing.assert_array_equal(train.owners.offsets, [0, 4, 7])
    with h5py.File(pair[1]) as file:
        expected = np.rint(file["examples/b/pixels"][:] * 255)
    np.testing.assert_array_equal(test.array("x")[1:], expected)
    found = catalog.stored("tiny", cache)
    assert found is not None
    assert found.counts == {"train": (2, 7), "test": (2, 3)}
    assert {s["sha256"] for s in found.sources} == {
        hashlib.sha256(p.read_bytes()).hexdigest() for p in pair
    }
    assert not (cache / "tmp" / "tiny").exists()
    home = made.path.parent
    (home / "data-0123456789ab" / "train").mkdir(parents=True)
    (home / ".set.json.0123abcd").write_bytes(b"{")
    assert catalog.import_files("tiny", pair, cache).fingerprint == made.fingerprint
    assert {path.name for path in home.iterdir()} == {"set.json", made.path.name}


@pytest.mark.parametrize("how", ["reversed", "folder", "tar.bz2", "zip", "bz2"])
def test_packing_does_not_change_the_data(
    tiny: Source, pair: list[Path], tmp_path: Path, how: str
) -> None:
    plain = catalog.import_files("tiny", pair, tmp_path / "plain")
    given = [tmp_path / f"all.{how}"]
    if how == "reversed":
        given = pair[::-1]
    elif how == "folder":
        given = [pair[0].parent]
    elif how == "tar.bz2":
        tar_bz2(pair, given[0])
    elif how == "zip":
        with zipfile.ZipFile(given[0], "w") as box:
            for file in pair:
                box.write(file, f"deep/{file.name}")
            box.writestr("deep/readme.txt", "hello")
    else:
        given = [tmp_path / f"{file.name}.bz2" for file in pair]
        for file, packed in zip(pair, given, strict=True):
            packed.write_bytes(bz2.compress(file.read_bytes()))
    assert catalog.import_files("tiny", given, tmp_path / "packed").fingerprint == plain.fingerprint
    assert not any("tmp/" in name for name in left(tmp_path / "packed"))


def test_a_difference_in_counts_is_noted(pair: list[Path], tmp_path: Path) -> None:
    notes = catalog.import_files("emnist10", pair, tmp_path / "cache").notes
    assert "train: 2 clients instead of 3,383" in notes
    assert "test: 3 examples instead of 40,832" in notes
    assert catalog.load("emnist10", tmp_path / "cache").notes == notes


def refused(name: str, files: list[Path], tmp_path: Path) -> str:
    cache = tmp_path / "refused"
    with pytest.raises(InputError) as caught:
        catalog.import_files(name, files, cache)
    assert left(cache) in ([], ["sets"])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_data_of_another_kind_are_refused(tiny: Source, pair: list[Path], tmp_path: Path) -> None:
    plays = [write_plays(tmp_path / f"p_{s}.h5", {"A": ["to be"]}) for s in ("train", "test")]
    assert "holds text, but 'tiny' needs x: give fed_emnist_digitsonly_train.h5" in refused(
        "tiny", plays, tmp_path
    )
    assert "holds x, y, but 'shakespeare' needs text" in refused("shakespeare", pair, tmp_path)
    wide = write_images(tmp_path / "w_train.h5", {"a": 12}, classes=12)
    assert "label 10 in row 10" in refused("tiny", [wide, pair[1]], tmp_path)


def test_mnist_and_emnist_files_are_imported_upright(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = np.arange(2 * 28 * 28).reshape(2, 28, 28) % 251
    for name, stem, test, upright in (
        ("mnist", "", "t10k", images),
        ("emnist-byclass", "emnist-byclass-", "test", images.transpose(0, 2, 1)),
    ):
        folder = tmp_path / name
        for split in ("train", test):
            write_idx(folder / f"{stem}{split}-images-idx3-ubyte.gz", images)
            write_idx(folder / f"{stem}{split}-labels-idx1-ubyte", np.array([3, 7]))
            write_idx(folder / f"emnist-letters-{split}-labels-idx1-ubyte.gz", np.array([1, 1]))
        made = catalog.import_files(name, [folder], tmp_path / "cache")
        np.testing.assert_array_equal(made.splits["test"].array("x"), upright)
        np.testing.assert_array_equal(made.splits["train"].array("y"), [3, 7])
        assert made.splits["train"].owners is None


def cifar_records(rows: int) -> bytes:
    """Records of one fine and one coarse class that belong together: apples are fruit."""
    pixels = np.arange(rows * 3072).reshape(rows, 3072) % 256
    return (
        np.concatenate([np.full((rows, 1), 4), np.zeros((rows, 1)), pixels], axis=1)
        .astype(np.uint8)
        .tobytes()
    )


def test_cifar_is_imported_from_its_official_archive(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(cifar_records(4))
    (folder / "test.bin").write_bytes(cifar_records(2))
    (folder / "fine_label_names.txt").write_text("apple\n")
    packed = tar_bz2([folder], tmp_path / "cifar-100-binary.tar.bz2")
    made = catalog.import_files("cifar100", [packed], tmp_path / "cache")
    assert made.splits["train"].array("x").shape == (4, 3, 32, 32)
    np.testing.assert_array_equal(made.splits["test"].array("coarse"), [4, 4])
    np.testing.assert_array_equal(made.splits["test"].array("y"), [0, 0])
    assert "train: 4 examples instead of 50,000" in made.notes
    again = catalog.import_files("cifar100", [folder], tmp_path / "other")
    assert again.fingerprint == made.fingerprint
    (folder / "test.bin").unlink()
    assert "the test split of 'cifar100'" in refused("cifar100", [folder], tmp_path)


def test_the_splits_of_leaf_are_its_folders(tmp_path: Path) -> None:
    def shard(name: str, users: dict[str, int]) -> None:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "users": list(users),
            "num_samples": list(users.values()),
            "user_data": {
                user: {"x": [[1.0] * 784] * rows, "y": list(range(rows))}
                for user, rows in users.items()
            },
        }
        path.write_text(json.dumps(content))

    shard("all_data/all_data_0.json", {"u": 9})
    shard("train/all_data_0_niid_0_keep_0_train_9.json", {"u": 3})
    shard("train/all_data_1_niid_0_keep_0_train_9.json", {"v": 2})
    shard("test/all_data_0_niid_0_keep_0_test_9.json", {"u": 1})
    made = catalog.import_files("emnist62", [tmp_path / "data"], tmp_path / "cache")
    train = made.splits["train"]
    assert train.owners is not None
    assert train.owners.names == ("u", "v")
    assert train.array("x").shape == (5, 28, 28)
    assert made.splits["test"].rows == 1
    assert "train: 2 clients instead of 3,400" in made.notes


def test_the_name_of_a_file_counts_before_the_name_of_its_folder(
    tiny: Source, tmp_path: Path
) -> None:
    write_images(tmp_path / "train" / "a_test.h5", {"a": 3})
    write_images(tmp_path / "test" / "latest_train.h5", {"a": 7})
    made = catalog.import_files("tiny", [tmp_path / "train", tmp_path / "test"], tmp_path / "c")
    assert made.splits["test"].rows == 3
    write_images(tmp_path / "both" / "train" / "data.h5", {"a": 6})
    write_images(tmp_path / "both" / "test" / "data.h5", {"a": 4})
    made = catalog.import_files("tiny", [tmp_path / "both"], tmp_path / "c")
    assert made.splits["train"].rows == 6
    for folder, rows in {"a/train/test": 5, "a/test/train/deep": 2}.items():
        write_images(tmp_path / "test" / folder / "data.h5", {"a": rows})
    made = catalog.import_files("tiny", [tmp_path / "test" / "a"], tmp_path / "c")
    assert (made.splits["train"].rows, made.splits["test"].rows) == (5, 2)


def test_of_several_files_the_official_ones_are_meant(
    tiny: Source, pair: list[Path], tmp_path: Path
) -> None:
    more = [write_images(tmp_path / "files" / "x_train.h5", {"a": 9}), *pair]
    message = refused("tiny", [tmp_path / "files"], tmp_path)
    assert "the train split of 'tiny'" in message
    assert str(more[0]) in message
    for split, rows in {"train": 5, "test": 2}.items():
        write_images(tmp_path / "files" / f"fed_emnist_digitsonly_{split}.h5", {"a": rows})
    made = catalog.import_files("tiny", [tmp_path / "files"], tmp_path / "cache")
    assert made.splits["train"].rows == 5
    packed = tar_bz2(sorted((tmp_path / "files").iterdir()), tmp_path / "all.tar.bz2")
    assert catalog.import_files("tiny", [packed], tmp_path / "other").fingerprint == (
        made.fingerprint
    )


def test_files_that_are_not_the_sets_are_refused_with_what_is_expected(
    tiny: Source, pair: list[Path], tmp_path: Path
) -> None:
    expected = "give fed_emnist_digitsonly_train.h5 and fed_emnist_digitsonly_test.h5"
    text, empty = tmp_path / "notes.txt", tmp_path / "empty"
    text.write_text("hello")
    empty.mkdir()
    other = tar_bz2([text], tmp_path / "other.tar.bz2")
    cut = tmp_path / "cut_train.h5"
    cut.write_bytes(pair[0].read_bytes()[:1000])
    for files, match in (
        ([text], f"{text} holds no file of 'tiny': {expected}"),
        ([empty], f"{empty} holds no file of 'tiny': {expected}"),
        ([other], f"{other} holds no file of 'tiny': {expected}"),
        ([tmp_path / "gone"], f"{tmp_path / 'gone'}: there is no such file or folder"),
        ([pair[0]], "the test split of 'tiny'"),
        ([cut, pair[1]], str(cut)),
        ([], f"no file is given for 'tiny': {expected}"),
    ):
        assert match in refused("tiny", files, tmp_path), files
    assert "did you mean 'emnist10'?" in refused("emnist1", pair, tmp_path)


def test_a_bad_file_in_an_archive_is_named_after_the_archive(
    tiny: Source, pair: list[Path], tmp_path: Path
) -> None:
    pair[0].write_bytes(pair[0].read_bytes()[:1000])
    packed = tar_bz2(pair, tmp_path / "all.tar.bz2")
    assert f"{packed}/my_train.h5: " in refused("tiny", [packed], tmp_path)
    one = tar_bz2(pair[1:], tmp_path / "one.tar.bz2")
    other = tar_bz2(make_pair(tmp_path / "other", stem="b"), tmp_path / "two.tar.bz2")
    assert f"found: {one}/my_test.h5, {other}/b_test.h5" in refused("tiny", [one, other], tmp_path)
    for damaged in (packed.read_bytes()[:1500], gzip.compress(pair[1].read_bytes())[:1500]):
        packed.write_bytes(damaged)
        assert f"{packed}: cannot be read" in refused("tiny", [packed], tmp_path)


def test_a_missing_set_is_refused_with_a_remedy(tmp_path: Path) -> None:
    for function, name, remedy in (
        (catalog.load, "emnist62", "fedzmg data get emnist62"),
        (catalog.load, "chars74k", "fedzmg data import chars74k"),
        (catalog.get, "chars74k", "fedzmg data import chars74k"),
        (catalog.remove, "chars74k", "'chars74k' is not here"),
    ):
        with pytest.raises(InputError, match=remedy):
            function(name, tmp_path)
    assert (catalog.stored("emnist62", tmp_path), left(tmp_path)) == (None, [])


@pytest.fixture
def mirror(tiny: Source, pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the official archive of the small set."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    pair = make_pair(tmp_path / "official", stem="fed_emnist_digitsonly")
    packed = tar_bz2(pair, folder / "tiny.tar.bz2")
    sha256 = hashlib.sha256(packed.read_bytes()).hexdigest()
    remote = Remote("https://example.org/x/tiny.tar.bz2", sha256, packed.stat().st_size)
    monkeypatch.setitem(SOURCES, "tiny", replace(tiny, remotes=(remote,)))
    return folder


def test_get_downloads_unpacks_and_converts_once(
    mirror: Path, pair: list[Path], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    progress = Recorder()
    made = catalog.get("tiny", cache, str(mirror), progress)
    assert [what for what, _ in progress.begun] == [
        "tiny.tar.bz2", "unpacking tiny.tar.bz2", "reading train", "reading test",
    ]  # fmt: skip
    assert made.notes == ()
    assert made.fingerprint == catalog.import_files("tiny", pair, tmp_path / "o").fingerprint
    other = tar_bz2(pair, tmp_path / "tiny.tar.bz2")
    [note] = catalog.import_files("tiny", [other], tmp_path / "p").notes
    assert "tiny.tar.bz2 is not the official file" in note
    again = Recorder()
    assert catalog.get("tiny", cache, str(mirror), again).fingerprint == made.fingerprint
    assert (again.begun, again.lines) == ([], ["tiny: is here already"])
    assert "downloads/tiny/tiny.tar.bz2" in left(cache)
    assert catalog.remove("tiny", cache) > 10_000
    assert left(cache) == ["downloads", "sets"]


def test_the_same_files_are_not_converted_twice_but_others_replace_them(
    tiny: Source, pair: list[Path], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    first = catalog.import_files("tiny", pair, cache)
    progress = Recorder()
    assert catalog.import_files("tiny", pair[::-1], cache, progress).fingerprint == (
        first.fingerprint
    )
    assert (progress.begun, progress.lines) == ([], ["tiny: these files are imported already"])
    train, test = pair
    swapped = tmp_path / "swapped"
    swapped.mkdir()
    files = [train.rename(swapped / test.name), test.rename(swapped / train.name)]
    assert catalog.import_files("tiny", files, cache).splits["train"].rows == 3
    second = catalog.import_files("tiny", make_pair(tmp_path / "other", seed=1), cache)
    assert second.fingerprint != first.fingerprint
    assert catalog.load("tiny", cache).fingerprint == second.fingerprint
    assert len(list((cache / "sets" / "tiny").glob("data-*"))) == 1
    assert first.splits["train"].array("x").sum() > 0  # what somebody has open stays


def test_a_failure_keeps_the_version_that_was_there(
    tiny: Source, pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = catalog.import_files("tiny", pair, cache)
    before = left(cache)
    other = make_pair(tmp_path / "other", seed=1)
    real = catalog.save_columns

    def interrupted(directory: Path, *rest: Any, **more: Any) -> None:
        if directory.name == "test":
            raise KeyboardInterrupt
        real(directory, *rest, **more)

    monkeypatch.setattr(catalog, "save_columns", interrupted)
    with pytest.raises(KeyboardInterrupt):
        catalog.import_files("tiny", other, cache)
    with pytest.raises(KeyboardInterrupt):
        catalog.import_files("tiny", [tar_bz2(other, tmp_path / "o.tar.bz2")], tmp_path / "new")
    assert left(cache) == before
    assert catalog.load("tiny", cache).fingerprint == first.fingerprint
    assert left(tmp_path / "new") == []


def test_damage_is_reported_and_repaired(mirror: Path, pair: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    record = cache / "sets" / "tiny" / "set.json"

    def column() -> Path:
        return next(cache.glob("sets/tiny/data-*/train/column.x.npy"))

    for again in (
        lambda: catalog.get("tiny", cache, str(mirror)),
        lambda: catalog.import_files("tiny", pair, cache),
    ):
        made = again()
        column().write_bytes(b"")
        with pytest.raises(InputError, match=r"is damaged .*: run 'fedzmg data import' or"):
            catalog.load("tiny", cache)
        assert again().fingerprint == made.fingerprint
        good = json.loads(record.read_text())
        for values in ("[]", "{", "{}", json.dumps({**good, "format": 2}),
                       json.dumps({**good, "counts": {"train": 1}})):  # fmt: skip
            record.write_text(values)
            with pytest.raises(InputError, match=r"set.json is damaged .*data remove tiny"):
                catalog.load("tiny", cache)
            with pytest.raises(InputError, match="is damaged"):
                catalog.stored("tiny", cache)
        assert again().fingerprint == made.fingerprint
        assert catalog.load("tiny", cache).fingerprint == made.fingerprint


TWO = (
    ALONE
    + """
import json, time
from dataclasses import replace
from pathlib import Path
from fedzmg.data import catalog
from fedzmg.data.sources import SOURCES, Remote

cache, mirror, sha256 = sys.argv[1:4]
remote = Remote("https://example.org/x/tiny.tar.bz2", sha256)
SOURCES["tiny"] = replace(
    SOURCES["emnist10"], counts={"train": (2, 7), "test": (2, 3)}, remotes=(remote,)
)

class Slow:
    seen = []
    def begin(self, what, total):
        self.seen.append(what)
        time.sleep(0.05)
    def advance(self, done): pass
    def say(self, text): self.seen.append(text)

print("ready", flush=True)
sys.stdin.read(1)
made = catalog.get("tiny", Path(cache), mirror, Slow())
print(json.dumps([made.fingerprint, made.splits["train"].rows, Slow.seen]))
"""
)


def test_of_two_processes_one_works_and_the_other_waits(mirror: Path, tmp_path: Path) -> None:
    sha256 = SOURCES["tiny"].remotes[0].sha256
    command = [sys.executable, "-c", TWO, str(tmp_path / "cache"), str(mirror), sha256]
    both = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    first, second = (json.loads(out) for out, _ in outputs)
    assert first[:2] == second[:2]
    assert first[1] == 7
    worked, waited = sorted((first[2], second[2]), key=len, reverse=True)
    assert worked[-2:] == ["reading train", "reading test"]
    assert waited[0] == "waiting for another process that works on 'tiny'"
    assert "reading train" not in waited


@needs_real
@pytest.mark.parametrize(
    "name",
    [
        "chars74k",
        pytest.param("shakespeare-by-role", marks=pytest.mark.slow),
        pytest.param("mnist-by-writer", marks=pytest.mark.slow),
        pytest.param("cifar100", marks=pytest.mark.slow),
    ],
)
def test_real_files_are_found_in_their_folder_and_have_the_counts(
    name: str, tmp_path: Path
) -> None:
    assert REAL is not None
    made = catalog.import_files(name, [Path(REAL)], tmp_path)
    assert made.notes == ()
    assert made.counts == SOURCES[name].counts
