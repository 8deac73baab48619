"""Grids: scored by the last rounds only, resumed bit for bit, and honest about borders."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import Stop, toy

from fedzmg.engine.choose import EngineChoice, EnginePlanner
from fedzmg.errors import InputError
from fedzmg.experiment.grids.grid import choosing, run_grid, warnings
from fedzmg.experiment.grids.score import choose_best, neighbours, read_rows
from fedzmg.experiment.specs.files import GridSpec
from fedzmg.experiment.training import TimeLimitReached
from fedzmg.experiment.verify import verify
from fedzmg.metrics import METRICS
from fedzmg.simulation import Trial, simulate

AXES = {"client.lr": [0.03, 0.3], "server.lr": [0.5, 1.0]}


def spec(*names: str, **changes: Any) -> GridSpec:
    values: dict[str, Any] = {
        "task": "toy", "algorithms": list(names or ["fedavg"]), "rounds": 4, "last": 2,
        "engine": "vectorized", "axes": AXES,
    }  # fmt: skip
    return GridSpec.parse({**values, **changes})


def lines(place: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Lines of a log without times."""
    kept = read_rows(place / "metrics.jsonl")
    return {k: {n: v for n, v in row.items() if n != "seconds"} for k, row in kept.items()}


def test_score_is_the_mean_after_each_of_the_last_rounds(tmp_path: Path) -> None:
    """Against plain simulations that evaluate after every round."""
    data = run_grid(spec("fedadam", seeds=[7, 8]), tmp_path, task=toy())
    task = choosing(toy(), spec())
    task = replace(task, protocol=replace(task.protocol, eval_every=1))
    points = data["algorithms"]["fedadam"]["points"]
    rates = [(client, server) for client in (0.03, 0.3) for server in (0.5, 1.0)]
    assert [tuple(p["options"].values()) for p in points] == rates
    for point, (client, server) in ((points[0], rates[0]), (points[3], rates[3])):
        trials = [Trial.of("fedadam", s, client_lr=client, server_lr=server) for s in (7, 8)]
        found = simulate(task, trials, engine="vectorized")
        expected = [np.mean(history.metrics[-2:]) for history in found]
        assert point["runs"] == pytest.approx(expected, abs=1e-12)
        assert point["score"] == pytest.approx(np.mean(expected), abs=1e-12)
    kept = lines(tmp_path / "fedadam")
    # Round 1 is evaluated by the way; of the others only those that count.
    assert {round_ for _, round_ in kept} == {1, 3, 4}
    assert data["complete"]


@pytest.mark.parametrize(
    ("algorithm", "together", "seconds"),
    [("fedadam", 0, 1e9), ("fedadam", 3, 0.0), ("scaffold", 0, 0.0), ("scaffold", 3, 1e9)],
)
def test_interrupted_grid_goes_on_bit_for_bit(
    tmp_path: Path, algorithm: str, together: int, seconds: float
) -> None:
    plan = spec(algorithm, together=together)
    whole = run_grid(plan, tmp_path / "whole", task=toy())
    for after, pack in ((1, 1), (3, 2 if together else 1)):
        with pytest.raises(MemoryError):
            run_grid(plan, tmp_path / "broken", task=toy(), progress=Stop(after, pack),
                     checkpoint_seconds=seconds)  # fmt: skip
    resumed = run_grid(plan, tmp_path / "broken", task=toy(), checkpoint_seconds=seconds)
    assert resumed == whole
    assert lines(tmp_path / "broken" / algorithm) == lines(tmp_path / "whole" / algorithm)
    left = {p.name for p in (tmp_path / "broken" / algorithm).iterdir()}
    assert left == {"manifest.json", "metrics.jsonl", "scores.json"}


def test_finished_algorithms_are_not_trained_again(tmp_path: Path) -> None:
    with pytest.raises(MemoryError):
        run_grid(spec("fedavg", "fedadam"), tmp_path, task=toy(), progress=Stop(3, pack=2))
    before = (tmp_path / "fedavg" / "metrics.jsonl").read_bytes()
    assert not json.loads((tmp_path / "grid.json").read_text())["complete"]
    data = run_grid(spec("fedavg", "fedadam"), tmp_path, task=toy())
    assert (tmp_path / "fedavg" / "metrics.jsonl").read_bytes() == before
    assert list(data["algorithms"]) == ["fedavg", "fedadam"]


