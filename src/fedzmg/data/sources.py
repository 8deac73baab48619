"""Catalog of named data sets, and the matching of a user's files to their layouts and splits.

Archives (zip, tar, single compressed files) may be hostile: members cannot leave the folder, only
regular files are unpacked, and their number and size are bounded. First bytes tell their kind.
"""

import bz2
import fnmatch
import gzip
import lzma
import re
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from fedzmg.data.cache import Progress, writing
from fedzmg.data.formats.common import reading
from fedzmg.errors import InputError, check_names

EMBEDDED = ("digits", "plays")  # data sets that ship with the package
MOST_MEMBERS = 100_000
MOST_BYTES = 2**33
_OPENERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open, b"\x5d\0\0": lzma.open,
}  # fmt: skip
_WORDS = {"train": "train", "training": "train", "test": "test", "testing": "test", "t10k": "test"}


class Remote(NamedTuple):
    """File at its official address."""

    url: str
    sha256: str
    size: int | None = None

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Form:
    """One file layout of a data set."""

    reader: str  # module and function in fedzmg.data.formats
    files: str
    accepted: tuple[str, ...]
    official: tuple[str, ...] = ()  # patterns of official names, which are preferred
    options: Mapping[str, Any] = field(default_factory=dict)
    each: int = 1  # files of one split; 0 for any number
    whole: bool = False  # one file holds all splits


@dataclass(frozen=True)
class Source:
    """Named data set."""

    title: str
    citation: str
    terms: str
    counts: Mapping[str, tuple[int | None, int]]  # clients, if any, and examples by split
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
    check_names("data set", [name], SOURCES, "fedzmg data list")
    return SOURCES[name]


def remedy(name: str) -> str:
    """Return the command that fetches a data set."""
    return f"fedzmg data {f'get {name}' if source(name).remotes else f'import {name} FILE...'}"


def expected(what: Source) -> str:
    """Describe the files that a data set can be made from."""
    return ", or ".join([*(form.files for form in what.forms), "an archive of them"])


def find(name: str, files: Sequence[Path]) -> dict[Path, Path]:
    """Find the files of a data set, and archives that may hold some, with the folder of each."""
    found: dict[Path, Path] = {}
    for path in files:
        if not path.exists():
            raise InputError(f"{path}: there is no such file or folder")
        whole = path.absolute()
        inside = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
        own = [one for one in inside if _like(one.name, _patterns(name))]
        if not own and not is_packed(path):
            raise _no_file(name, path)
        found |= dict.fromkeys(own or [path], whole if path.is_dir() else whole.parent)
    return dict(sorted(found.items()))


def unpack(name: str, path: Path, into: Path, progress: Progress) -> dict[Path, Path]:
    """Unpack the files of a data set with their folder; return nothing unless it is an archive."""
    if _like(path.name, _patterns(name)):
        return {}
    found = extract(path, into, _patterns(name), progress)
    if not found:
        raise _no_file(name, path)
    return dict.fromkeys(found, into)


def extract(archive: Path, into: Path, wanted: Sequence[str], progress: Progress) -> list[Path]:
    """Unpack an archive into a new folder; return files whose names match ``wanted``, sorted."""
    count = total = 0

    def fits(size: int, name: str) -> bool:
        """Count a member; return whether it is wanted."""
        nonlocal count, total
        count, total = count + 1, total + size
        if count > MOST_MEMBERS or total > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes or {MOST_MEMBERS} members")
        progress.advance(file.tell())
        return _like(PurePosixPath(name).name, wanted)

    damaged = reading(str(archive), "it is damaged, unsafe or not an archive; get it again")
    with damaged, archive.open("rb") as file, writing(into):
        into.mkdir(parents=True)
        progress.begin(f"unpacking {archive.name}", archive.stat().st_size)
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(file) as packed:
                for info in packed.infolist():
                    if fits(info.file_size, info.filename) and not info.is_dir():
                        packed.extract(info, into)
        elif tarfile.is_tarfile(archive):
            with tarfile.open(fileobj=file) as bundle:
                for member in bundle:
                    if fits(member.size, member.name) and member.isreg():
                        # Its filter of unsafe names needs Python 3.11.4.
                        place = (into / member.name.lstrip("/")).resolve()
                        if not place.is_relative_to(into.resolve()):
                            raise ValueError(f"{member.name} is outside of it")
                        place.parent.mkdir(parents=True, exist_ok=True)
                        bundle.makefile(member, place)
                # The checksum of a compressed file is at its end.
                while bundle.fileobj is not None and bundle.fileobj.read(2**18):
                    pass
        else:
            # A damaged tar is read to its end, for a message that says so.
            if not _like(archive.stem, [*wanted, "*.tar"]):
                return []
            head = file.read(8)
            file.seek(0)
            [opener] = [opener for magic, opener in _OPENERS.items() if head.startswith(magic)]
            with opener(file) as stream, (into / archive.stem).open("xb") as target:
                while chunk := stream.read(2**18):
                    fits(len(chunk), archive.stem)
                    target.write(chunk)
    return sorted(path for path in into.rglob("*") if path.is_file() and _like(path.name, wanted))


def is_packed(path: Path) -> bool:
    """Tell whether a file is a zip, a tar or compressed, even if the rest of it is damaged."""
    try:
        with path.open("rb") as file:
            compressed = file.read(8).startswith(tuple(_OPENERS))
        return compressed or zipfile.is_zipfile(path) or tarfile.is_tarfile(path)
    except Exception:
        return False


def choose(name: str, files: Mapping[Path, Path]) -> tuple[Form, dict[str, list[Path]]]:
    """Choose the first form with a complete set of files; return it with those of each split."""
    problems: list[InputError] = []
    for form in source(name).forms:
        fitting = {path: root for path, root in files.items() if _like(path.name, form.accepted)}
        splits = {
            split: [path for path in fitting if form.whole or _split(path, fitting[path]) == split]
            for split in source(name).counts
        }
        try:
            if fitting:
                return form, {s: _narrowed(name, s, form, paths) for s, paths in splits.items()}
        except InputError as error:
            problems.append(error)
    raise problems[0]


def _no_file(name: str, path: Path) -> InputError:
    return InputError(f"{path} holds no file of {name!r}: give {expected(source(name))}")


def _patterns(name: str) -> list[str]:
    return [pattern for form in source(name).forms for pattern in form.accepted]


def _like(name: str, patterns: Sequence[str]) -> bool:
    """Match a name; some systems leave files behind whose names begin with a dot."""
    matches = (fnmatch.fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)
    return name[:1] != "." and any(matches)


def _narrowed(name: str, split: str, form: Form, paths: list[Path]) -> list[Path]:
    """Return as many files as a split needs, preferring official names."""
    if len(paths) > form.each > 0:
        paths = [path for path in paths if _like(path.name, form.official)] or paths
    if not paths or (form.each and len(paths) != form.each):
        found = ", ".join(map(str, paths)) or "none"
        problem = f"the {split} split of {name!r} is missing or not clear (found: {found})"
        raise InputError(f"{problem}: give {form.files}, with train or test in each name")
    return paths


def _split(path: Path, root: Path) -> str | None:
    """Find the split in a file's name, else in the outermost folder from ``root`` on."""
    words = {_WORDS[w] for w in re.split(r"[^a-z0-9]+", path.name.lower()) if w in _WORDS}
    if words:
        return words.pop() if len(words) == 1 else None
    folders = [*path.absolute().relative_to(root).parent.parts, root.name]
    return next((_WORDS[f.lower()] for f in folders if f.lower() in _WORDS), None)
