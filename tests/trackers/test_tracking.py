"""Trackers receive the log's own numbers once, also after interruptions and failures."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tracked_runs import ProgressLog, Recorder, log_of, toy_task

from fedzmg import trackers
from fedzmg.errors import InputError
from fedzmg.experiment.grids.grid import run_grid
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.specs.files import GridSpec, StudySpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.studies.study import run_study
from fedzmg.simulation import History
from fedzmg.trackers import Tracking, by_point


def train(out: Path, makers: dict[str, Any], shown: Any = None, **options: Any) -> list[History]:
    """Train two seeds in ``out`` with trackers."""
    specs = [RunSpec(task="toy", seed=seed, engine="vectorized") for seed in (0, 1)]
    directories = [out / "fedzmg" / f"seed-{seed}" for seed in (0, 1)]
    with Tracking(makers, out, shown) as progress:
        return run_pack(toy_task(), specs, directories, progress=progress, **options)


def test_trackers_receive_the_numbers_of_the_log(tmp_path: Path) -> None:
    kept: list[Recorder] = []
    train(tmp_path, {"own": partial(Recorder, kept)})
    for seed, recorder in enumerate(kept):
        run = recorder.run
        assert run is not None
        assert (run.name, run.directory) == (f"fedzmg/seed-{seed}", tmp_path / "tracking" / "own")
        assert run.settings["client.momentum"] == 0.9
        assert run.settings["protocol.cohort"] == 3
        assert recorder.ending == "finished"
        for line in log_of(tmp_path / run.name):
            values = recorder.logged[line["round"]]
            assert values["train/loss"] == line["train_loss"]
            assert values["traffic/total_bytes_up"] == line["total_bytes_up"]
            assert values.get("eval/accuracy") == line["metric"]
            assert values.get("eval/loss") == line["loss"]
        assert list(recorder.logged) == [1, 2, 3, 4, 5]


def test_resumed_rounds_keep_their_steps_and_earlier_ones_are_not_repeated(tmp_path: Path) -> None:
    whole: list[Recorder] = []
    train(tmp_path / "whole", {"own": partial(Recorder, whole)})
    kept: list[Recorder] = []
    makers = {"own": partial(Recorder, kept)}
    with pytest.raises(MemoryError):
        train(tmp_path, makers, ProgressLog(stop=3), checkpoint_seconds=0)
    assert [r.ending for r in kept] == ["stopped", "stopped"]
    train(tmp_path, makers)
    first, second = kept[0], kept[2]
    assert second.run is not None
    assert (second.run.name, second.run.done) == ("fedzmg/seed-0", 3)
    assert (list(first.logged), list(second.logged)) == ([1, 2, 3], [4, 5])
    for step, values in {**first.logged, **second.logged}.items():
        expected = whole[0].logged[step]
        assert values == {**expected, "time/seconds": values["time/seconds"]}


@pytest.mark.parametrize("fails_at", [0, 2])
def test_a_failing_tracker_is_reported_once_and_no_round_is_lost(
    tmp_path: Path, fails_at: int
) -> None:
    kept: list[Recorder] = []
    well: list[Recorder] = []
    shown = ProgressLog()
    broken = partial(Recorder, kept, fails_at=fails_at)
    histories = train(tmp_path, {"broken": broken, "well": partial(Recorder, well)}, shown)
    [message] = shown.messages
    assert message.startswith("broken ")
    assert message.endswith(": no such server")
    assert shown.rounds == [1, 2, 3, 4, 5]
    assert [len(h.records) for h in histories] == [5, 5]
    assert [list(r.logged) for r in well] == [[1, 2, 3, 4, 5]] * 2
    assert [r.ending for r in kept] == ([None] if fails_at == 0 else ["stopped", "stopped"])


def test_runs_of_a_study_have_its_names_and_end_when_stopped_early(tmp_path: Path) -> None:
    kept: list[Recorder] = []
    spec = StudySpec.parse(
        {"task": "toy", "seeds": [4], "rounds": 8, "rates": "given", "engine": "vectorized",
         "algorithms": {"with clip": {"algorithm": "fedavg", "client": {"lr": 1e38}}, "fedzmg": {},
                        "light": {"algorithm": "fedzmg", "client": {"momentum": 0.1}}},
         "stop": {"diverged": True}}
    )  # fmt: skip
    with Tracking({"own": partial(Recorder, kept)}, tmp_path / "s") as progress:
        run_study(spec, tmp_path / "s", task=toy_task(), progress=progress)
        names = [r.run.name for r in kept if r.run]
        assert names == ["with-clip/seed-4", "fedzmg/seed-4", "light/seed-4"]
        # A complete study trains nothing.
        run_study(spec, tmp_path / "s", task=toy_task(), progress=progress)
    assert len(kept) == 3
    assert kept[0].run is not None
    assert kept[0].run.project == "s"
    for recorder, name in zip(kept, names, strict=True):
        assert list(recorder.logged) == [line["round"] for line in log_of(tmp_path / "s" / name)]
        assert recorder.ending == "finished"
    assert len(kept[0].logged) < len(kept[1].logged) == 8


def test_trials_of_a_grid_are_named_by_its_axes(tmp_path: Path) -> None:
    kept: list[Recorder] = []
    spec = GridSpec.parse(
        {"task": "toy", "algorithms": ["fedavg"], "rounds": 2, "last": 1, "engine": "vectorized",
         "axes": {"client.lr": [0.1, 10**-2.5]}, "together": 1}
    )  # fmt: skip
    with Tracking({"own": partial(Recorder, kept)}, tmp_path, naming=by_point(spec)) as progress:
        run_grid(spec, tmp_path / "g", task=toy_task(), progress=progress)
    assert [r.run.name for r in kept if r.run] == [
        "fedavg/client.lr=0.00316228/seed-1000", "fedavg/client.lr=0.1/seed-1000",
    ]  # fmt: skip
    for trial, recorder in enumerate(kept):
        # The log has the scores on the tuning examples.
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
