"""Get, import, load and remove named data sets.

::

    sets/NAME/set.json     record of the set; names the folder with its columns
    sets/NAME/data-*/      one column store for each split
    downloads/NAME/        downloaded files
    locks/, tmp/           one process at a time, and its unfinished work

A set appears, or changes, at the moment ``set.json`` is replaced. Readers take no lock.
"""

import contextlib
import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedzmg.data import formats, sources
from fedzmg.data.cache import SILENT, Progress, download, lock, root, size_of, writing
from fedzmg.data.columns import Columns, load_columns, save_columns
from fedzmg.data.formats.common import reading, refuse_row
from fedzmg.data.sources import Form, source
from fedzmg.errors import InputError
from fedzmg.storage.files import remove_leftovers, sync_directory
from fedzmg.storage.formats import file_sha256, write_json

FORMAT = 1


@dataclass(frozen=True)
class Dataset:
    """Named data set: its record, as in ``set.json``, and its columns, mapped into memory."""

    name: str
    path: Path
    fingerprint: str  # SHA-256 over all columns, computed when they were converted
    counts: Mapping[str, tuple[int | None, int]]
    notes: tuple[str, ...]  # differences from the official set
    sources: tuple[Mapping[str, Any], ...]  # name, SHA-256 and size of the files it was made from
    splits: Mapping[str, Columns] = field(default_factory=dict)  # none: only the record was read


def load(name: str, cache: Path | None = None) -> Dataset:
    """Map a stored set into memory."""
    found = stored(name, cache)
    if found is None:
        own = f"'fedzmg data import {name} FILE...' with files you have"
        ways = [f"'fedzmg data get {name}'", own] if source(name).remotes else [own]
        raise InputError(f"data set {name!r} is not here: run {', or '.join(ways)}")
    splits = {split: load_columns(found.path / split) for split in found.counts}
    return replace(found, splits=splits)


def stored(name: str, cache: Path | None = None) -> Dataset | None:
    """Read the record of a set; None if it is not stored."""
    source(name)
    path = root(cache) / "sets" / name / "set.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r}, this version reads {FORMAT}")
        return Dataset(
            name, path.parent / values["directory"], str(values["fingerprint"]),
            {split: (clients, rows) for split, (clients, rows) in values["counts"].items()},
            tuple(values["notes"]), tuple(values["sources"]),
        )  # fmt: skip
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({error}): run 'fedzmg data remove {name}'") from None


def get(
    name: str, cache: Path | None = None, mirror: str | None = None, progress: Progress = SILENT
) -> Dataset:
    """Download a set from its official address, or a ``mirror``, unless it is stored already."""
    what = source(name)
    base = root(cache)
    if not what.remotes:
        remedy = f"run 'fedzmg data import {name} FILE...' with {sources.expected(what)}"
        raise InputError(f"no verified download of {name!r} is known: {remedy}")
    with _locked(name, base, progress) as workspace:
        with contextlib.suppress(InputError):  # not stored, or damaged
            found = load(name, base)
            progress.say(f"{name}: is here already")
            return found
        fetch = partial(download, progress=progress, mirror=mirror)
        folder = base / "downloads" / name
        files = [fetch(r.url, folder / r.name, sha256=r.sha256, size=r.size) for r in what.remotes]
        return _convert(name, files, base, workspace, progress)


def import_files(
    name: str, files: Sequence[Path], cache: Path | None = None, progress: Progress = SILENT
) -> Dataset:
    """Make a set from local files: its splits, an archive, or a folder that holds them."""
    what = source(name)
    base = root(cache)
    if not files:
        raise InputError(f"no file is given for {name!r}: give {sources.expected(what)}")
    with _locked(name, base, progress) as workspace:
        return _convert(name, files, base, workspace, progress)


def remove(name: str, cache: Path | None = None) -> int:
    """Delete a set and its downloads; return the bytes freed."""
    source(name)
    base = root(cache)
    folders = [base / "sets" / name, base / "downloads" / name]
    size = sum(size_of(folder) for folder in folders)
    if size == 0:
        raise InputError(f"data set {name!r} is not here: nothing to remove")
    with _locked(name, base, SILENT), writing(folders[0]):
        # The record goes first, to never show half a set.
        (folders[0] / "set.json").unlink(missing_ok=True)
        for folder in filter(Path.exists, folders):
            shutil.rmtree(folder)
    return size


