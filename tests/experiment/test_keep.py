"""Kept copies: small, the same to every reader, and nothing trains on in them."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from toys import toy

from fedzmg.errors import InputError
from fedzmg.experiment.grids.grid import run_grid
from fedzmg.experiment.keep import keep, restore
from fedzmg.experiment.progress import Silent
from fedzmg.experiment.run_directory import RunDirectory, export_model
from fedzmg.experiment.specs.files import GridSpec, StudySpec
from fedzmg.experiment.studies.study import run_study
from fedzmg.experiment.verify import verify
from fedzmg.report.html.page import render
from fedzmg.results import reading
from fedzmg.results.diff import compare
from fedzmg.simulation import RoundReport
from fedzmg.storage.formats import log_lines

GRID = GridSpec.parse(
    {
        "task": "toy", "algorithms": ["fedzmg"], "seeds": [9], "rounds": 3, "last": 2,
        "engine": "vectorized", "axes": {"client.lr": [0.01, 0.1], "server.lr": [0.5, 1.0]},
    }
)  # fmt: skip
STUDY = StudySpec.parse(
    {
        "task": "toy", "algorithms": ["fedzmg", "fedavg"], "seeds": [3, 5], "rounds": 3,
        "rates": "given", "engine": "vectorized", "thresholds": [0.2],
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trained")
    run_grid(GRID, place / "grid", task=toy(rounds=3))
    run_study(STUDY, place / "study", task=toy(rounds=3))
    return place


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "runs")


def page(place: Path) -> str:
    # By its name from beside it: a page repeats the path that it was asked for.
    with contextlib.chdir(place.parent):
        return render(reading.read([Path(place.name)]))


def test_a_report_of_the_copy_has_the_same_bytes(runs: Path, tmp_path: Path) -> None:
    for name in ("grid", "study"):
        kept = keep(runs / name, tmp_path / "kept" / name)
        assert page(runs / name) == page(kept.path)
        assert kept.bytes < kept.bytes_before


def test_the_logs_have_the_same_lines_and_the_rest_the_same_bytes(
    runs: Path, tmp_path: Path
) -> None:
    copy = keep(runs, tmp_path / "kept").path
    run = Path("study/fedavg/seed-5")
    assert RunDirectory(copy / run).records() == RunDirectory(runs / run).records()
    log = Path("grid/fedzmg/metrics.jsonl")
    assert log_lines(copy / log, dict) == log_lines(runs / log, dict) != []
    there = {path.relative_to(copy) for path in copy.rglob("*") if path.is_file()}
    for path in there - {Path("kept.json")}:
        if path.suffix != ".gz":
            assert (copy / path).read_bytes() == (runs / path).read_bytes()
    assert {path.name for path in there} >= {"clients.safetensors", "study.json", "scores.json"}
    assert not any(path.name.startswith(("checkpoint", "lock")) for path in there)


def test_a_copy_is_compared_and_verified_like_its_original(runs: Path, tmp_path: Path) -> None:
    copy = keep(runs / "study", tmp_path / "kept").path
    assert not compare(runs / "study", copy).differs()
    verdicts = verify(copy, task=toy(rounds=3))
    assert len(verdicts) == 4
    assert all(verdict.reproduced for verdict in verdicts)


def test_copying_again_replaces_the_copy_and_gives_the_same_bytes(
    runs: Path, tmp_path: Path
) -> None:
    first = keep(runs / "study", tmp_path / "kept").path
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    (first / "stray.json").write_text("{}")
    (runs / "study" / "report").mkdir()
    (runs / "study" / "report" / "index.json").write_text("{}")
    keep(runs / "study", tmp_path / "kept")
    assert before == {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "runs"]


def test_nothing_trains_on_in_a_copy(runs: Path, tmp_path: Path) -> None:
    copy = keep(runs, tmp_path / "kept").path
    before = sorted(copy.rglob("*"))
    with pytest.raises(InputError, match="study belongs to a kept copy"):
        run_study(STUDY, copy / "study", task=toy(rounds=3))
    with pytest.raises(InputError, match="grid belongs to a kept copy"):
        run_grid(GRID, copy / "grid", task=toy(rounds=3))
    run = copy / "study" / "fedzmg" / "seed-3"
    with pytest.raises(InputError, match="the original of a kept copy"):
        export_model(run)
    assert sorted(copy.rglob("*")) == before
    log = run / "metrics.jsonl.gz"
    log.write_bytes(log.read_bytes()[:-12])
    with pytest.raises(InputError, match=r"metrics\.jsonl\.gz cannot be read"):
        RunDirectory(run).records()


class Counted(Silent):
    """Counts the rounds that were trained."""

    rounds = 0

    def advance(self, report: RoundReport) -> None:
        self.rounds += 1


def test_a_restored_copy_trains_only_what_is_missing(runs: Path, tmp_path: Path) -> None:
    expected = json.loads((runs / "study" / "study.json").read_text())
    unfinished = runs / "study" / "fedavg" / "seed-5"
    manifest = json.loads((unfinished / "manifest.json").read_text())
    del manifest["finished"], manifest["content_sha256"]
    (unfinished / "manifest.json").write_text(json.dumps(manifest))
    copy = keep(runs, tmp_path / "kept").path
    finished, left = restore(copy, tmp_path / "again")
    assert (len(finished), [path.parts[-2:] for path in left]) == (4, [("fedavg", "seed-5")])
    seen = Counted()
    run_grid(GRID, tmp_path / "again" / "grid", task=toy(rounds=3), progress=seen)
    assert seen.rounds == 0
    run_study(STUDY, tmp_path / "again" / "study", task=toy(rounds=3), progress=seen)
    assert seen.rounds == 3, "those of one run"
    found = json.loads((tmp_path / "again" / "study" / "study.json").read_text())
    for name, row in expected["algorithms"].items():
        assert found["algorithms"][name]["final"] == row["final"]
    for source, to, message in (
        (runs, tmp_path / "new", "is not a kept copy"),
        (copy, tmp_path / "again", "exists"),
        (copy, tmp_path / "new", r"metrics\.jsonl\.gz cannot be read"),
    ):
        log = copy / "study" / "fedzmg" / "seed-3" / "metrics.jsonl.gz"
        log.write_bytes(log.read_bytes()[:-12])
        with pytest.raises(InputError, match=message):
            restore(source, to)


def test_bad_places_are_refused_in_one_line(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "mine.txt").write_text("mine")
    keep(runs / "grid", tmp_path / "grid")
    for source, to, message in (
        (tmp_path / "none", tmp_path / "kept", "none holds no results"),
        (tmp_path / "else", tmp_path / "kept", "else holds no results"),
        (runs / "study", tmp_path / "else", "else exists"),
        (runs, runs / "kept", "lies inside"),
        (runs / "study", tmp_path / "grid", r"holds a copy of other results \(.*toml differs\)"),
        (tmp_path / "grid", tmp_path / "kept", "is a kept copy already"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            keep(source, to)
        assert "\n" not in str(caught.value)
    assert json.loads((runs / "study" / "study.json").read_text())
    assert (tmp_path / "else" / "mine.txt").read_text() == "mine"
