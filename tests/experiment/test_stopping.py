"""Early stopping: provable rules change no choice, heuristics are named, decisions are kept."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import Stop, bare, toy

from fedzmg.errors import InputError
from fedzmg.evaluation import Metric
from fedzmg.experiment import run_directory
from fedzmg.experiment.grids.grid import run_grid, warnings
from fedzmg.experiment.grids.score import (
    Known,
    Rule,
    Stops,
    choose_best,
    dominated,
    neighbours,
    read_lines,
    read_rows,
    unsettled,
)
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.run_directory import RunDirectory
from fedzmg.experiment.specs.files import GridSpec, StudySpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.studies.study import run_study
from fedzmg.experiment.training import Stopped, write_stop
from fedzmg.simulation import RoundReport

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


values = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1))


@given(st.integers(2, 6), st.integers(1, 2), st.integers(1, 4), st.booleans(), st.data())
def test_what_cannot_win_would_not_have_won(
    size: int, seeds: int, last: int, higher: bool, data: st.DataObject
) -> None:
    """Any evaluations and divergences, seen one after another: the choice is that of the whole.

    A trial that diverges keeps its evaluations until then, and the best possible value may be
    believed to be lower than it is.
    """
    curves = [
        [data.draw(st.lists(values, min_size=last, max_size=last)) for _ in range(seeds)]
        for _ in range(size)
    ]
    ends = [[data.draw(st.integers(1, 2 * last)) for _ in range(seeds)] for _ in range(size)]
    rule = Rule(last, data.draw(st.sampled_from([0.5, 1.0] if higher else [0.0, 0.3])), higher)

    def seen(point: int, count: int) -> list[Known]:
        return [Known(curves[point][s][:count], lost=ends[point][s] <= count) for s in range(seeds)]

    def choice(points: list[int]) -> int | None:
        scores: list[float | None] = [None] * size
        for p in points:
            each = [rule.worst if k.lost else statistics.fmean(k.values) for k in seen(p, last)]
            scores[p] = statistics.fmean(each)
        lost = [sum(k.lost for k in seen(p, last)) for p in range(size)]
        return choose_best([size], scores, lost, higher=higher)

    stopped: dict[int, int] = {}
    for count in range(1, last):
        known = [seen(p, stopped.get(p, count)) for p in range(size)]
        stopped |= dict.fromkeys(dominated(rule, known, stopped), count)
    known = [seen(p, stopped.get(p, last)) for p in range(size)]
    near = {p: neighbours([size], p) for p in range(size)}
    for point in unsettled(rule, known, list(stopped), (), near):
        del stopped[point]
    assert choice([p for p in range(size) if p not in stopped]) == choice(list(range(size)))


def test_bounds_by_hand() -> None:
    rule = Rule(last=4, best=1.0)
    # After three of four: 0.15 + 1 is less than 1.5 for certain, 0.6 + 1 is not.
    known = [[Known([0.5] * 3)], [Known([0.05] * 3)], [Known([0.2] * 3)]]
    assert dominated(rule, known, ()) == {1: (True, pytest.approx(1.15 / 4))}
    # With a closer bound, which a user has to say, the other one goes too.
    assert set(dominated(rule._replace(best=0.6), known, ())) == {1, 2}
    # Not if the bound is broken.
    assert dominated(rule._replace(best=0.4), known, ()) == {}
    # One that lost a seed never wins against one that lost none.
    both = [[Known([0.9]), Known([], lost=True)], [Known([0.0]), Known([0.0])]]
    assert set(dominated(rule, both, ())) == {0}
    # A loss has no bound from above, so only what is finished beats anything.
    loss = Rule(last=2, best=0.0, higher=False)
    assert dominated(loss, [[Known([0.1])], [Known([9.0])]], ()) == {}
    assert set(dominated(loss, [[Known([0.1, 0.1])], [Known([9.0])]], ())) == {1}


def test_diverged_trials_are_trained_no_further_and_no_score_moves(tmp_path: Path) -> None:
    whole = run_grid(grid(), tmp_path / "whole", task=toy())
    data = run_grid(grid(stop={"diverged": True}), tmp_path / "s", task=toy())
    assert unstopped(data) == unstopped(whole)
    assert data["stop"]["diverged"]
    assert "stop" not in whole
    [line] = read_lines(tmp_path / "s" / "fedavg" / "stopped.jsonl")
    found = line["trial"], line["round"], line["why"], line["heuristic"], line["client.lr"]
    assert found == (2, 5, "diverged", False, 1e8)
    found = data["algorithms"]["fedavg"]["stopped"]
    assert found == {"diverged": 1, "rounds": 21, "rounds_asked": 24}
    assert data["algorithms"]["fedavg"]["points"][2]["stopped"][0]["round"] == 5
    # Nothing was logged of it afterwards, and the pack that is left is written down.
    rows = read_rows(tmp_path / "s" / "fedavg" / "metrics.jsonl")
    assert max(round_ for trial, round_ in rows if trial == 2) <= 5
    manifest = json.loads((tmp_path / "s" / "fedavg" / "manifest.json").read_text())
    assert manifest["pack_changes"] == [{"pack": 0, "round": 5, "trials": [0, 1]}]


def test_what_cannot_win_is_stopped_and_the_choice_stays(tmp_path: Path) -> None:
    plan = grid(axes={"client.lr": [0.1, 1.0, 3.0]}, together=1)
    whole = run_grid(plan, tmp_path / "whole", task=toy())
    scores = [p["score"] for p in whole["algorithms"]["fedavg"]["points"]]
    rows = read_rows(tmp_path / "whole" / "fedavg" / "metrics.jsonl")
    top = max(row["metric"] for (_, round_), row in rows.items() if round_ > 4)
    closer = plan.with_settings({"stop.cannot_win": True, "stop.best_possible": top})
    data = run_grid(closer, tmp_path / "s", task=toy())
    best = data["algorithms"]["fedavg"]["best"]
    assert best["options"] == whole["algorithms"]["fedavg"]["best"]["options"]
    lines = read_lines(tmp_path / "s" / "fedavg" / "stopped.jsonl")
    assert lines
    for line in lines:
        assert line["why"] == "cannot_win"
        assert not line["heuristic"]
        assert 4 < line["round"] < 8
        assert scores[line["trial"]] <= line["at_most"] < max(scores)
        point = data["algorithms"]["fedavg"]["points"][line["trial"]]
        assert (point["score"], point["runs"]) == (None, [None])


def test_what_might_win_after_all_is_trained_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when that is interrupted."""
    plan = grid(axes={"client.lr": [0.05, 0.3, 1.0]}, stop={"cannot_win": True}, algorithms=["mfl"])
    whole = run_grid(plan, tmp_path / "whole", task=toy())["algorithms"]["mfl"]
    dominated, doubted = Stops.dominated, [2]
    early = {2: Stopped(3, "cannot_win", "as an example", 0.1)}
    monkeypatch.setattr(Stops, "dominated", lambda s, rows, pack, round_, lost: (
        early if round_ == 3 else dominated(s, rows, pack, round_, lost)))  # fmt: skip
    monkeypatch.setattr(Stops, "unsettled", lambda s, rows: [t for t in doubted if t in s.now])
    with pytest.raises(MemoryError):
        run_grid(plan, tmp_path / "s", task=toy(), progress=Stop(6, pack=2), checkpoint_seconds=0)
    progress = Stop(99)
    data = run_grid(plan, tmp_path / "s", task=toy(), progress=progress)["algorithms"]["mfl"]
    assert "1 stopped trials might win after all" in progress.said
    assert progress.packs == 1  # what was finished before is not trained again
    assert data["points"][2] == whole["points"][2]
    lines = read_lines(tmp_path / "s" / "mfl" / "stopped.jsonl")
    assert [line.get("revoked", False) for line in lines if line["trial"] == 2] == [False, True]


