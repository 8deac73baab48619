"""Run directories become plain data, and nothing but what is on disk."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import fedzmg
from fedzmg.errors import InputError
from fedzmg.experiment.run_directory import RunDirectory
from fedzmg.results.reading import read
from fedzmg.results.runs import read_log
from fedzmg.results.study_result import StudyResult, study_result, summary
from fedzmg.simulation import History, Record
from fedzmg.tree import Tree

Line = Callable[..., dict[str, Any]]


def test_runs_of_a_study_stand_together_reference_first(study: Path) -> None:
    material = read([study])
    [found] = material.studies
    assert list(found.members) == ["fedzmg", "fedavg"]
    assert [run.seed for run in found.members["fedavg"]] == [0, 1, 2]
    assert found.reference == "fedzmg"
    assert found.metric == "accuracy"
    assert material.notes == ()
    assert found.members["fedavg"][1].shown == "study/fedavg/seed-1"


def test_what_a_run_wrote_is_what_is_read(tmp_path: Path, log_line: Line) -> None:
    directory = RunDirectory(tmp_path)
    for round_, metric in ((1, 0.25), (2, None), (3, math.nan)):
        directory.append(Record(**log_line(round_, metric, diverged=round_ == 3)))
    log = read_log(tmp_path / "metrics.jsonl")
    assert log["done"] == 3
    assert [*log["metrics"]] == [1, 3]
    assert log["metrics"][1] == 0.25
    assert math.isnan(log["metrics"][3])
    assert log["diverged"] == 3
    assert log["moved"] == {1: 2 * 2**20, 3: 6 * 2**20}
    assert log["traffic"]["total"] == 6 * 2**20
    assert log["seconds"] == 1.5


def test_later_lines_win_and_only_damage_is_named(tmp_path: Path, log_line: Line) -> None:
    lines = [json.dumps(log_line(r, 0.1 * r)) for r in (1, 2, 3)]
    again = json.dumps(log_line(2, 0.9))
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([lines[0], lines[1], lines[2], lines[1][:40], again, lines[2][:50]]))
    log = read_log(path)
    assert log["done"] == 3
    assert log["metrics"] == pytest.approx({1: 0.1, 2: 0.9, 3: 0.3})
    path.write_text(f'{lines[0]}\n{{"round": oops}}\n{lines[0]}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2 is damaged"):
        read_log(path)
    path.write_text('{"round": 1}\n{"round": 2}\n')
    with pytest.raises(InputError, match="bytes_down"):
        read_log(path)


def test_an_unfinished_run_has_no_final_value(study: Path) -> None:
    log = study / "fedavg" / "seed-2" / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:6]))
    result = study_result(read([study]).studies[0])
    fedavg = result.scores[1]
    assert fedavg.unfinished == 1
    assert set(fedavg.finals) == {0, 1}
    assert fedavg.test is not None
    assert fedavg.test.n == 2
    assert any("seed 2 at round 6 of 10" in note for note in result.notes)
    assert "1 of 6 runs are not finished." in summary(result)


def test_scores_by_hand(study: Path) -> None:
    ours, theirs = study_result(read([study]).studies[0]).scores
    assert ours.mean == pytest.approx(0.8)
    assert ours.sd == pytest.approx(0.2)
    # Differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, t = 2 * sqrt(3).
    assert theirs.test is not None
    assert theirs.test.t == pytest.approx(2 * math.sqrt(3))
    assert theirs.adjusted == theirs.test.p == pytest.approx(0.0742, abs=1e-4)
    # Averaged curve of fedzmg: 0.8 times the shares; the window 0.4, 0.56, 0.64, 0.72 is the
    # first whose mean reaches 0.5, and 0.56 to 0.8 the first that lies above it.
    assert ours.arrivals == {"rolling_mean": 6, "rolling_min": 7, "stays_above": 6}
    assert theirs.arrivals["rolling_mean"] == 7
    # After round 7, both are at their top.
    assert ours.late == pytest.approx(0.8)
    assert theirs.late == pytest.approx(0.6)
    assert ours.traffic["total"] == 20 * 2**20
    assert ours.per_mib == pytest.approx(0.8 / 20)


def test_runs_on_disk_and_in_memory_give_the_same_result(
    write_run: Any, tmp_path: Path, log_line: Line
) -> None:
    task = fedzmg.tasks.get("digits")
    task = replace(task, protocol=task.protocol.with_options({"rounds": 30, "threshold": 0.5}))
    histories: dict[str, list[History]] = {"fedzmg": [], "fedavg": []}
    for name, runs in histories.items():
        for seed in range(3):
            random = Random(f"{name} {seed}")
            lost = 21 if (name, seed) == ("fedavg", 1) else 99
            lines = [
                log_line(r, 0.0 if r >= lost else r / 30 * random.random(), diverged=r >= lost)
                for r in range(1, 31)
            ]
            write_run(f"kept/{name}/seed-{seed}", name, seed, [], lines=lines, every=2)
            records = tuple(Record(**one) for one in lines)
            runs.append(History(task, fedzmg.Trial.of(name, seed=seed), records, Tree({})))
    in_memory = StudyResult.from_histories(histories).as_dict()
    on_disk = study_result(read([tmp_path / "kept"]).studies[0]).as_dict()
    for data in (in_memory, on_disk):
        for row in data["algorithms"].values():
            row.update(options={}, directory=None)
    assert in_memory == on_disk


def test_settings_tell_runs_of_one_algorithm_apart(write_run: Any, tmp_path: Path) -> None:
    write_run("all/a", "fedavg", 0, [0.1, 0.2], lr=0.1)
    write_run("all/b", "fedavg", 0, [0.1, 0.3], lr=0.3)
    write_run("all/c", "fedavg", 0, [0.1, 0.3], lr=0.3)
    write_run("all/d", "fedavg", 0, [0.1, 0.3], task="plays")
    material = read([tmp_path / "all"])
    assert [study.name for study in material.studies] == ["digits", "plays"]
    assert list(material.studies[0].members) == ["fedavg (lr 0.1)", "fedavg (lr 0.3)"]
    assert material.notes == ("all/c repeats all/b (same settings and seed): it is left out",)


def test_a_planned_study_gives_names_thresholds_and_schedule(
    write_run: Any, tmp_path: Path, log_line: Line
) -> None:
    lines = [log_line(r, 0.5 if (r - 1) % 5 == 0 else None) for r in range(1, 32)]
    lines.append(log_line(32, 1.0))
    for seed in (0, 1):
        for folder in ("first", "second-one"):
            write_run(
                f"planned/{folder}/seed-{seed}", "fedavg", seed, [], every=5, lines=lines, rounds=32
            )
    plan = """
