"""Early stopping: divergence changes no choice, halving keeps the best, decisions are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toys import Stop, bare, toy

from fedzmg.errors import InputError
from fedzmg.experiment.grids.grid import run_grid, warnings
from fedzmg.experiment.grids.score import read_rows
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.run_directory import RunDirectory
from fedzmg.experiment.specs.files import GridSpec, StudySpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.studies.study import run_study
from fedzmg.experiment.training import Stopped, write_stop
from fedzmg.simulation import RoundReport
from fedzmg.storage.formats import log_lines

AXES = {"client.lr": [0.03, 0.3, 1e8]}


def grid(**changes: Any) -> GridSpec:
    values: dict[str, Any] = {
        "task": "toy", "algorithms": ["fedavg"], "rounds": 8, "last": 4, "engine": "vectorized",
        "axes": AXES,
    }  # fmt: skip
    return GridSpec.parse({**values, **changes})


def unstopped(data: dict[str, Any]) -> dict[str, Any]:
    """A grid's result without what only one that stops has."""
    entry = dict(data["algorithms"]["fedavg"])
    entry.pop("stopped", None)
    entry["points"] = [{k: v for k, v in p.items() if k != "stopped"} for p in entry["points"]]
    return entry


def test_diverged_trials_are_trained_no_further_and_no_score_moves(tmp_path: Path) -> None:
    whole = run_grid(grid(), tmp_path / "whole", task=toy())
    data = run_grid(grid(stop={"diverged": True}), tmp_path / "s", task=toy())
    assert unstopped(data) == unstopped(whole)
    assert data["stop"]["diverged"]
    assert "stop" not in whole
    [line] = log_lines(tmp_path / "s" / "fedavg" / "stopped.jsonl", dict)
    assert (line["trial"], line["round"], line["why"]) == (2, 5, "diverged")
    found = data["algorithms"]["fedavg"]["stopped"]
    assert found == {"diverged": 1, "rounds": 21, "rounds_asked": 24}
    assert data["algorithms"]["fedavg"]["points"][2]["stopped"][0]["round"] == 5
    # Nothing was logged of it afterwards, and the pack that is left is written down.
    rows = read_rows(tmp_path / "s" / "fedavg" / "metrics.jsonl")
    assert max(round_ for trial, round_ in rows if trial == 2) <= 5
    manifest = json.loads((tmp_path / "s" / "fedavg" / "manifest.json").read_text())
    assert manifest["pack_changes"] == [{"pack": 0, "round": 5, "trials": [0, 1]}]


def test_halving_trains_the_best_points_of_the_first_seed(tmp_path: Path) -> None:
    """Points that continue have the very scores of a whole grid, under every seed."""
    plan = grid(axes={"client.lr": [1e-9, 0.01, 0.05, 0.1, 0.3]}, seeds=[7, 8], last=2)
    whole = run_grid(plan, tmp_path / "whole", task=toy())["algorithms"]["fedavg"]
    halved = plan.with_settings(
        {"search.halving": [[2, 3], [5, 2]], "eval_every": 1, "thresholds": [0.2, 0.99]}
    )
    data = run_grid(halved, tmp_path / "s", task=toy())
    entry = data["algorithms"]["fedavg"]
    lines = log_lines(tmp_path / "s" / "fedavg" / "stopped.jsonl", dict)
    assert sorted(line["round"] for line in lines) == [0, 0, 0, 2, 2, 5]
    assert all((line["round"] == 0) == (line["seed"] == 8) for line in lines)
    kept = [p for p in entry["points"] if p["score"] is not None]
    assert len(kept) == 2
    assert all(p in whole["points"] for p in kept)
    assert entry["best"]["score"] == max(p["score"] for p in kept)
    asked = {"rounds": halved.trial_rounds("fedavg"), "rounds_asked": 80}
    assert entry["stopped"] == {"halving": 6, **asked}
    assert "might have won" in warnings(data)[-1]
    # By hand, from the log: the scores after round 2 under the first seed, and the first to 0.2.
    rows = read_rows(tmp_path / "s" / "fedavg" / "metrics.jsonl")
    early = [(rows[t, 1]["metric"] + rows[t, 2]["metric"]) / 2 for t in range(0, 10, 2)]
    gone = sorted(range(5), key=lambda p: -early[p])[3:]
    assert {line["trial"] // 2 for line in lines if line["round"] == 2} == set(gone)
    assert [line["score"] for line in lines if line["round"] == 2] == [early[p] for p in gone]
    curves = {p: [rows[2 * p, r]["metric"] for r in range(1, 9) if (2 * p, r) in rows]
              for p in range(5)}  # fmt: skip
    reached = {
        p: next((i + 4 for i in range(len(c) - 3) if sum(c[i : i + 4]) >= 0.8), 99)
        for p, c in curves.items()
    }
    first = min(reached, key=lambda p: reached[p])
    options = whole["points"][first]["options"]
    assert entry["soonest"] == [
        {"threshold": 0.2, "options": options, "round": reached[first]}, {"threshold": 0.99},
    ]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "seconds"), [("fedavg", 0.0), ("scaffold", 1e9)])