def test_files_that_a_kill_left_are_removed_by_the_next_start(tmp_path: Path) -> None:
    """The plan was not yet renamed, or the scores were written and nothing was cleaned up."""
    out, left = tmp_path / "grid", tmp_path / "grid" / "fedavg"
    out.mkdir()
    (out / ".grid.toml.0123abcd").touch()
    first = run_grid(spec("fedavg"), out, task=toy())
    names = {path.relative_to(out) for path in out.rglob("*")}
    for name in ("memory/trial-0/memory.rows", "checkpoint.safetensors", ".scores.json.0123abcd"):
        (left / name).parent.mkdir(parents=True, exist_ok=True)
        (left / name).touch()
    assert run_grid(spec("fedavg"), out, task=toy()) == first
    assert {path.relative_to(out) for path in out.rglob("*")} == names


def test_the_choice_of_engine_knows_how_much_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share what is compiled, so that it may pay even if it would not for one of them."""
    asked: list[int] = []

    def choice(planner: EnginePlanner, *_: object) -> EngineChoice:
        if isinstance(planner.engine, EngineChoice):
            return planner.engine
        asked.append(planner.trainings)
        return EngineChoice("vectorized", "for the test")

    monkeypatch.setattr(EnginePlanner, "_choose", choice)
    plan = spec("fedavg", "fedadam", "fedzmg", engine="auto", together=2)
    with pytest.raises(MemoryError):
        run_grid(plan, tmp_path, task=toy(), progress=Stop(1, pack=2))
    run_grid(plan, tmp_path, task=toy())
    # Three algorithms of two packs each, wherever it was interrupted; what had begun, packs of the
    # same algorithm among it, goes on with the choice that it began with.
    assert asked == [6, 6, 6]


def test_time_that_is_over_ends_cleanly_and_goes_on(tmp_path: Path) -> None:
    whole = run_grid(spec(), tmp_path / "whole", task=toy())
    done = []
    while len(done) < 10:
        try:
            found = run_grid(spec(), tmp_path / "pieces", task=toy(), max_minutes=1e-9)
            break
        except TimeLimitReached as stopped:
            done.append(stopped.done)
    assert found == whole
    assert done == [1, 2, 3]  # one round each time: nothing is repeated
    with pytest.raises(InputError, match="max-minutes = 0"):
        run_grid(spec(), tmp_path / "x", task=toy(), max_minutes=0)


def test_axes_in_another_order_are_another_grid(tmp_path: Path) -> None:
    """Trials have numbers by that order, so that a search would go on with other points' scores."""
    with pytest.raises(MemoryError):
        run_grid(spec(together=2), tmp_path, task=toy(), progress=Stop(1, pack=2))
    turned = spec(together=2, axes=dict(reversed(AXES.items())))
    with pytest.raises(InputError, match=r"another grid \(order of axes is \['client.lr', 'server"):
        run_grid(turned, tmp_path, task=toy())
    own = [{"f": {"algorithm": "fedavg", "axes": axes}} for axes in (AXES, turned.axes)]
    run_grid(spec(algorithms=own[0]), tmp_path / "own", task=toy())
    with pytest.raises(InputError, match=r"order of f.axes is \['client.lr', 'server.lr'\] there"):
        run_grid(spec(algorithms=own[1]), tmp_path / "own", task=toy())


@pytest.mark.parametrize("damage", [-3, 20])
def test_damaged_checkpoint_is_said_and_results_stay_right(tmp_path: Path, damage: int) -> None:
    plan = spec(rounds=5, last=3)
    whole = run_grid(plan, tmp_path / "whole", task=toy())
    with pytest.raises(MemoryError):
        run_grid(plan, tmp_path / "g", task=toy(), progress=Stop(4), checkpoint_seconds=0)
    path = tmp_path / "g" / "fedavg" / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[damage] ^= 1
    path.write_bytes(content)
    progress = Stop(99)
    assert run_grid(plan, tmp_path / "g", task=toy(), progress=progress) == whole
    assert "cannot be used" in progress.said
    assert "starts again from round 1" in progress.said


def test_diverged_points_score_zero_and_never_win(tmp_path: Path) -> None:
    axes = {"client.lr": [0.1, 1e25], "server.lr": [1.0]}
    data = run_grid(spec(axes=axes), tmp_path, task=toy())
    good, bad = data["algorithms"]["fedavg"]["points"]
    assert (bad["score"], bad["diverged"]) == (0.0, 1)
    assert good["score"] > 0
    assert data["algorithms"]["fedavg"]["best"]["options"]["client.lr"] == 0.1
    nothing = run_grid(spec(axes={"client.lr": [1e24, 1e25]}), tmp_path / "all", task=toy())
    assert nothing["algorithms"]["fedavg"]["best"] is None
    assert warnings(nothing) == ["every point of fedavg diverged; search smaller learning rates"]


