"""Match user files to a data set's layout and splits."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedzmg.data import archive
from fedzmg.data.cache import Progress
from fedzmg.data.sources import Form, Source, source
from fedzmg.errors import InputError

_WORDS = {"train": "train", "training": "train", "test": "test", "testing": "test", "t10k": "test"}


def expected(what: Source) -> str:
    """Describe the files that a data set can be made from."""
    return ", or ".join([*(form.files for form in what.forms), "an archive of them"])


def find(name: str, files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Find the files of the data set among those given, and archives that may hold some."""
    what = source(name)
    loose: list[Path] = []
    packed: list[Path] = []
    for path in files:
        if not path.exists():
            raise InputError(f"{path}: there is no such file or folder")
        found = _fitting(what, sorted(path.rglob("*")) if path.is_dir() else [path])
        if found:
            loose += found
        elif path.is_file() and (
            archive.is_archive(path) or _fitting(what, [path.with_suffix("")])
        ):
            packed.append(path)
        else:
            raise InputError(f"{path} holds no file of {name!r}: give {expected(what)}")
    return loose, packed


def unpack(name: str, packed: Sequence[Path], workspace: Path, progress: Progress) -> list[Path]:
    """Unpack the files of the data set from archives below ``workspace``."""
    what = source(name)
    wanted = [pattern for form in what.forms for pattern in form.accepted]
    files: list[Path] = []
    for number, path in enumerate(packed):
        found = archive.extract(path, workspace / f"{number}-files", wanted, progress)
        if not found:
            raise InputError(f"{path} holds no file of {name!r}: give {expected(what)}")
        files += found
    return files


def choose(name: str, files: Sequence[Path]) -> tuple[Form, dict[str, list[Path]]]:
    """Choose the first form with a complete set of files; return it with those of each split."""
    what = source(name)
    problem: InputError | None = None
    for form in what.forms:
        fitting = [path for path in files if _like(path, form.accepted)]
        try:
            if form.whole and fitting:
                return form, dict.fromkeys(what.counts, _narrowed(name, "file", form, fitting))
            if fitting:
                return form, {
                    split: _narrowed(
                        name, f"{split} split", form, [p for p in fitting if _split(p) == split]
                    )
                    for split in what.counts
                }
        except InputError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _fitting(what: Source, paths: Iterable[Path]) -> list[Path]:
    patterns = [pattern for form in what.forms for pattern in form.accepted]
    plain = (path for path in paths if path.name[0] != "." and not path.is_dir())
    return [path for path in plain if _like(path, patterns)]


def _like(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path.name.lower(), pattern) for pattern in patterns)


def _narrowed(name: str, part: str, form: Form, paths: list[Path]) -> list[Path]:
    """Return as many files as a split needs, preferring official names."""
    if len(paths) > form.each > 0:
        paths = [path for path in paths if _like(path, form.official)] or paths
    if not paths or (form.each and len(paths) != form.each):
        found = ", ".join(map(str, paths)) or "none"
        raise InputError(
            f"the {part} of {name!r} is missing or not clear (found: {found}): give {form.files}, "
            "with train or test in each name"
        )
    return paths


def _split(path: Path) -> str | None:
    """Find the split in the words of a file's name, else in the name of its folder."""
    words = {_WORDS[w] for w in re.split(r"[^a-z0-9]+", path.name.lower()) if w in _WORDS}
    if words:
        return words.pop() if len(words) == 1 else None
    return _WORDS.get(path.absolute().parent.name.lower())
