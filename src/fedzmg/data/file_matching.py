"""Match user files to a data set's layout and splits."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedzmg.data import archive
from fedzmg.data.cache import Progress
from fedzmg.data.sources import Form, Source, source
from fedzmg.errors import InputError

MOST_UNPACKED = 2**33
_WORDS = {"train": "train", "training": "train", "test": "test", "testing": "test", "t10k": "test"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".lzma")


class File(NamedTuple):
    """File that fits one of a data set's forms."""

    path: Path
    names: tuple[str, ...]
    """Its name and the folders that it was given with, innermost first."""
    head: bytes = b""


class Choice(NamedTuple):
    """Form of a data set and the files of each split."""

    form: Form
    splits: Mapping[str, Sequence[Path]]

    @property
    def files(self) -> list[tuple[Path, str | None]]:
        """Every file with its split; None for one that holds them all."""
        if self.form.whole:
            return [(next(iter(self.splits.values()))[0], None)]
        return [(path, split) for split, paths in self.splits.items() for path in paths]


def expected(what: Source) -> str:
    """Describe the files that a data set can be made from."""
    return ", or ".join([*(form.files for form in what.forms), "an archive of them"])


def expand(name: str, files: Sequence[Path]) -> tuple[list[File], list[Path]]:
    """Find the files of the data set among those given, and archives that may hold some."""
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
        unpacked = path.stem if path.suffix.lower() in _COMPRESSED else ""
        found = File(path, (path.name, path.absolute().parent.name), head)
        if any(_fits(form, found) for form in what.forms):
            loose.append(found)
        elif archive.is_archive(path) or any(_like(unpacked, f.accepted) for f in what.forms):
            packed.append(path)
        else:
            raise InputError(f"{path} is not a file of {name!r}: give {expected(what)}")
    return loose, packed


def _inside(what: Source, folder: Path) -> list[File]:
    """Find the files below a folder by name."""
    return [
        File(path, path.relative_to(folder).parts[::-1])
        for path in sorted(folder.rglob("*"))
        if path.name[0] != "." and path.is_file()
        if any(_like(path.name, form.accepted) for form in what.forms)
    ]


def _fits(form: Form, file: File) -> bool:
    begins = form.magic is not None and file.head.startswith(form.magic)
    return begins or _like(file.path.name, form.accepted)


def _like(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in patterns)


def unpack(
    name: str, packed: Sequence[Path], workspace: Path, progress: Progress
) -> Iterator[File]:
    """Unpack the files of the data set from archives below ``workspace``."""
    what = source(name)
    wanted = [pattern for form in what.forms for pattern in form.accepted]
    for number, path in enumerate(packed):
        folder = workspace / f"{number}-files"
        archive.extract(path, folder, wanted=wanted, max_bytes=MOST_UNPACKED, progress=progress)
        found = _inside(what, folder)
        if not found:
            raise InputError(f"{path} holds no file of {name!r}: give {expected(what)}")
        yield from found


def choose(name: str, files: Sequence[File]) -> Choice:
    """Choose the first form with a complete set of files."""
    problems: list[InputError] = []
    for form in source(name).forms:
        fitting = [file for file in files if _fits(form, file)]
        if not fitting:
            continue
        try:
            return Choice(form, _assign(name, form, fitting))
        except InputError as error:
            problems.append(error)
    raise problems[0]


def _assign(name: str, form: Form, files: Sequence[File]) -> dict[str, Sequence[Path]]:
    """Assign files to splits by the words of their names, else by the number of examples."""
    what = source(name)
    if form.whole:
        path = _narrowed(name, "one file", form, files)
        return dict.fromkeys(what.splits, path)
    groups: dict[str | None, list[File]] = {}
    for file in files:
        groups.setdefault(_split(file) or _split_by_rows(what, form, file.path), []).append(file)
    unsure = [str(file.path) for file in groups.get(None, [])]
    chosen: dict[str, Sequence[Path]] = {}
    for split in what.splits:
        fitting = groups.get(split, [])
        if unsure and len(fitting) < (form.each or 1):
            raise InputError(
                f"cannot tell the split of {', '.join(unsure)}: put train or test into its name"
            )
        chosen[split] = _narrowed(name, f"{split} split", form, fitting)
    return chosen


def _narrowed(name: str, part: str, form: Form, files: Sequence[File]) -> list[Path]:
    """Return as many files as a split needs, preferring official names."""
    paths = [file.path for file in files]
    each = len(paths) if form.each is None else form.each
    if len(paths) > each:
        paths = [path for path in paths if _like(path.name, form.official)] or paths
    if len(paths) > each:
        raise InputError(
            f"several files could be the {part} of {name!r}: {', '.join(map(str, paths))}; give one"
        )
    if len(paths) < max(each, 1):
        raise InputError(f"the {part} of {name!r} is missing or incomplete: give {form.files}")
    return paths


def _split(file: File) -> str | None:
    """Find the split in the words of a file's name, else in the names of its folders."""
    name, *folders = (part.lower() for part in file.names)
    words = {_WORDS[word] for word in re.split(r"[^a-z0-9]+", name) if word in _WORDS}
    if words:
        return words.pop() if len(words) == 1 else None
    return next((_WORDS[folder] for folder in folders if folder in _WORDS), None)


def _split_by_rows(what: Source, form: Form, path: Path) -> str | None:
    try:
        if form.format == "h5":
            import h5py

            with h5py.File(path, "r") as file:
                rows = sum(len(next(iter(group.values()))) for group in file["examples"].values())
        elif form.format == "cifar_binary":
            rows, rest = divmod(path.stat().st_size, 3074)
            rows = -1 if rest else rows
        else:
            return None
    except Exception:  # the reader reports damage better
        return None
    fitting = [split for split, (_, examples) in what.counts.items() if examples == rows]
    return fitting[0] if len(fitting) == 1 else None