def test_changes_of_a_pack_outlive_those_of_a_revoked_one(tmp_path: Path) -> None:
    changes = [
        {"pack": 0, "round": 5, "trials": [0, 1]},
        {"pack": 0, "revoked": True, "round": 3, "trials": [2]},
        {"pack": 4, "round": 2, "trials": [4]},
        {"pack": 0, "revoked": True, "round": 2, "trials": []},
    ]
    (tmp_path / "manifest.json").write_text("{}")
    for change in changes:
        run_directory.note_change(tmp_path, "pack_changes", change)
    kept = json.loads((tmp_path / "manifest.json").read_text())["pack_changes"]
    assert kept == [changes[0], changes[2], changes[3]]


def test_rounds_to_be_repeated_are_judged_as_they_were(tmp_path: Path) -> None:
    """A log may know more than the pack does that goes on from its checkpoint."""
    plan = grid(axes={"client.lr": [0.1, 0.2]}, rounds=4, last=4, stop={"cannot_win": True})
    stops = Stops(plan, "fedavg", toy().metric, tmp_path / "stopped.jsonl")
    rows = {
        (trial, round_): {"metric": metric, "diverged": False}
        for trial, metric in ((0, 0.9), (1, 0.1))
        for round_ in range(1, 5)
    }
    # After three rounds of 0.9 there are 0.675 for certain; three of 0.1 can come to 0.325 yet.
    found = {r: stops.dominated(rows, [0, 1], r, ()) for r in (1, 2, 3)}
    assert [list(found[r]) for r in (1, 2, 3)] == [[], [], [1]]
    assert found[3][1].at_most == pytest.approx(0.325)
    # Of other packs, which are finished, everything counts: 0.9 is certain.
    assert list(stops.dominated(rows, [1], 1, ())) == [1]


