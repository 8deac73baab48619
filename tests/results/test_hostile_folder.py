"""Folders of results from a stranger: every command ends with one line, and nothing leaks."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedzmg.errors import InputError
from fedzmg.experiment import keep as keeping
from fedzmg.experiment.grids.grid import run_grid
from fedzmg.experiment.run_directory import change_manifest
from fedzmg.experiment.specs.files import GridSpec, StudySpec
from fedzmg.experiment.specs.strict import toml
from fedzmg.experiment.studies.study import run_study
from fedzmg.report import figures
from fedzmg.storage import lock, reading
from fedzmg.storage.formats import log_lines, read_json

SHARED = {"task": "logistic", "rounds": 2, "protocol": {"cohort": 2}, "engine": "sequential"}
STUDY = StudySpec.parse({**SHARED, "algorithms": ["fedavg"], "seeds": [0], "rates": "given"})
GRID = GridSpec.parse(
    {
        **SHARED,
        "algorithms": ["fedavg"],
        "seeds": [9],
        "last": 1,
        "selection": "test",
        "axes": {"client.lr": [0.1, 0.2]},
    }
)
STOPPED = {"format": 1, "round": 2, "why": "diverged", "words": "diverged", "heuristic": False}
LOCK = {"user": "u", "host": "h", "pid": 1, "process": "1", "machine": "m", "started": 1.0,
        "heartbeat": 1.0, "token": "t"}  # fmt: skip
HASHES = ("content_sha256", "spec_sha256")
"""Fields that a stranger would compute again, or leave out."""
RUN = "study/fedavg/seed-0"
Fedzmg = Callable[..., Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("trained")
    run_study(STUDY, top / "study")
    run_grid(GRID, top / "grid")
    (top / f"{RUN}/stopped.json").write_text(json.dumps(STOPPED))
    for name, spec in (("study", STUDY), ("grid", GRID)):
        (top / f"{name}-plan.toml").write_text(spec.to_toml())
    return top


@pytest.fixture
def top(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that may be damaged; no figure is rendered from it, and nothing is synced."""
    monkeypatch.setattr(figures, "draw", lambda *_: {})
    monkeypatch.setattr(figures, "save", lambda _, stem: [stem])
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(lock, "WATCH_SECONDS", 0.1)
    return shutil.copytree(trained, tmp_path / "top")


def commands(top: Path, trained: Path) -> Iterator[list[str]]:
    """Every command that reads results."""
    yield from (["report", f"{top}", "--out", f"{top}-report"], ["watch", f"{top}", "--once"])
    yield from (["watch", f"{top}", "--once", "--json"], ["keep", f"{top}", "--out", f"{top}-kept"])
    for name in ("study", "grid"):
        yield ["diff", f"{trained / name}", f"{top / name}"]
        yield ["verify", f"{top / name}", "--rounds", "1"]
        yield [name, f"{trained / name}-plan.toml", "--out", f"{top / name}"]
    yield ["export", f"{top / RUN}", "--to", f"{top}-model"]


def is_clean(done: Any, command: list[str]) -> bool:
    """One line and exit code 2, or success; nothing that takes over a terminal."""
    codes = (0, 1, 2) if command[0] in ("diff", "verify") else (0, 2)
    lines = [line for line in done.err.splitlines() if line.startswith("fedzmg: error: ")]
    raw = {c for c in done.out + done.err if c != "\n" and not c.isprintable()} - {"\xa0"}
    return done.code in codes and len(lines) == (done.code == 2) and not raw


SECRET = "never-to-be-copied"
TRAPS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, secret: path.symlink_to(secret),
    "folder": lambda path, secret: path.symlink_to(secret.parent, target_is_directory=True),
    "pipe": lambda path, _: os.mkfifo(path),
    "sparse": lambda path, _: (path.touch(), os.truncate(path, 2**40)),
}


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", ["study/study.toml", f"{RUN}/metrics.jsonl", f"{RUN}/notes.md"])
def test_only_plain_files_of_bounded_size_are_read_or_copied(
    name: str, trap: str, top: Path, trained: Path, tmp_path: Path, fedzmg: Fedzmg
) -> None:
    secret = tmp_path / "home" / "credentials"
    secret.parent.mkdir()
    secret.write_text(SECRET)
    path = top / name
    path.unlink(missing_ok=True)
    TRAPS[trap](path, secret)
    for command in commands(top, trained):
        reads_all = command[0] in ("report", "watch", "keep") and path.suffix != ".md"
        if not any(path.is_relative_to(word) for word in command[1:]):
            continue  # it reads another part of the folder
        if trap == "sparse" and not reads_all:
            continue
        done = fedzmg(*command)
        assert done.code == 2, command
        assert str(path) in done.err
        assert is_clean(done, command)
    found = [p for p in tmp_path.rglob("*") if p.is_file() and not p.is_symlink() and p != secret]
    assert not any(SECRET.encode() in p.read_bytes() for p in found if p.stat().st_size < 2**30)


def test_the_path_that_a_user_types_may_be_a_link(
    top: Path, trained: Path, tmp_path: Path, fedzmg: Fedzmg
) -> None:
    (tmp_path / "link").symlink_to(top)
    for command in commands(tmp_path / "link", trained):
        if command[0] in ("verify", "study", "grid"):
            continue  # which take longer
        assert fedzmg(*command).code == 0, command


