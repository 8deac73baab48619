"""Files for people: places are tried before the work, and a report takes along its predecessor.

A report leaves ``written.json`` beside its files: their names and hashes. By it the next report in
the same directory knows what to replace and what to remove; anything else there is not its own.
Other commands that fill a directory keep a list of their own in the same file, and remove nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fedzmg.errors import InputError
from fedzmg.storage.files import write_atomic

LIST = "written.json"
ELSEWHERE = "choose another place with --out"
REPORT = "report"


class Cleared(NamedTuple):
    """What became of files of an earlier report that this one does not write."""

    removed: tuple[str, ...]
    kept: tuple[str, ...]
    """Changed by somebody since."""


def check_place(place: Path, remedy: str = ELSEWHERE) -> None:
    """Find out before long work whether a directory can be written; it need not be there yet.

    Raises:
        InputError: if it cannot.
    """
    try:
        whole = place.absolute()
        there = next(path for path in (whole, *whole.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _unwritable(place, error, remedy) from None


def write(path: Path, content: bytes, remedy: str = ELSEWHERE) -> None:
    """Write a file and the directories above it.

    Raises:
        InputError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        raise _unwritable(path, error, remedy) from None


def refuse_foreign(out: Path, names: Iterable[str], writer: str = REPORT) -> None:
    """Find out whether files may be written, or would replace what this command did not write.

    Args:
        out: a directory.
        names: all that are to be written there, or those that are known.
        writer: the command.

    Raises:
        InputError: for the first that would.
    """
    own, wanted = _listed(out, writer), list(names)
    # A link counts as what is there, wherever it leads.
    foreign = [name for name in wanted if name not in own and os.path.lexists(out / name)]
    # Before commands other than reports kept lists, they left all of their files and no list.
    older = writer != REPORT and foreign == wanted and not os.path.lexists(out / LIST)
    if foreign and not older:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise _foreign(f"{out / foreign[0]}{more}", writer)


@contextlib.contextmanager
def staged(out: Path, writer: str) -> Iterator[Path]:
    """A folder for files that then go to a directory, in place of those of the same names.

    Args:
        out: the directory; it is made.
        writer: the command; what it wrote there before under other names stays.

    Raises:
        InputError: if a file cannot be written, or would replace what this command did not write;
            then nothing is changed.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    refuse_foreign(out, files, writer)
    if files:
        own = {name: _hash(content) for name, content in files.items()}
        _write_list(out, {**_listed(out, writer), **own}, writer)
    for name, content in files.items():
        write(out / name, content)


def replace_files(out: Path, files: Mapping[str, bytes]) -> Cleared:
    """Write files and remove those that an earlier call wrote and this one does not.

    Args:
        out: a directory; it is made.
        files: contents by name; a name may have folders, with ``/``.

    Raises:
        InputError: if one cannot be written, or would replace what no earlier call wrote; then
            nothing is changed.
    """
    refuse_foreign(out, files)
    before = _listed(out)
    now = {name: _hash(content) for name, content in files.items()}
    # First of all: should the work end halfway, the next report still knows all the files.
    _write_list(out, {**before, **now})
    for name, content in files.items():
        write(out / name, content)
    stale = [name for name in before if name not in now]
    gone = [name for name in stale if _remove(out, name, before[name])]
    _write_list(out, now)
    kept = [name for name in stale if name not in gone and (out / name).exists()]
    return Cleared(tuple(gone), tuple(kept))


def _listed(out: Path, writer: str = REPORT) -> dict[str, str]:
    """Files that a command wrote before; none where it wrote none.

    Raises:
        InputError: if the list is none of ours.
    """
    return _lists(out, writer).get(_key(writer), {})


def _lists(out: Path, writer: str) -> dict[str, dict[str, str]]:
    if not os.path.lexists(out / LIST):
        return {"files": {}}
    try:
        found: dict[str, Any] = json.loads((out / LIST).read_text(encoding="utf-8"))
        found["files"].items()  # every list of ours has them
        return {
            key: {str(name): str(digest) for name, digest in own.items() if _is_inside(str(name))}
            for key, own in found.items()
            if key != "format"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise _foreign(str(out / LIST), writer) from None


def _write_list(out: Path, files: Mapping[str, str], writer: str = REPORT) -> None:
    lists = {**_lists(out, writer), _key(writer): dict(sorted(files.items()))}
    write(out / LIST, (json.dumps({"format": 1, **lists}, indent=1) + "\n").encode())


def _key(writer: str) -> str:
    return "files" if writer == REPORT else writer


def _foreign(place: str, writer: str) -> InputError:
    who = "report" if writer == REPORT else f"'fedzmg {writer}'"
    return InputError(
        f"no {who} wrote {place}, and one would replace it: move it away, or {ELSEWHERE}"
    )


def _is_inside(name: str) -> bool:
    """Whether a name leads to a file below the directory, whatever a list says.

    >>> [_is_inside(name) for name in ("tables/a.md", "/etc/a", "../a", "b/../../a", "", "c:/a")]
    [True, False, False, False, False, False]
    """
    parts = PurePosixPath(name).parts
    return bool(parts) and not {"/", ".."} & set(parts) and not {"\\", ":"} & set(name)


def _remove(out: Path, name: str, digest: str) -> bool:
    """Remove a file that still is what was written, and its folder if that was the last."""
    path = out / name
    folders = [folder for folder in path.parents if out in folder.parents]
    # A link may lead to a file that belongs to somebody else.
    if any(found.is_symlink() for found in (path, *folders)):
        return False
    try:
        if _hash(path.read_bytes()) != digest:
            return False
        path.unlink()
    except OSError:
        return False
    for folder in folders:
        with contextlib.suppress(OSError):  # somebody put files there, too
            folder.rmdir()
    return True


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _unwritable(path: Path, error: OSError, remedy: str) -> InputError:
    return InputError(f"cannot write {path}: {error.strerror or error}; {remedy}")
