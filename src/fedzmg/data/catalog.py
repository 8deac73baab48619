"""The data sets that are here: getting them, importing them, and where they are kept.

::

    sets/NAME/set.json     what the set is; names the folder with its columns
    sets/NAME/data-*/      one column store for each split
    downloads/NAME/        files as they came
    locks/, tmp/           one process at a time, and its unfinished work

A set appears, or changes, at the moment ``set.json`` is replaced. Readers take no lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedzmg.data import column_store, file_matching
from fedzmg.data.cache import lock, root, size_of, writing
from fedzmg.data.columns import Allocate, Columns
from fedzmg.data.fetch import SILENT, Progress, download, file_hash
from fedzmg.data.file_matching import Choice
from fedzmg.data.sources import SOURCES, Source, source
from fedzmg.errors import InputError
from fedzmg.storage.files import sync_directory, write_atomic

FORMAT = 1


class Stored(NamedTuple):
    """A set that is here, as ``set.json`` says."""

    name: str
    path: Path
    fingerprint: str
    counts: Mapping[str, tuple[int | None, int]]
    notes: tuple[str, ...]
    sources: tuple[Mapping[str, Any], ...]
    """Name, SHA-256 and size of the files it was made from."""


@dataclass(frozen=True)
class Dataset:
    """A named data set, mapped into memory."""

    name: str
    splits: Mapping[str, Columns]
    fingerprint: str
    """SHA-256 over all columns, taken when they were converted."""
    notes: tuple[str, ...] = ()
    """What differs from what the set should be."""


def load(name: str, cache: Path | None = None) -> Dataset:
    """Map a set that is here into memory.

    Raises:
        InputError: if it is not here, with how to get it, or damaged.
    """
    place = root(cache)
    found = stored(name, place)
    if found is None:
        raise _absent(name)
    try:
        return _open(found)
    except InputError:
        # Another process may just have replaced it.
        again = stored(name, place)
        if again is None or again.path == found.path:
            raise
        return _open(again)


def _open(found: Stored) -> Dataset:
    splits = {split: column_store.load(found.path / split) for split in found.counts}
    return Dataset(found.name, splits, found.fingerprint, found.notes)


def _absent(name: str) -> InputError:
    ways = [f"'fedzmg data import {name} FILE...' with files you have"]
    if source(name).remotes:
        ways.insert(0, f"'fedzmg data get {name}'")
    return InputError(f"data set {name!r} is not here: run {', or '.join(ways)}")


def stored(name: str, cache: Path | None = None) -> Stored | None:
    """What ``set.json`` says of a set that is here, or None.

    Raises:
        InputError: for an unknown name or a damaged file.
    """
    source(name)
    path = root(cache) / "sets" / name / "set.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r}, this version reads {FORMAT}")
        if re.fullmatch(r"data-[0-9a-f]+", values["directory"]) is None:
            raise ValueError(f"directory {values['directory']!r}")
        counts = {
            str(split): (None if clients is None else int(clients), int(examples))
            for split, (clients, examples) in values["counts"].items()
        }
        return Stored(
            name,
            path.parent / values["directory"],
            str(values["fingerprint"]),
            counts,
            tuple(map(str, values["notes"])),
            tuple(dict(file) for file in values["sources"]),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is damaged ({error}): run 'fedzmg data remove {name}' and fetch or import the "
            "set again"
        ) from None


def present(cache: Path | None = None) -> dict[str, Stored]:
    """The sets that are here and whole, in the order of the catalog."""
    found: dict[str, Stored] = {}
    for name in SOURCES:
        with contextlib.suppress(InputError):
            one = stored(name, cache)
            if one is not None:
                found[name] = one
    return found


def get(
    name: str,
    cache: Path | None = None,
    mirror: str | None = None,
    progress: Progress = SILENT,
) -> Dataset:
    """Download a set from its official address, or find that it is here already.

    Args:
        name: a set of the catalog.
        cache: the data folder, instead of the usual one.
        mirror: address or folder to take the files from instead.
        progress: told how far it is.

    Raises:
        InputError: if no verified download is known, or it failed.
    """
    what = source(name)
    place = root(cache)
    if not what.remotes:
        raise InputError(
            f"no verified download of {name!r} is known: run 'fedzmg data import {name} FILE...' "
            f"with {file_matching.expected(what)}"
        )
    with _alone(name, place, progress) as workspace:
        with contextlib.suppress(InputError):  # absent, or damaged
            found = load(name, place)
            progress.say(f"{name}: is here already")
            return found
        files = [
            download(
                remote.url,
                place / "downloads" / name / remote.name,
                sha256=remote.sha256,
                size=remote.size,
                progress=progress,
                mirror=mirror,
            )
            for remote in what.remotes
        ]
        return _convert(name, files, place, workspace, progress)


def import_files(
    name: str,
    files: Sequence[Path],
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> Dataset:
    """Make a set from files that are here: its splits, an archive, or a folder that holds them.

    Raises:
        InputError: if they are not the files of this set, or cannot be read.
    """
    source(name)
    place = root(cache)
    if not files:
        raise InputError(
            f"no file is given for {name!r}: give {file_matching.expected(source(name))}"
        )
    with _alone(name, place, progress) as workspace:
        return _convert(name, files, place, workspace, progress)


def remove(name: str, cache: Path | None = None) -> int:
    """Delete a set and what was downloaded for it; how many bytes that frees.

    Raises:
        InputError: if nothing of it is here.
    """
    source(name)
    place = root(cache)
    folders = [place / "sets" / name, place / "downloads" / name]
    if not any(folder.exists() for folder in folders):
        raise InputError(f"data set {name!r} is not here: nothing to remove")
    with _alone(name, place, SILENT):
        size = sum(size_of(folder) for folder in folders)
        with writing(folders[0]):
            # First the record: a set that is half gone is never seen.
            (folders[0] / "set.json").unlink(missing_ok=True)
            for folder in folders:
                if folder.exists():
                    shutil.rmtree(folder)
    return size


@contextlib.contextmanager
def _alone(name: str, place: Path, progress: Progress) -> Iterator[Path]:
    """Work on a set while no other process does, in an empty folder that is gone afterwards."""
    workspace = place / "tmp" / name

    def waiting() -> None:
        progress.say(f"waiting for another process that works on {name!r}")

    with lock(place / "locks" / f"{name}.lock", waiting):
        shutil.rmtree(workspace, ignore_errors=True)  # of a process that was killed
        try:
            yield workspace
        finally:
            shutil.rmtree(workspace, ignore_errors=True)


def _convert(
    name: str, files: Sequence[Path], place: Path, workspace: Path, progress: Progress
) -> Dataset:
    loose, packed = file_matching.expand(name, files)
    chosen = None if packed else file_matching.choose(name, loose)
    origins = (
        chosen.files
        if chosen
        else [(path, None) for path in (*packed, *file_matching.paths(loose))]
    )
    given = [_described(path, split) for path, split in origins]
    with contextlib.suppress(InputError):  # damaged: make it anew
        here = stored(name, place)
        if here is not None and _keys(here.sources) == _keys(given):
            opened = _open(here)
            progress.say(f"{name}: these files are imported already")
            return opened
    with _named_after(packed, workspace):
        if chosen is None:
            chosen = file_matching.choose(
                name, [*loose, *file_matching.unpack(name, packed, workspace, progress)]
            )
        return _make(name, chosen, given, place, progress)


@contextlib.contextmanager
def _named_after(packed: Sequence[Path], workspace: Path) -> Iterator[None]:
    """Say the archive that the user knows, not the folder where it was unpacked."""
    try:
        yield
    except InputError as error:
        said = str(error)
        for number, path in enumerate(packed):
            for kind in file_matching.KINDS:
                said = said.replace(str(workspace / f"{number}-{kind}"), str(path))
        raise InputError(said) from None


def _make(
    name: str,
    chosen: Choice,
    given: Sequence[Mapping[str, Any]],
    place: Path,
    progress: Progress,
) -> Dataset:
    """Convert the files of a set and put it in its place."""
    home = place / "sets" / name
    target = home / f"data-{uuid.uuid4().hex[:12]}"
    try:
        said = {
            split: _store(name, split, chosen, target / split, progress)
            for split in source(name).splits
        }
        record = {
            "format": FORMAT,
            "name": name,
            "directory": target.name,
            "fingerprint": _joint(said),
            "counts": {split: _counts(one) for split, one in said.items()},
            "notes": [
                *_unofficial(source(name), given),
                *(f"{split}: {note}" for split, one in said.items() for note in one["notes"]),
            ],
            "sources": list(given),
        }
        with writing(home):
            sync_directory(target)
            write_atomic(home / "set.json", json.dumps(record, indent=1).encode())
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(OSError):
            home.rmdir()  # unless an older version of the set is in it
        raise
    for old in home.glob("data-*"):
        if old != target:
            shutil.rmtree(old, ignore_errors=True)
    return load(name, place)


def _store(
    name: str, split: str, chosen: Choice, directory: Path, progress: Progress
) -> dict[str, Any]:
    """Convert one split; what its store says of it."""
    paths, classes = chosen.splits[split], source(name).classes
    progress.begin(f"reading {split}", None)

    def fill(allocate: Allocate) -> Columns:
        return _checked(name, split, paths, chosen.form.read(paths, split, classes, allocate))

    column_store.save(directory, fill, meta={"set": name, "split": split})
    return column_store.describe(directory)


def _counts(said: Mapping[str, Any]) -> tuple[int | None, int]:
    return None if said["clients"] is None else len(said["clients"]), said["rows"]


def _joint(splits: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{split} {said['fingerprint']}\n" for split, said in sorted(splits.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _checked(name: str, split: str, paths: Sequence[Path], columns: Columns) -> Columns:
    """Refuse columns that are not this set's, and note counts that differ from it."""
    what = source(name)
    where = ", ".join(str(path) for path in paths)
    lacking = [column for column in what.columns if column not in columns.columns]
    if lacking:
        raise InputError(
            f"{where}: holds {', '.join(columns.columns)}, but {name!r} needs {lacking[0]}: give "
            f"{file_matching.expected(what)}"
        )
    if what.classes is not None:
        labels = columns.array("y")
        wrong = np.flatnonzero((labels < 0) | (labels >= what.classes))
        if len(wrong):
            raise InputError(
                f"{where}: example {wrong[0]} has label {labels[wrong[0]]}, but {name!r} has "
                f"labels 0 to {what.classes - 1}"
            )
    expected = what.counts[split]
    found = (None if columns.owners is None else len(columns.owners.names), columns.rows)
    notes = [
        f"{n:,} {unit} instead of {wanted:,}"
        for n, wanted, unit in zip(found, expected, ("clients", "examples"), strict=True)
        if wanted is not None and n is not None and n != wanted
    ]
    if expected[0] is not None and found[0] is None:
        notes.append(f"no clients instead of {expected[0]:,}")
    return replace(columns, notes=(*columns.notes, *notes))


def _described(path: Path, split: str | None) -> dict[str, Any]:
    size = path.stat().st_size
    return {"name": path.name, "split": split, "sha256": file_hash(path), "bytes": size}


def _keys(files: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return sorted((str(file.get("split")), str(file.get("sha256"))) for file in files)


def _unofficial(what: Source, given: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    known = {remote.name: remote.sha256 for remote in what.remotes}
    for file in given:
        if file["name"] in known and file["sha256"] != known[file["name"]]:
            yield f"{file['name']} is not the official file: its SHA-256 is {file['sha256']}"