def test_metric_without_a_known_bound_has_to_say_it(tmp_path: Path) -> None:
    task = toy()
    other = replace(task, metric=Metric("skill", task.metric.function))
    with pytest.raises(InputError, match=r"stop\.best_possible.*'skill'"):
        run_grid(grid(stop={"cannot_win": True}), tmp_path, task=other)


def test_halving_is_a_heuristic_and_says_so(tmp_path: Path) -> None:
    plan = grid(axes={"client.lr": [1e-9, 0.01, 0.05, 0.1, 0.3]})
    whole = run_grid(plan, tmp_path / "whole", task=toy())["algorithms"]["fedavg"]
    halved = plan.with_settings({"stop.heuristic_halving": [2, 5]})
    data = run_grid(halved, tmp_path / "s", task=toy())
    entry = data["algorithms"]["fedavg"]
    lines = read_lines(tmp_path / "s" / "fedavg" / "stopped.jsonl")
    assert [line["round"] for line in lines] == [2, 2, 5]
    assert all(line["heuristic"] and line["why"] == "halving" for line in lines)
    assert all("heuristic: not in the better half" in line["words"] for line in lines)
    assert "one of them might have won" in warnings(data)[-1]
    # Those that went on have the very scores that they would have had.
    kept = [p for p in entry["points"] if p["score"] is not None]
    assert len(kept) == 2
    assert all(p in whole["points"] for p in kept)
    assert entry["best"]["score"] == max(p["score"] for p in kept)
    assert entry["stopped"] == {"halving": 3, "rounds": 40 - 6 - 6 - 3, "rounds_asked": 40}


@pytest.mark.parametrize(("algorithm", "seconds"), [("fedavg", 0.0), ("scaffold", 1e9)])
def test_decisions_outlive_a_crash(tmp_path: Path, algorithm: str, seconds: float) -> None:
    plan = grid(algorithms=[algorithm], axes={"client.lr": [1e-9, 0.05, 0.1, 1e25]}).with_settings(
        {"stop.heuristic_halving": [4], "stop.diverged": True}
    )
    whole = run_grid(plan, tmp_path / "whole", task=toy())
    for after in (4, 6):
        with pytest.raises(MemoryError):
            run_grid(plan, tmp_path / "s", task=toy(), progress=Stop(after),
                     checkpoint_seconds=seconds)  # fmt: skip
    assert run_grid(plan, tmp_path / "s", task=toy()) == whole
    lines = [read_lines(tmp_path / n / algorithm / "stopped.jsonl") for n in ("s", "whole")]
    assert lines[0] == lines[1]
    assert {line["why"] for line in lines[0]} == {"diverged", "halving"}


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
