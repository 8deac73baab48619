"""Leftovers of killed processes: removed by the next start, and nobody else's files with them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from toys import same, toy

from fedzmg.errors import InputError
from fedzmg.experiment import run as runs
from fedzmg.experiment.grids.grid import run_grid
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.run_directory import LOG, RunDirectory
from fedzmg.experiment.specs.files import GridSpec, StudySpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.studies.study import run_study
from fedzmg.report.writing import write
from fedzmg.storage.files import LEFTOVER_SECONDS
from fedzmg.storage.lock import Owner

SHARED: dict[str, Any] = {"task": "toy", "engine": "vectorized", "device": "cpu", "rounds": 2}
GRID = GridSpec.parse(
    {**SHARED, "algorithms": ["scaffold"], "axes": {"client.lr": [0.1, 0.2]}, "last": 1}
)
STUDY = StudySpec.parse({**SHARED, "algorithms": ["fedavg"], "rates": "given", "seeds": [0]})
RUN = RunSpec(task="toy", algorithm="scaffold", engine="vectorized", device="cpu")
LEFT = (".lock.json.0a1b2c3d", ".checkpoint.safetensors.00000000", ".tmpAb12Cd")


class Killed(BaseException):
    """Stands for a kill: no handler of an error runs."""


def hidden(path: Path) -> list[str]:
    return [found.name for found in path.rglob(".*")]


def litter(*directories: Path) -> None:
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
        for name in LEFT:
            (directory / name).write_bytes(b"half")


def test_next_start_removes_temporary_files(tmp_path: Path) -> None:
    task, (grid, study) = toy(rounds=2), (tmp_path / name for name in ("grid", "study"))
    # Killed while it wrote its first file.
    for directory, name in ((grid, "grid"), (study, "study")):
        directory.mkdir()
        (directory / f".{name}.toml.0a1b2c3d").write_bytes(b"half")
    scores, result = run_grid(GRID, grid, task=task), run_study(STUDY, study, task=task)
    litter(grid, grid / "scaffold", study)
    shutil.rmtree(study / "fedavg" / "seed-0")
    litter(study / "fedavg")
    assert run_grid(GRID, grid, task=task) == scores
    again = run_study(STUDY, study, task=task)
    assert again.scores[0].finals == result.scores[0].finals
    assert hidden(tmp_path) == []


def test_lock_of_a_finished_run_is_removed(tmp_path: Path) -> None:
    """The process was killed between its last record and the removal of its lock."""
    task, out = toy(rounds=2), tmp_path / "run"
    process = Owner.of_this_process()
    run_pack(task, [RUN], [out])
    for gone in (True, False):
        owner = replace(process, pid=process.pid if not gone else 2**22 + 1)
        (out / "lock.json").write_text(json.dumps(asdict(owner)))
        run_pack(task, [RUN], [out])
        assert (out / "lock.json").exists() != gone


def test_files_of_others_stay(tmp_path: Path) -> None:
    own = tmp_path / "own"
    litter(own)
    (own / ".study.toml.swp").write_text("an editor's")
    before = sorted(hidden(own))
    before.remove(LEFT[0])  # a lock is only ours
    with pytest.raises(InputError, match=r"study\.toml"):
        run_study(STUDY, own, task=toy(rounds=2))
    assert sorted(hidden(own)) == before
    page = tmp_path / "report.html"
    names = (".report.html.00000000", ".report.html.11111111", ".a.00000000")
    old, new, foreign = (tmp_path / name for name in names)
    for path in (old, new, foreign):
        path.write_text("half")
    os.utime(old, (0, new.stat().st_mtime - 2 * LEFTOVER_SECONDS))
    write(page, b"whole")
    assert not old.exists()
    assert new.exists()  # another process may be writing it
    assert foreign.exists()


def test_scored_grid_keeps_no_training_state(tmp_path: Path) -> None:
    task, state = toy(rounds=2), tmp_path / "scaffold"
    scores = run_grid(GRID, tmp_path, task=task)
    (state / "memory" / "trial-0").mkdir(parents=True)
    (state / "checkpoint.safetensors").write_bytes(b"of a process that was killed")
    (tmp_path / "grid.json").unlink()
    assert run_grid(GRID, tmp_path, task=task) == scores
    names = {"manifest.json", "metrics.jsonl", "scores.json"}
    assert {path.name for path in state.iterdir()} == names


@pytest.mark.parametrize("moment", ["before", "after"])
def test_kill_between_the_last_checkpoint_and_its_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Before the last checkpoint it continues; after it, it is finished without a step."""
    task, path = toy(rounds=3), tmp_path / "run"
    [whole] = run_pack(task, [RUN])

    def kill(*_: Any, **facts: Any) -> None:
        if moment == "before" or "finished" in facts:
            raise Killed

    with monkeypatch.context() as patch:
        if moment == "before":
            patch.setattr(RunDirectory, "save", kill)
        else:
            patch.setattr(runs, "change_manifest", kill)
        with pytest.raises(Killed):
            run_pack(task, [RUN], [path])
    assert "finished" not in json.loads((path / "manifest.json").read_bytes())
    (path / ".manifest.json.0a1b2c3d").write_bytes(b"half")
    logged = (path / LOG).read_bytes()
    [found] = run_pack(task, [RUN], [path])
    assert same([whole], [found])
    assert len(found.clients) == len(whole.clients)
    assert "finished" in json.loads((path / "manifest.json").read_bytes())
    assert hidden(path) == []
    assert ((path / LOG).read_bytes() == logged) == (moment == "after")
