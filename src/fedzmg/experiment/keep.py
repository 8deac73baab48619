"""Copy results without what only training needs, so that they are small enough to share.

A kept copy holds what was asked for, its circumstances, every logged number and the figures. It has
no checkpoints, no client memory and no locks, and its logs are compressed::

    kept.json                   where the copy comes from and what it left out
    metrics.jsonl.gz            in place of every metrics.jsonl, line for line

Everything that reads directories reads a copy as well; nothing trains on in one.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedzmg.errors import InputError
from fedzmg.experiment.runs.store import CLIENTS, FORMAT, LOG, write_json
from fedzmg.storage import lock
from fedzmg.storage.files import compressed, write_atomic

_WORTH_KEEPING = {".toml", ".json", ".jsonl", ".gz", ".md", ".csv", ".tex", ".png", ".svg", ".pdf"}
_REPORT = "report"
"""Made from the rest at any time."""


class Kept(NamedTuple):
    """What a copy came to."""

    path: Path
    files: int
    bytes: int
    bytes_before: int
    """Of the whole directory, checkpoints included."""


def keep(source: Path, to: Path) -> Kept:
    """Copy a run, study, comparison or grid, or a directory of some, for keeping.

    An earlier copy of the same results at ``to`` is replaced as a whole.

    Raises:
        InputError: if there is nothing to keep, something else is at ``to``, or it cannot be
            written.
    """
    if not source.is_dir():
        raise InputError(f"{source} is no directory: give a run, study, comparison or grid")
    wanted = sorted(_worth_keeping(source))
    if not any(path.name in ("manifest.json", "grid.json", "study.json") for path in wanted):
        raise InputError(f"{source} holds no results: give a run, study, comparison or grid")
    if (source / lock.KEPT).is_file():
        raise InputError(f"{source} is a kept copy already")
    if to.resolve().is_relative_to(source.resolve()):
        raise InputError(f"{to} lies inside {source}: choose a place outside it with --out")
    _refuse_other_results(source, to)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.") as beside:
            fresh, old = Path(beside) / "fresh", Path(beside) / "old"
            size = sum(_copy(path, fresh / path.relative_to(source)) for path in wanted)
            write_json(fresh / lock.KEPT, {"format": FORMAT, "from": source.as_posix()})
            if to.exists():
                os.replace(to, old)
            os.replace(fresh, to)
    except OSError as error:
        raise InputError(f"cannot write {to}: {error.strerror}; choose another --out") from None
    return Kept(to, len(wanted), size, sum(path.stat().st_size for path in _files(source)))


def _refuse_other_results(source: Path, to: Path) -> None:
    if not to.exists() or (to.is_dir() and not any(to.iterdir())):
        return
    if not (to / lock.KEPT).is_file():
        raise InputError(f"{to} exists and is no kept copy: choose another place with --out")
    # What was asked for tells results apart; numbers may have been added since.
    for path in to.rglob("*.toml"):
        now = source / path.relative_to(to)
        if not now.is_file() or now.read_bytes() != path.read_bytes():
            raise InputError(
                f"{to} holds a copy of other results ({path.relative_to(to)} differs): choose "
                "another place with --out, or remove it"
            )


def _worth_keeping(source: Path) -> Iterator[Path]:
    for path in _files(source):
        hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
        named = path.suffix in _WORTH_KEEPING or path.name == CLIENTS
        if named and not hidden and path.name not in (lock.NAME, lock.KEPT):
            yield path


def _files(source: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(source):
        if Path(folder) == source and _REPORT in folders:
            folders.remove(_REPORT)
        yield from (Path(folder) / name for name in names)


def _copy(path: Path, to: Path) -> int:
    """Copy a file, a log compressed; the bytes it takes there."""
    to.parent.mkdir(parents=True, exist_ok=True)
    if path.name == LOG:
        to = compressed(to)
        # No name and no time: the same log always makes the same bytes.
        write_atomic(to, gzip.compress(path.read_bytes(), mtime=0))
    else:
        shutil.copyfile(path, to)
    return to.stat().st_size
