"""What trackers are told: the log's own numbers, once, whatever is interrupted or fails."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tracked_runs import Heard, Recorder, federation, log_of

from fedzmg import trackers
from fedzmg.errors import InputError
from fedzmg.experiment.grids.grid import run_grid
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.specs.study import StudySpec
from fedzmg.experiment.studies.study import run_study
from fedzmg.trackers import Tracking, by_point


def specs() -> list[RunSpec]:
    return [RunSpec(task="toy", seed=seed, engine="vectorized") for seed in (0, 1)]


def places(out: Path) -> list[Path]:
    return [out / "fedzmg" / f"seed-{seed}" for seed in (0, 1)]


def test_trackers_are_told_what_the_log_says(tmp_path: Path) -> None:
    kept: list[Recorder] = []
    with Tracking({"own": partial(Recorder, kept)}, tmp_path) as progress:
        run_pack(federation(), specs(), places(tmp_path), progress=progress)
    assert [r.run.name for r in kept if r.run] == ["fedzmg/seed-0", "fedzmg/seed-1"]
    for recorder, place in zip(kept, places(tmp_path), strict=True):
        assert recorder.run is not None
        assert recorder.run.place == tmp_path / "tracking" / "own"
        assert recorder.run.settings["client.momentum"] == 0.9
        assert recorder.run.settings["protocol.cohort"] == 3
        assert recorder.ending == "finished"
        for line in log_of(place):
            values = recorder.logged[line["round"]]
            assert values["train/loss"] == line["train_loss"]
            assert values["traffic/total_bytes_up"] == line["total_bytes_up"]
            assert values.get("eval/accuracy") == line["metric"]
            assert values.get("eval/loss") == line["loss"]
        assert list(recorder.logged) == [1, 2, 3, 4, 5]


def test_resumed_rounds_keep_their_steps_and_earlier_ones_are_not_repeated(tmp_path: Path) -> None:
    whole: list[Recorder] = []
    with Tracking({"own": partial(Recorder, whole)}, tmp_path / "whole") as progress:
        run_pack(federation(), specs(), progress=progress)
    kept: list[Recorder] = []
    with (
        pytest.raises(MemoryError),
        Tracking({"own": partial(Recorder, kept)}, tmp_path, Heard(stop=3)) as progress,
    ):
        run_pack(federation(), specs(), places(tmp_path), progress=progress, checkpoint_seconds=0)
    assert [r.ending for r in kept] == ["stopped", "stopped"]
    with Tracking({"own": partial(Recorder, kept)}, tmp_path) as progress:
        run_pack(federation(), specs(), places(tmp_path), progress=progress)
    first, second = kept[0], kept[2]
    assert second.run is not None
    assert (second.run.name, second.run.done) == ("fedzmg/seed-0", 3)
    assert (list(first.logged), list(second.logged)) == ([1, 2, 3], [4, 5])
    for step, values in {**first.logged, **second.logged}.items():
        expected = whole[0].logged[step]
        assert values == {**expected, "time/seconds": values["time/seconds"]}


@pytest.mark.parametrize("fails_at", [0, 2])
def test_tracker_that_fails_is_said_once_and_no_round_is_lost(
    tmp_path: Path, fails_at: int
) -> None:
    kept: list[Recorder] = []
    well: list[Recorder] = []
    heard = Heard()
    makers: dict[str, Any] = {
        "broken": partial(Recorder, kept, fails_at=fails_at),
        "well": partial(Recorder, well),
    }
    with Tracking(makers, tmp_path, heard) as progress:
        histories = run_pack(federation(), specs(), places(tmp_path), progress=progress)
        run_pack(
            federation(), [RunSpec(task="toy", seed=2, engine="vectorized")], progress=progress
        )
    assert heard.said == ["broken is switched off, the training goes on: no such server"]
    assert heard.rounds == [1, 2, 3, 4, 5] * 2
    assert [len(h.records) for h in histories] == [5, 5]
    assert [list(r.logged) for r in well] == [[1, 2, 3, 4, 5]] * 3
    # What had begun is told that it is over.
    assert [r.ending for r in kept] == ([None] if fails_at == 0 else ["stopped", "stopped"])


def test_study_calls_runs_by_its_own_names(tmp_path: Path) -> None:
    kept: list[Recorder] = []
    spec = StudySpec.parse(
        {"task": "toy", "seeds": [4], "rounds": 1, "rates": "given", "engine": "vectorized",
         "algorithms": {"with clip": {"algorithm": "fedavg"}, "fedzmg": {},
                        "light": {"algorithm": "fedzmg", "client": {"momentum": 0.1}}}}
    )  # fmt: skip
    with Tracking({"own": partial(Recorder, kept)}, tmp_path / "s") as progress:
        run_study(spec, tmp_path / "s", task=federation(), progress=progress)
        names = [r.run.name for r in kept if r.run]
        assert names == ["with-clip/seed-4", "fedzmg/seed-4", "light/seed-4"]
        # A study that is complete trains nothing, so there is nothing to tell.
        run_study(spec, tmp_path / "s", task=federation(), progress=progress)
    assert len(kept) == 3
    assert kept[0].run is not None
    assert kept[0].run.project == "s"


def test_trials_of_a_grid_are_told_apart_by_what_it_varies(tmp_path: Path) -> None:
    kept: list[Recorder] = []
    spec = GridSpec.parse(
        {"task": "toy", "algorithms": ["fedavg"], "rounds": 2, "last": 1, "engine": "vectorized",
         "axes": {"client.lr": [0.1, 10**-2.5]}, "together": 1}
    )  # fmt: skip
    with Tracking({"own": partial(Recorder, kept)}, tmp_path, naming=by_point(spec)) as progress:
        run_grid(spec, tmp_path / "g", task=federation(), progress=progress)
    assert [r.run.name for r in kept if r.run] == [
        "fedavg/client.lr=0.00316228/seed-1000", "fedavg/client.lr=0.1/seed-1000",
    ]  # fmt: skip
    for trial, recorder in enumerate(kept):
        # Scores are taken on examples that no report uses; the log has them, too.
        [last] = [
            r for r in log_of(tmp_path / "g" / "fedavg") if (r["trial"], r["round"]) == (trial, 2)
        ]
        assert recorder.logged[2]["eval/accuracy"] == last["metric"]


def test_unknown_and_missing_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="did you mean 'tensorboard'"):
        trackers.named("tensorbord")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in trackers.TRACKERS:
        with pytest.raises(InputError, match=rf"pip install 'fedzmg\[{name}\]'"):
            trackers.named([name])


def test_trial_that_is_stopped_early_is_told_no_further(tmp_path: Path) -> None:
    kept: list[Recorder] = []
    spec = StudySpec.parse(
        {"task": "toy", "seeds": [0, 1], "rounds": 8, "rates": "given", "engine": "vectorized",
         "algorithms": {"fedavg": {"client": {"lr": 1e38}}}, "stop": {"diverged": True}}
    )  # fmt: skip
    with Tracking({"own": partial(Recorder, kept)}, tmp_path / "s") as progress:
        run_study(spec, tmp_path / "s", task=federation(), progress=progress)
    for recorder, seed in zip(kept, (0, 1), strict=True):
        lines = log_of(tmp_path / "s" / "fedavg" / f"seed-{seed}")
        assert list(recorder.logged) == [line["round"] for line in lines]
        assert len(lines) < 8
        assert recorder.ending == "finished"