@contextlib.contextmanager
def _locked(name: str, base: Path, progress: Progress) -> Iterator[Path]:
    """Lock a set; yield a temporary folder, and remove it and unrecorded data at the end."""
    workspace, home = base / "tmp" / name, base / "sets" / name
    waiting = f"waiting for another process that works on {name!r}"
    with lock(base / "locks" / f"{name}.lock", lambda: progress.say(waiting)):
        shutil.rmtree(workspace, ignore_errors=True)  # left by a killed process
        try:
            yield workspace
        finally:
            shutil.rmtree(workspace, ignore_errors=True)
            remove_leftovers(home, "set.json")
            with contextlib.suppress(InputError, OSError):  # a damaged record may be repaired
                here = stored(name, base)
                for old in home.glob("data-*"):
                    if here is None or old != here.path:
                        shutil.rmtree(old, ignore_errors=True)
                home.rmdir()  # unless it holds a set


def _convert(name: str, files: Sequence[Path], base: Path, work: Path, report: Progress) -> Dataset:
    found, given = sources.find(name, files), list[dict[str, Any]]()
    for path in found:
        with reading(str(path)):
            size = path.stat().st_size
            given.append({"name": path.name, "sha256": file_sha256(path), "bytes": size})
    with contextlib.suppress(InputError):  # damaged: convert again
        here = stored(name, base)
        if here is not None and here.sources == tuple(given):
            opened = load(name, base)
            report.say(f"{name}: these files are imported already")
            return opened
    members: dict[Path, Path] = {}
    for i, (path, folder) in enumerate(found.items()):
        members |= sources.unpack(name, path, work / str(i) / path.name, report) or {path: folder}
    official = {remote.name: remote.sha256 for remote in source(name).remotes}
    others = [one for one in given if official.get(one["name"], one["sha256"]) != one["sha256"]]
    own = "{name} is not the official file: its SHA-256 is {sha256}"
    notes = [own.format(**one) for one in others]
    home, fresh = base / "sets" / name, work / f"data-{uuid.uuid4().hex[:12]}"
    counts: dict[str, tuple[int | None, int]] = {}
    fingerprints: list[str] = []
    try:
        form, splits = sources.choose(name, members)
        for split, paths in splits.items():
            report.begin(f"reading {split}", None)
            columns = _read(name, split, form, paths)
            fingerprints.append(f"{split} {save_columns(fresh / split, columns)}\n")
            counts[split] = columns.clients, columns.rows
            notes += [f"{split}: {note}" for note in columns.notes]
    except InputError as error:
        text = str(error)
        for i, path in enumerate(found):  # the archive, not the folder that it is unpacked to
            text = text.replace(str(work / str(i) / path.name), str(path))
        raise InputError(text) from None
    record = {
        "format": FORMAT, "name": name, "directory": fresh.name,
        "fingerprint": hashlib.sha256("".join(sorted(fingerprints)).encode()).hexdigest(),
        "counts": counts, "notes": notes, "sources": given,
    }  # fmt: skip
    with writing(home):
        home.mkdir(parents=True, exist_ok=True)
        sync_directory(fresh)
        fresh.rename(home / fresh.name)
        write_json(home / "set.json", record)
    return load(name, base)


def _read(name: str, split: str, form: Form, paths: Sequence[Path]) -> Columns:
    """Read a split, refuse that of another set, and note counts other than the official ones."""
    options = {**form.options, "split": split} if form.whole else form.options
    columns = formats.reader(form.reader)(paths, **options)
    what, where = source(name), ", ".join(map(str, paths))
    lacking = set(what.columns) - set(columns.columns)
    if lacking:
        problem = f"holds {', '.join(columns.columns)}, but {name!r} needs {min(lacking)}"
        raise InputError(f"{where}: {problem}: give {sources.expected(what)}")
    if what.classes is not None:
        y, most = columns.array("y"), what.classes - 1
        refuse_row(y > most, f"{where}: label", y, f"{name!r} has labels 0 to {most}")
    notes = list(columns.notes)
    found = {"clients": columns.clients or 0, "examples": columns.rows}
    for (kind, number), wanted in zip(found.items(), what.counts[split], strict=True):
        if wanted is not None and number != wanted:
            notes.append(f"{number:,} {kind} instead of {wanted:,}")
    return replace(columns, notes=tuple(notes))