task = "digits"
label = "ablation"
window = 2
seeds = [0, 1]
thresholds = [0.3, 0.5]
[algorithms."second-one"]
algorithm = "fedavg"
label = "second one"
[algorithms.first]
algorithm = "fedavg"
"""
    (tmp_path / "planned" / "study.toml").write_text(plan)
    material = read([tmp_path / "planned"])
    [study] = material.studies
    assert study.name == "digits, ablation"
    assert list(study.members) == ["second one", "first"]
    assert study.thresholds == (0.3, 0.5)
    score = study_result(study).scores[0]
    # The evaluation after the last round was not due; that after round 31 of 32 is late enough.
    assert score.finals == {0: 0.5, 1: 0.5}
    assert score.arrivals["rolling_mean"] == 6


def test_studies_in_directories_of_one_name_are_two(write_run: Any, tmp_path: Path) -> None:
    for where, top in (("old", 0.2), ("new", 0.6)):
        write_run(f"{where}/s/fedavg/seed-0", "fedavg", 0, [0.1, top])
        plan = 'task = "digits"\nalgorithms = ["fedavg"]\nseeds = [0]\n'
        (tmp_path / where / "s" / "study.toml").write_text(plan)
    material = read([tmp_path / "old" / "s", tmp_path / "new" / "s"])
    assert [max(one.runs[0].metrics.values()) for one in material.studies] == [0.2, 0.6]
    assert material.notes == ()


def test_numbers_without_a_manifest_are_left_out(study: Path) -> None:
    (study / "fedavg" / "seed-0" / "manifest.json").unlink()
    material = read([study])
    assert len(material.studies[0].members["fedavg"]) == 2
    assert "study/fedavg/seed-0 has no manifest.json" in material.notes[0]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: shutil.rmtree(d), "is not a directory"),
        (lambda d: [shutil.rmtree(one) for one in d.iterdir()], "holds no run directory"),
        (lambda d: (d / "fedavg/seed-0/manifest.json").write_text('{"format": 9}'), "has format 9"),
        (lambda d: (d / "fedavg/seed-0/manifest.json").write_text("[1]"), "JSON object"),
        (lambda d: (d / "fedavg/seed-0/spec.toml").write_text("task ="), "is not valid TOML"),
        (lambda d: (d / "fedavg/seed-0/spec.toml").write_text('task = "x"'), "lacks 'algorithm'"),
        (lambda d: (d / "grid.json").write_text("{"), "is not valid JSON"),
        (lambda d: (d / "grid.json").write_text('{"task": "digits"}'), "grid.json lacks"),
        (lambda d: (d / "heterogeneity.json").write_text("{}"), "heterogeneity.json lacks"),
    ],
)
def test_bad_input_is_one_line(study: Path, spoil: Callable[[Path], Any], words: str) -> None:
    spoil(study)
    with pytest.raises(InputError, match=words) as caught:
        read([study])
    assert "\n" not in str(caught.value)
    assert "study" in str(caught.value)


def test_a_run_stopped_when_it_diverged_scores_as_if_it_had_not_been_stopped(
    study: Path, log_line: Line
) -> None:
    log = study / "fedavg" / "seed-0" / "metrics.jsonl"
    lines = [log_line(r, 0.2 if r < 4 else 0.0, diverged=r >= 4) for r in range(1, 11)]
    log.write_text("".join(json.dumps(one) + "\n" for one in lines))
    whole = study_result(read([study]).studies[0])
    log.write_text("".join(json.dumps(one) + "\n" for one in lines[:4]))
    stopped = study_result(read([study]).studies[0])
    for one, other in zip(whole.scores, stopped.scores, strict=True):
        assert one.arrivals == other.arrivals
        assert one.finals == other.finals
        assert one.late == other.late
        assert one.traffic["total"] == other.traffic["total"]
    assert whole.tests == stopped.tests