@pytest.mark.parametrize("name", ["tables", "report.html", "written.json"])
def test_a_report_writes_through_no_link(
    name: str, top: Path, tmp_path: Path, fedzmg: Fedzmg
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(tmp_path / "home")
    assert fedzmg("report", str(top), "--out", str(tmp_path / "out")).code == 2
    assert list((tmp_path / "home").iterdir()) == []


def test_trackers_may_leave_links(top: Path, fedzmg: Fedzmg) -> None:
    (top / "study/tracking").mkdir()
    (top / "study/tracking/latest-run").symlink_to(".")
    assert fedzmg("report", str(top)).code == 0


@pytest.mark.parametrize(
    "content",
    [
        b'{"round": 1}, {"round": 2}\n{}\n',
        b'{"round": 1' + b"0" * 30 + b"}\n{}\n",
        b'{"round": 1000000000000000000}\n{}\n',
        b'{"round": NaN}\n{}\n',
        b'{"round": 1, "x": ' + b"9" * 5000 + b"}\n{}\n",
    ],
)  # fmt: skip
def test_a_log_with_a_wrong_line_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=r"log\.jsonl"):
        log_lines(tmp_path / "log.jsonl", dict)


def test_a_compressed_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LIMIT", 1000)
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(b"\n" * 1001))
    with pytest.raises(InputError, match=r"log\.jsonl\.gz"):
        log_lines(tmp_path / "log.jsonl", dict)


def test_a_copy_replaces_the_last_one_and_leftovers_of_a_killed_process(
    top: Path, tmp_path: Path
) -> None:
    to = tmp_path / "kept"
    keeping.keep(top, to)
    names = [path.relative_to(to) for path in to.rglob("*")]
    left = tmp_path / ".kept.unfinished"
    left.mkdir()
    keeping.keep(top, to)
    assert [path.relative_to(to) for path in to.rglob("*")] == names
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


VALUES: list[Any] = [
    None, True, -1, 0, 10**18, 10**40, 1e308, 1.5, "", "nan", "\x1b[31m\u202e\x07", "../../etc",
    "x" * 3000, [], {}, [1], [[]], ["a", "b"], {"a": 1}, {"a": {"b": []}}, [None] * 3, {"": ""},
]  # fmt: skip


def places(values: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(values, dict | list):
        for key in values if isinstance(values, dict) else range(min(len(values), 3)):
            yield (*at, key)
            yield from places(values[key], (*at, key))


def damaged(values: Any, rng: random.Random) -> Any:
    """Replace or remove one field."""
    values = inner = copy.deepcopy(values)
    *path, last = rng.choice(list(places(values)))
    for key in path:
        inner = inner[key]
    if rng.random() < 0.1:
        del inner[last]
    else:
        inner[last] = copy.deepcopy(rng.choice(VALUES))
    return values


def attack(top: Path, seed: int) -> Path:
    """Damage bytes or a field of one file, each file in turn; return its path."""
    rng = random.Random(seed)
    suffixes = (".toml", ".json", ".jsonl", ".safetensors")
    (top / "study/lock.json").write_text(json.dumps(LOCK))
    files = [p for p in sorted(top.rglob("*")) if p.suffix in suffixes and p.parent != top]
    files = [p for p in files if p.name != "study.json"]
    path = files[seed % len(files)]
    content = bytearray(path.read_bytes())
    if path.suffix == ".safetensors" or rng.random() < 0.15:
        at = rng.randrange(min(len(content), 600))
        content[at : at + rng.choice([0, 1, 50])] = rng.choice(
            [b"", b"\0", b"9" * 5000, b"[", b'{"a":' * 2000, b"NaN", b"\n", b"\xff", b"1e999"]
        )
    elif path.suffix == ".jsonl":
        more = {"flagged": [["c", 200.0]]} if path.parent == top / RUN else {}
        rows = [{**json.loads(line), **more} for line in content.splitlines()]
        content[:] = "".join(json.dumps(damaged(row, rng)) + "\n" for row in rows).encode()
        change_manifest(path.parent, logs=None)  # as a stranger would
    elif path.suffix == ".json":
        values = {k: v for k, v in json.loads(content).items() if k not in HASHES}
        content[:] = json.dumps(damaged(values, rng)).encode()
    else:
        values = damaged(tomllib.loads(content.decode()), rng)
        content[:] = toml(values).replace(" = null\n", ' = ""\n').encode()
    path.write_bytes(content)
    if path.name != "lock.json":
        (top / "study/lock.json").unlink()
    return path


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(i, marks=pytest.mark.slow) for i in range(3, 250))]
)
def test_a_damaged_file_is_one_line_to_every_command(
    seed: int, top: Path, trained: Path, fedzmg: Fedzmg
) -> None:
    path = attack(top, seed)
    for command in commands(top, trained):
        if any(path.is_relative_to(word) for word in command[1:]):
            done = fedzmg(*command)
            assert is_clean(done, command), (path.name, command, done)


def test_wrong_fields_are_named(top: Path) -> None:
    for name, field, value in (
        (f"{RUN}/manifest.json", "metric", []),
        (f"{RUN}/stopped.json", "round", 10**18),
        ("grid/grid.json", "algorithms", {str(i): {} for i in range(2000)}),
        ("grid/fedavg/scores.json", "points", [{"options": {"client.lr": 3.0}}]),
    ):
        values = json.loads((top / name).read_text())
        values = {key: own for key, own in values.items() if key not in HASHES}
        (top / name).write_text(json.dumps({**values, field: value}))
        with pytest.raises(InputError, match=rf"{Path(name).name}.*{field}"):
            read_json(top / name)
