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
from pathlib import Path
from typing import NamedTuple

from fedzmg.errors import InputError
from fedzmg.experiment.run_directory import FORMAT, LOG
from fedzmg.storage import lock
from fedzmg.storage.client_metrics import CLIENTS
from fedzmg.storage.files import compressed, write_atomic
from fedzmg.storage.formats import write_json

_KINDS = {".toml", ".json", ".jsonl", ".gz", ".md", ".csv", ".tex", ".png", ".svg", ".pdf"}
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
    files = [
        path
        for path in sorted(source.rglob("*"))
        # Hidden files are a writer's, which soon renames them.
        if path.is_file() and path.relative_to(source).parts[0] != _REPORT and path.name[0] != "."
    ]
    wanted = [path for path in files if _is_wanted(path.relative_to(source))]
    if not any(path.name in ("manifest.json", "grid.json", "study.json") for path in wanted):
        raise InputError(f"{source} holds no results: pass a run, study, comparison or grid")
    if (source / lock.KEPT).is_file():
        raise InputError(f"{source} is a kept copy already")
    if to.resolve().is_relative_to(source.resolve()):
        raise InputError(f"{to} lies inside {source}: choose a directory outside it with --out")
    if to.exists() and not (to / lock.KEPT).is_file() and (to.is_file() or any(to.iterdir())):
        raise InputError(f"{to} exists and is not a kept copy: choose another directory with --out")
    # Specifications identify results; numbers may have been added since.
    for path in to.rglob("*.toml"):
        now = source / path.relative_to(to)
        if not now.is_file() or now.read_bytes() != path.read_bytes():
            other = f"holds a copy of other results ({path.relative_to(to)} differs)"
            raise InputError(f"{to} {other}: choose another --out, or remove it")
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
    return Kept(to, len(wanted), size, sum(path.stat().st_size for path in files))


def _is_wanted(path: Path) -> bool:
    if path.name in (lock.NAME, lock.KEPT) or any(part.startswith(".") for part in path.parts):
        return False
    return path.suffix in _KINDS or path.name == CLIENTS


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
