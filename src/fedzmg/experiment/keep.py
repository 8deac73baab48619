"""Kept copies: results without checkpoints, small enough to share.

A kept copy holds specifications, manifests, every logged number and the figures. It has no
checkpoints, no client memory and no locks, and its logs are compressed::

    kept.json                   source of the copy
    metrics.jsonl.gz            replaces every metrics.jsonl, line for line

Everything that reads results also reads a copy; training does not continue in one.
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
from fedzmg.experiment.run_directory import FORMAT, LOG
from fedzmg.storage import lock
from fedzmg.storage.client_metrics import CLIENTS
from fedzmg.storage.files import compressed, write_atomic
from fedzmg.storage.formats import write_json

_WORTH_KEEPING = {".toml", ".json", ".jsonl", ".gz", ".md", ".csv", ".tex", ".png", ".svg", ".pdf"}
_REPORT = "report"
"""Directory of reports, which can be made again from the results."""


class Kept(NamedTuple):
    """Result of a copy."""

    path: Path
    files: int
    bytes: int
    bytes_before: int
    """Size of the whole directory, with checkpoints."""


def keep(source: Path, to: Path) -> Kept:
    """Copy a run, study, comparison or grid, or a directory of some.

    An earlier copy of the same results at ``to`` is replaced as a whole.
    """
    if not source.is_dir():
        raise InputError(f"{source} is not a directory; pass a run, study, comparison or grid")
    wanted = sorted(_worth_keeping(source))
    if not any(path.name in ("manifest.json", "grid.json", "study.json") for path in wanted):
        raise InputError(f"{source} holds no results: pass a run, study, comparison or grid")
    if (source / lock.KEPT).is_file():
        raise InputError(f"{source} is a kept copy already")
    if to.resolve().is_relative_to(source.resolve()):
        raise InputError(f"{to} lies inside {source}: choose a directory outside it with --out")
    _refuse_other_results(source, to)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.") as temporary:
            fresh, old = Path(temporary) / "fresh", Path(temporary) / "old"
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
        raise InputError(f"{to} exists and is not a kept copy: choose another directory with --out")
    # Specifications identify results; numbers may have been added since.
    for path in to.rglob("*.toml"):
        now = source / path.relative_to(to)
        if not now.is_file() or now.read_bytes() != path.read_bytes():
            raise InputError(
                f"{to} holds a copy of other results ({path.relative_to(to)} differs): choose "
                "another directory with --out, or remove it"
            )


def _worth_keeping(source: Path) -> Iterator[Path]:
    for path in _files(source):
        hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
        named = path.suffix in _WORTH_KEEPING or path.name == CLIENTS
        if named and not hidden and path.name not in (lock.NAME, lock.KEPT):
            yield path


def _files(source: Path) -> Iterator[Path]:
    for path in source.rglob("*"):
        if path.is_file() and path.relative_to(source).parts[0] != _REPORT:
            yield path


def _copy(path: Path, to: Path) -> int:
    """Copy a file, a log compressed; return its new size."""
    to.parent.mkdir(parents=True, exist_ok=True)
    if path.name == LOG:
        to = compressed(to)
        # Without a time stamp, the same log always gives the same bytes.
        write_atomic(to, gzip.compress(path.read_bytes(), mtime=0))
    else:
        shutil.copyfile(path, to)
    return to.stat().st_size