def test_decisions_outlive_a_crash(tmp_path: Path, algorithm: str, seconds: float) -> None:
    axes = {"client.lr": [1e-9, 0.05, 0.1, 1e25]}
    halving = {"search.halving": [[4, 2]], "stop.diverged": True, "seeds": [1, 2]}
    plan = grid(algorithms=[algorithm], axes=axes).with_settings(halving)
    whole = run_grid(plan, tmp_path / "whole", task=toy())
    for after, pack in ((4, 1), (6, 1), (3, 2)):
        with pytest.raises(MemoryError):
            run_grid(plan, tmp_path / "s", task=toy(), progress=Stop(after, pack=pack),
                     checkpoint_seconds=seconds)  # fmt: skip
    assert run_grid(plan, tmp_path / "s", task=toy()) == whole
    lines = [log_lines(tmp_path / n / algorithm / "stopped.jsonl", dict) for n in ("s", "whole")]
    assert lines[0] == lines[1]
    assert {line["why"] for line in lines[0]} == {"diverged", "halving"}
    assert {line["seed"] for line in lines[0] if line["client.lr"] == 1e25} == {1, 2}


def study(**changes: Any) -> StudySpec:
    given: dict[str, Any] = {
        "task": "toy", "seeds": [3, 5], "rounds": 8, "eval_every": 2, "rates": "given",
        "algorithms": {"good": {"algorithm": "scaffold"},
                       "bad": {"algorithm": "scaffold", "client": {"lr": 1e8}}},
        "engine": "vectorized", "thresholds": [0.2],
    }  # fmt: skip
    return StudySpec.parse({**given, **changes})


def test_study_that_stops_has_the_same_scores(tmp_path: Path) -> None:
    whole = run_study(study(), tmp_path / "whole", task=toy()).as_dict()
    stops = study(stop={"diverged": True})
    found = run_study(stops, tmp_path / "s", task=toy()).as_dict()
    assert found["algorithms"]["bad"]["stopped"] == [3, 3]
    assert found["algorithms"]["good"]["stopped"] == [None, None]
    for key in ("curves", "thresholds", "tests"):
        assert json.dumps(found[key]) == json.dumps(whole[key])
    for name in ("good", "bad"):
        assert found["algorithms"][name]["final"] == whole["algorithms"][name]["final"]
    # Indices 0, 2, 4, 6 are due, and 7 ends eight rounds.
    assert len(found["curves"]["bad"]["runs"][0]) == 5
    run = tmp_path / "s" / "bad" / "seed-5"
    assert [r.round for r in RunDirectory(run).records()] == [1, 2, 3]
    kept = json.loads((run / "stopped.json").read_text())
    assert (kept["round"], kept["why"], kept["words"]) == (3, "diverged", "diverged in round 3")
    assert not (tmp_path / "s" / "good" / "seed-5" / "stopped.json").exists()
    before = (run / "metrics.jsonl").read_bytes()
    again = run_study(stops, tmp_path / "s", task=toy()).as_dict()
    assert again == found
    assert (run / "metrics.jsonl").read_bytes() == before


def test_run_that_goes_on_beside_one_that_stopped_does_not_notice(tmp_path: Path) -> None:
    """Asked by a callable; after a crash the decision takes effect after the same round."""
    specs = [
        RunSpec(task="toy", algorithm="scaffold", seed=seed, engine="vectorized",
                protocol={"rounds": 6})
        for seed in (3, 5, 7)
    ]  # fmt: skip
    whole = [tmp_path / "whole" / str(s.seed) for s in specs]
    places = [tmp_path / "s" / str(s.seed) for s in specs]
    run_pack(toy(), specs, whole)

    def ask(report: RoundReport) -> dict[int, Stopped]:
        decision = Stopped(report.round, "halving", "as an example")
        return {1: decision} if report.round == 4 else {}

    with pytest.raises(MemoryError):
        run_pack(toy(), specs, places, progress=Stop(3), stop=ask, checkpoint_seconds=1e9)
    # As if the process had ended between the line and the checkpoint.
    write_stop(places[1], Stopped(4, "halving", "as an example"))
    first = run_pack(toy(), specs, places, checkpoint_seconds=1e9)
    assert [len(h.records) for h in first] == [6, 4, 6]
    for i, (place, other) in enumerate(zip(places, whole, strict=True)):
        kept, expected = (bare(RunDirectory(run).records()) for run in (place, other))
        assert kept == expected[: 4 if i == 1 else 6]
    facts = RunDirectory(places[2]).manifest()
    assert facts["pack_changes"] == [{"round": 4, "pack": ["scaffold/seed-3", "scaffold/seed-7"]}]
    # Its last checkpoint is the one after its last round, to be read as any other.
    last = [RunDirectory(place).checkpoint() for place in places]
    assert [found and found.round for found in last] == [6, 4, 6]
    again = run_pack(toy(), specs, places)
    assert [len(h.records) for h in again] == [6, 4, 6]
    (places[1] / "stopped.json").write_text("{}")
    with pytest.raises(InputError, match=r"stopped\.json has format"):
        run_pack(toy(), specs, places)