@pytest.mark.parametrize("metric", ["accuracy", "auc"])
def test_points_are_also_scored_as_the_paper_chooses(tmp_path: Path, metric: str) -> None:
    """The same numbers as a grid that chooses by all test examples, which trains alike."""
    task = replace(toy(), metric=METRICS[metric])
    asked = {"also_by_test": True, "seeds": [7, 8]}
    both = run_grid(spec(**asked), tmp_path / "both", task=task)
    paper = run_grid(spec(selection="test", seeds=[7, 8]), tmp_path / "paper", task=task)
    plain = run_grid(spec(seeds=[7, 8]), tmp_path / "plain", task=task)
    ours, theirs, alone = (data["algorithms"]["fedavg"] for data in (both, paper, plain))
    assert [p["score"] for p in ours["points"]] == [p["score"] for p in alone["points"]]
    expected = [p["score"] for p in theirs["points"]]
    assert [p["test_score"] for p in ours["points"]] == pytest.approx(expected, abs=1e-12)
    assert ours["best_by_test"]["options"] == theirs["best"]["options"]
    assert ours["best"] == alone["best"]
    assert "best_by_test" not in alone
    # The log does not change by a bit otherwise, also when it is verified.
    for key, line in lines(tmp_path / "both" / "fedavg").items():
        line.pop("test_metric", None)
        assert line == lines(tmp_path / "plain" / "fedavg")[key]
    assert all(one.reproduced for one in verify(tmp_path / "both", rounds=4, task=task))


def test_selection_says_which_examples_choose() -> None:
    task = toy()
    assert task.tune is not None
    assert choosing(task, spec()).test is task.tune
    both = choosing(task, spec(selection="test")).test
    assert both.size == task.tune.size + task.test.size
    assert torch.equal(both.x, torch.cat([task.tune.x, task.test.x]))
    with pytest.raises(InputError, match="tuning examples"):
        choosing(replace(task, tune=None), spec())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 7}, "rounds is 4 there and 7 here"),
        ({"axes": {"client.lr": [1.0]}}, r"axes\.client\.lr is \[0\.03, 0\.3\] there"),
    ],
)
def test_directory_of_another_grid_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    run_grid(spec(), tmp_path / "g", task=toy())
    with pytest.raises(InputError, match=message):
        run_grid(spec(**changes), tmp_path / "g", task=toy())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match=r"is not empty and holds no grid\.toml"):
        run_grid(spec(), tmp_path / "full", task=toy())


def test_other_data_in_the_same_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemoryError):
        run_grid(spec(), tmp_path, task=toy(), progress=Stop(3))
    with pytest.raises(InputError, match="other data than 'toy'"):
        run_grid(spec(), tmp_path, task=toy(seed=1))
    # One that is finished is only read, and its scores are of other data all the same.
    run_grid(spec(), tmp_path, task=toy())
    with pytest.raises(InputError, match="other data than 'toy'"):
        run_grid(spec(), tmp_path, task=toy(seed=1))


@pytest.mark.parametrize("write", ["append_log", "run_directory.change_manifest"])
def test_full_disk_is_one_line_and_the_grid_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"fedzmg.experiment.grids.search.{write}", full)
        with pytest.raises(InputError, match=r"cannot write to .*: No space left on device"):
            run_grid(spec(), tmp_path / "g", task=toy())
    whole = run_grid(spec(), tmp_path / "whole", task=toy())
    assert run_grid(spec(), tmp_path / "g", task=toy()) == whole


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(shapes, st.data())
def test_neighbours_are_one_step_away_along_one_axis(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    point = data.draw(st.integers(0, size - 1))
    where = np.array(np.unravel_index(np.arange(size), shape)).T
    expected = {i for i in range(size) if np.abs(where[i] - where[point]).sum() == 1}
    assert set(neighbours(shape, point)) == expected


@given(st.integers(1, 12), st.data())
def test_best_is_never_beaten_nor_diverged(size: int, data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.floats(0, 1), min_size=size, max_size=size))
    lost = data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    best = choose_best([size], scores, lost)
    alive = [s for s, gone in zip(scores, lost, strict=True) if not gone]
    if alive:
        assert best is not None
        assert not lost[best]
        assert scores[best] == max(alive)
        worst = choose_best([size], scores, lost, higher=False)
        assert worst is not None
        assert scores[worst] == min(alive)
