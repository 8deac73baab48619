"""Which of the files that a user has is what of a data set: its form, and its splits."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedzmg.data import archive
from fedzmg.data.fetch import Progress
from fedzmg.data.sources import Form, Source, source
from fedzmg.errors import InputError

MOST_UNPACKED = 2**33


class File(NamedTuple):
    """A file that fits one of a set's forms."""

    path: Path
    names: tuple[str, ...]
    """Its name and the folders that it was given with, innermost first."""
    head: bytes = b""


class Choice(NamedTuple):
    """A form, and the files of each split."""

    form: Form
    splits: Mapping[str, Sequence[Path]]

    @property
    def files(self) -> list[tuple[Path, str | None]]:
        """Every file with its split; None for one that holds them all."""
        if self.form.whole:
            return [(next(iter(self.splits.values()))[0], None)]
        return [(path, split) for split, paths in self.splits.items() for path in paths]


_WORDS = {"train": "train", "training": "train", "test": "test", "testing": "test", "t10k": "test"}
KINDS = ("official", "accepted")
_COMPRESSED = (".gz", ".bz2", ".xz", ".lzma")


def paths(files: Sequence[File]) -> list[Path]:
    """Where files are."""
    return [file.path for file in files]


def expected(what: Source) -> str:
    """The files that a set can be made from, for a message."""
    return ", or ".join([*(form.files for form in what.forms), "an archive of them"])


def expand(name: str, files: Sequence[Path]) -> tuple[list[File], list[Path]]:
    """The files of the set among those given, and archives that may hold some."""
    what = source(name)
    loose: list[File] = []
    packed: list[Path] = []
    for path in files:
        if not path.exists():
            raise InputError(f"{path}: there is no such file or folder")
        if path.is_dir():
            inside = _inside(what, path)
            if not inside:
                raise InputError(f"{path} holds no file of {name!r}: give {expected(what)}")
            loose += inside
            continue
        try:
            with path.open("rb") as file:
                head = file.read(16)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from None
        if ".sqlite" in path.name.lower() or head.startswith(b"SQLite format 3"):
            raise InputError(
                f"{path} is of TensorFlow Federated's SQLite form, which is not read: give "
                f"{expected(what)}"
            )
        unpacked = path.stem if path.suffix.lower() in _COMPRESSED else ""
        if any(_fits(form, path.name) or _begins(form, head) for form in what.forms):
            loose.append(File(path, (path.name, path.absolute().parent.name), head))
        elif archive.is_archive(path) or any(_fits(form, unpacked) for form in what.forms):
            packed.append(path)
        else:
            raise InputError(f"{path} is no file of {name!r}: give {expected(what)}")
    return loose, packed


def _inside(what: Source, folder: Path) -> list[File]:
    """The files below a folder whose names fit."""
    return [
        File(path, path.relative_to(folder).parts[::-1])
        for path in sorted(folder.rglob("*"))
        if path.name[0] != "." and any(_fits(f, path.name) for f in what.forms) and path.is_file()
    ]


def _fits(form: Form, name: str) -> bool:
    return _like(name, form.accepted)


def _begins(form: Form, head: bytes) -> bool:
    return form.magic is not None and head.startswith(form.magic)


def _like(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in patterns)


def unpack(
    name: str, packed: Sequence[Path], workspace: Path, progress: Progress
) -> Iterator[File]:
    """The files of the set inside archives, unpacked below ``workspace``."""
    what = source(name)
    for number, path in enumerate(packed):
        found: list[File] = []
        # An archive may hold several sets of the same kind: first what surely is of this one.
        for kind in KINDS:
            wanted = [pattern for form in what.forms for pattern in getattr(form, kind)]
            folder = workspace / f"{number}-{kind}"
            archive.extract(path, folder, wanted=wanted, max_bytes=MOST_UNPACKED, progress=progress)
            found = _inside(what, folder)
            if found:
                break
        if not found:
            raise InputError(f"{path} holds no file of {name!r}: give {expected(what)}")
        yield from found


def choose(name: str, files: Sequence[File]) -> Choice:
    """The first form whose files are all there."""
    what = source(name)
    problems: list[InputError] = []
    for form in what.forms:
        fitting = [f for f in files if _fits(form, f.path.name) or _begins(form, f.head)]
        if not fitting:
            continue
        try:
            return Choice(form, _assign(name, form, fitting))
        except InputError as error:
            problems.append(error)
    raise problems[0]


def _assign(name: str, form: Form, files: Sequence[File]) -> dict[str, Sequence[Path]]:
    """Which files are which split: by their names, else by how many examples they hold."""
    what = source(name)
    if form.whole:
        [one] = _narrowed(name, "one file", form, files)
        return {split: [one.path] for split in what.splits}
    groups: dict[str | None, list[File]] = {}
    for file in files:
        groups.setdefault(_split(file) or _split_by_rows(what, form, file.path), []).append(file)
    unsure = [str(file.path) for file in groups.get(None, [])]
    chosen: dict[str, Sequence[Path]] = {}
    for split in what.splits:
        fitting = groups.get(split, [])
        if unsure and len(fitting) < (form.each or 1):
            raise InputError(
                f"cannot tell which split of {name!r} is in {', '.join(unsure)}: put the word "
                "train or test into each file's name"
            )
        chosen[split] = paths(_narrowed(name, f"{split} split", form, fitting))
    return chosen


def _narrowed(name: str, part: str, form: Form, files: Sequence[File]) -> Sequence[File]:
    """As many files as it takes; of more than that those with the official name."""
    each = form.each
    if each is not None and len(files) > each:
        files = [f for f in files if _like(f.path.name, form.official)] or files
    if each is not None and len(files) > each:
        raise InputError(
            f"several files could be the {part} of {name!r}: "
            f"{', '.join(map(str, paths(files)))}; give the ones you mean"
        )
    if len(files) < (each or 1):
        raise InputError(f"the {part} of {name!r} is missing or incomplete: give {form.files}")
    return files


def _split(file: File) -> str | None:
    """The split that a word of its name tells, else the name of a folder."""
    name, *folders = (part.lower() for part in file.names)
    words = {_WORDS[word] for word in re.split(r"[^a-z0-9]+", name) if word in _WORDS}
    if words:
        return words.pop() if len(words) == 1 else None
    return next((_WORDS[folder] for folder in folders if folder in _WORDS), None)


def _split_by_rows(what: Source, form: Form, path: Path) -> str | None:
    if form.rows is None:
        return None
    try:
        rows = form.rows(path)
    except Exception:  # whatever is wrong with the file, its reader says it better
        return None
    fitting = [split for split, (_, examples) in what.counts.items() if examples == rows]
    return fitting[0] if len(fitting) == 1 else None
