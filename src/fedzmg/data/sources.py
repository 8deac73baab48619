"""Catalog of named data sets, and the matching of a user's files to their layouts and splits."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedzmg.data import archive
from fedzmg.data.cache import Progress
from fedzmg.errors import InputError, unknown

EMBEDDED = ("digits", "plays")
"""Data sets that ship with the package."""
_WORDS = {"train": "train", "training": "train", "test": "test", "testing": "test", "t10k": "test"}


class Remote(NamedTuple):
    """File at its official address."""

    url: str
    sha256: str
    size: int | None = None

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Form:
    """One file layout of a data set."""

    format: str
    """Key of :data:`fedzmg.data.formats.FORMATS`."""
    files: str
    """Official files, for messages."""
    accepted: tuple[str, ...]
    """Patterns of all names that fit."""
    official: tuple[str, ...] = ()
    """Patterns of the official names, which are preferred to others that fit."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the reader."""
    each: int = 1
    """Files of one split; 0 for any number."""
    whole: bool = False
    """One file holds all splits."""


@dataclass(frozen=True)
class Source:
    """Named data set."""

    title: str
    citation: str
    terms: str
    counts: Mapping[str, tuple[int | None, int]]
    """Clients (where it has any) and examples of each split."""
    forms: tuple[Form, ...]
    remotes: tuple[Remote, ...] = ()
    classes: int | None = None
    columns: tuple[str, ...] = ("x", "y")


def _catalog() -> dict[str, Source]:
    catalog = {}
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for name, entry in table.items():
        counts = {split: entry.pop(split) for split in ("train", "test")}
        entry["counts"] = {s: (clients or None, rows) for s, (clients, rows) in counts.items()}
        entry["forms"] = tuple(Form(**form) for form in entry["forms"])
        entry["remotes"] = tuple(Remote(**remote) for remote in entry.get("remotes", ()))
        catalog[name] = Source(**entry)
    return catalog


SOURCES = _catalog()


def source(name: str) -> Source:
    """Look up a data set."""
    if name in EMBEDDED:
        raise InputError(f"{name!r} ships with fedzmg: there is nothing to get, import or remove")
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES, "fedzmg data list")
    return SOURCES[name]


def expected(what: Source) -> str:
    """Describe the files that a data set can be made from."""
    return ", or ".join([*(form.files for form in what.forms), "an archive of them"])


def find(name: str, files: Sequence[Path]) -> list[Path]:
    """Find the files of the data set among those given, and archives that may hold some."""
    what, found = source(name), list[Path]()
    for path in files:
        if not path.exists():
            raise InputError(f"{path}: there is no such file or folder")
        inside = sorted(one for one in path.rglob("*") if one.is_file())
        own = _fitting(what, inside if path.is_dir() else [path])
        packed = path.is_file() and (
            archive.is_archive(path) or _fitting(what, [path.with_suffix("")])
        )
        found += own or [path] * bool(packed)
        if not own and not packed:
            raise _no_file(name, path)
    return sorted(found)


def unpack(name: str, path: Path, workspace: Path, progress: Progress) -> list[Path]:
    """Unpack the files of the data set from an archive; return any other file itself."""
    what = source(name)
    if _fitting(what, [path]):
        return [path]
    wanted = [pattern for form in what.forms for pattern in form.accepted]
    found = archive.extract(path, workspace / path.name, wanted, progress)
    if not found:
        raise _no_file(name, path)
    return found


def _no_file(name: str, path: Path) -> InputError:
    return InputError(f"{path} holds no file of {name!r}: give {expected(source(name))}")


def choose(name: str, files: Sequence[Path]) -> tuple[Form, dict[str, list[Path]]]:
    """Choose the first form with a complete set of files; return it with those of each split."""
    problems: list[InputError] = []
    for form in source(name).forms:
        fitting = [path for path in files if _like(path, form.accepted)]
        splits = {
            split: [path for path in fitting if form.whole or _split(path) == split]
            for split in source(name).counts
        }
        try:
            if fitting:
                return form, {s: _narrowed(name, s, form, paths) for s, paths in splits.items()}
        except InputError as error:
            problems.append(error)
    raise problems[0]


def _fitting(what: Source, paths: Iterable[Path]) -> list[Path]:
    patterns = [pattern for form in what.forms for pattern in form.accepted]
    plain = (path for path in paths if path.name[0] != "." and not path.is_dir())
    return [path for path in plain if _like(path, patterns)]


def _like(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path.name.lower(), pattern) for pattern in patterns)


def _narrowed(name: str, split: str, form: Form, paths: list[Path]) -> list[Path]:
    """Return as many files as a split needs, preferring official names."""
    if len(paths) > form.each > 0:
        paths = [path for path in paths if _like(path, form.official)] or paths
    if not paths or (form.each and len(paths) != form.each):
        found = ", ".join(map(str, paths)) or "none"
        raise InputError(
            f"the {split} split of {name!r} is missing or not clear (found: {found}): give "
            f"{form.files}, with train or test in each name"
        )
    return paths


def _split(path: Path) -> str | None:
    """Find the split in the words of a file's name, else in the name of its folder."""
    words = {_WORDS[w] for w in re.split(r"[^a-z0-9]+", path.name.lower()) if w in _WORDS}
    if words:
        return words.pop() if len(words) == 1 else None
    return _WORDS.get(path.absolute().parent.name.lower())
