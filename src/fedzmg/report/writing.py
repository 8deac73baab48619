"""Files for people: places are tried before the work, and a report takes along its predecessor.

A report leaves ``written.json`` beside its files: their names and hashes. By it the next report in
the same directory knows what to replace and what to remove; anything else there is not its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fedzmg.errors import InputError
from fedzmg.files import write_atomic

LIST = "written.json"
ELSEWHERE = "choose another place with --out"


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


def refuse_foreign(out: Path, names: Iterable[str]) -> None:
    """Find out whether files may be written, or would replace what no report wrote.

    Raises:
        InputError: for the first that would.
    """
    own = _listed(out)
    # A link counts as what is there, wherever it leads.
    foreign = [name for name in names if name not in own and os.path.lexists(out / name)]
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise InputError(
            f"no report wrote {out / foreign[0]}{more}, and one would replace it: move it away, or "
            f"{ELSEWHERE}"
        )


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


def _listed(out: Path) -> dict[str, str]:
    """Files of the report before; none where there was none.

    Raises:
        InputError: if the list is none of ours.
    """
    if not os.path.lexists(out / LIST):
        return {}
    try:
        found: Any = json.loads((out / LIST).read_text(encoding="utf-8"))["files"]
        return {str(name): str(digest) for name, digest in found.items() if _is_inside(str(name))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"no report wrote {out / LIST}, and one would replace it: move it away, or {ELSEWHERE}"
        ) from None


def _write_list(out: Path, files: Mapping[str, str]) -> None:
    content = {"format": 1, "files": dict(sorted(files.items()))}
    write(out / LIST, (json.dumps(content, indent=1) + "\n").encode())


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
