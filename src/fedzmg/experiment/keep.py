"""Kept copies: results without checkpoints, small enough to share.

A kept copy holds specifications, manifests, every logged number and the figures. It has no
checkpoints, no client memory and no locks. ``metrics.jsonl.gz`` replaces every ``metrics.jsonl``,
line for line, and ``kept.json`` names the source.

Everything that reads results also reads a copy; training does not continue in one. It continues in
a directory that :func:`restore` makes of a copy, with the finished runs.
"""

import gzip
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedzmg.errors import InputError
from fedzmg.experiment.run_directory import FORMAT, LOG
from fedzmg.storage import lock
from fedzmg.storage.client_metrics import CLIENTS
from fedzmg.storage.files import compressed, log_bytes, naming_errors, sync_directory, write_atomic
from fedzmg.storage.formats import read_json, write_json
from fedzmg.storage.reading import read_file, walk

_KINDS = {".toml", ".json", ".jsonl", ".gz", ".md", ".csv", ".tex", ".png", ".svg", ".pdf"}
_OWN = (lock.NAME, lock.KEPT)
_REPORT = "report"  # directory of reports, which can be made again from the results


class Kept(NamedTuple):
    """Result of a copy."""

    path: Path
    files: int
    bytes: int
    bytes_before: int  # size of the whole directory, with checkpoints


def keep(source: Path, to: Path) -> Kept:
    """Copy results; an earlier copy of the same at ``to`` is replaced."""
    files = [path for path in _files(source) if path.relative_to(source).parts[0] != _REPORT]
    kinds = [path for path in sorted(files) if path.suffix in _KINDS or path.name == CLIENTS]
    wanted = [path for path in kinds if path.name not in _OWN]
    if not any(path.name in ("manifest.json", "grid.json", "study.json") for path in wanted):
        raise InputError(f"{source} holds no results: pass a run, study, comparison or grid")
    if (source / lock.KEPT).is_file():
        raise InputError(f"{source} is a kept copy already")
    target = to.resolve()
    if target.is_relative_to(source.resolve()):
        raise InputError(f"{to} lies inside {source}: choose a directory outside it with --out")
    if to.exists() and not (to / lock.KEPT).is_file() and (to.is_file() or any(to.iterdir())):
        raise InputError(f"{to} exists and is not a kept copy: choose another directory with --out")
    # Specifications identify results; numbers may have been added since.
    for path in (path for path in _files(target) if path.suffix == ".toml"):
        now = source / path.relative_to(target)
        if not now.is_file() or read_file(now) != read_file(path):
            other = f"holds a copy of other results ({path.relative_to(target)} differs)"
            raise InputError(f"{to} {other}: choose another --out, or remove it")
    with naming_errors(to, "choose another --out"):
        temporary = target.with_name(f".{target.name}.unfinished")
        shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
        try:
            fresh = temporary / "fresh"
            size = sum(_copy(path, fresh / path.relative_to(source)) for path in wanted)
            write_json(fresh / lock.KEPT, {"format": FORMAT, "from": source.as_posix()})
            if target.exists():
                os.replace(target, temporary / "old")
            os.replace(fresh, target)
            sync_directory(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return Kept(to, len(wanted), size, sum(path.stat().st_size for path in files))


def restore(source: Path, to: Path) -> tuple[list[Path], list[Path]]:
    """Copy the finished runs and searches of a kept copy to a directory that training continues in.

    Returns the parts that are finished, and those that training begins again: a copy has no
    checkpoints.
    """
    if not (source / lock.KEPT).is_file():
        raise InputError(f"{source} is not a kept copy: pass a directory that 'fedzmg keep' made")
    if to.exists() and (to.is_file() or any(to.iterdir())):
        raise InputError(f"{to} exists: choose another directory with --out")
    parts = [path.parent for path in sorted(_files(source)) if path.name == "manifest.json"]
    left = [part for part in parts if not _is_finished(part)]
    if len(left) == len(parts):
        raise InputError(f"{source} has no finished run or search: train it from the start")
    with naming_errors(to, "choose another --out"):
        for path in _files(source):
            target = to / path.relative_to(source)
            if path.name in _OWN or any(path.is_relative_to(part) for part in left):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.name == compressed(Path(LOG)).name:
                write_atomic(target.with_name(LOG), log_bytes(path.with_name(LOG)))
            else:
                write_atomic(target, read_file(path))
    return [part for part in parts if part not in left], left


def _is_finished(part: Path) -> bool:
    """Tell whether a run, or a grid's search of one algorithm, was trained to its end."""
    if (part / "spec.toml").is_file():
        return "finished" in read_json(part / "manifest.json")
    return (part / "scores.json").is_file()


def _files(top: Path) -> Iterator[Path]:
    for path, _, files in walk(top) if top.is_dir() else ():
        yield from (path / name for name in files)


def _copy(path: Path, to: Path) -> int:
    """Copy a regular file, a log compressed; return its new size."""
    to.parent.mkdir(parents=True, exist_ok=True)
    content = read_file(path)
    if path.name == LOG:
        # Without a time stamp, the same log always gives the same bytes.
        to, content = compressed(to), gzip.compress(content, mtime=0)
    write_atomic(to, content)
    return len(content)
