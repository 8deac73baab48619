"""Runs on disk: resumed equals uninterrupted, wherever the interruption falls."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import Metric, Task, compare
from fedzmg.errors import InputError, Interrupted
from fedzmg.experiment.runs import run as running
from fedzmg.experiment.runs import training
from fedzmg.experiment.runs.export import export_model
from fedzmg.experiment.runs.run import run_pack
from fedzmg.experiment.runs.store import RunDirectory
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.work.progress import Silent
from fedzmg.models import FunctionalModel
from fedzmg.simulation import History, RoundReport


def task(seed: int = 0) -> Task:
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(6), [4, 9, 6, 3, 8, 5])
    x, y = rng.normal(size=(len(owner), 5)), rng.integers(0, 3, len(owner))
    return Task.from_arrays(
        nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), x, y, owner,
        test=(x, y), name="toy", rounds=6, cohort=3, batch_size=4, epochs=2, eval_every=2,
    )  # fmt: skip


def specs(algorithm: str = "fedzmg", **changes: Any) -> list[RunSpec]:
    return [
        RunSpec(task="toy", algorithm=algorithm, seed=seed, engine="vectorized", **changes)
        for seed in (0, 1)
    ]


class Stop(Silent):
    """Raises an error after some rounds: Ctrl-C, or a crash."""

    def __init__(self, after: int, error: type[BaseException]) -> None:
        self.after, self.error = after, error

    def advance(self, report: RoundReport) -> None:
        if report.round == self.after:
            raise self.error


def places(root: Path) -> list[Path]:
    return [root / "seed-0", root / "seed-1"]


def same(one: list[History], other: list[History]) -> bool:
    return all(
        [r._replace(seconds=0) for r in a.records] == [r._replace(seconds=0) for r in b.records]
        and all(torch.equal(a.params[n], b.params[n]) for n in a.params)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("after", [1, 3, 5])
@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_interrupted_run_goes_on_bit_for_bit(
    tmp_path: Path, after: int, error: type[BaseException], seconds: float
) -> None:
    whole = run_pack(task(), specs())
    with pytest.raises(Interrupted if error is KeyboardInterrupt else error):
        run_pack(task(), specs(), places(tmp_path), progress=Stop(after, error),
                 checkpoint_seconds=seconds)  # fmt: skip
    resumed = run_pack(task(), specs(), places(tmp_path))
    assert same(whole, resumed)
    read_again = run_pack(task(), specs(), places(tmp_path))
    assert same(whole, read_again)


@pytest.mark.parametrize("algorithm", ["scaffold", "adabest", "feddyn"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_client_memory_goes_on_bit_for_bit(
    tmp_path: Path, algorithm: str, error: type[BaseException], seconds: float
) -> None:
    whole = run_pack(task(), specs(algorithm))
    with pytest.raises((Interrupted, MemoryError)):
        run_pack(task(), specs(algorithm), places(tmp_path), progress=Stop(4, error),
                 checkpoint_seconds=seconds)  # fmt: skip
    resumed = run_pack(task(), specs(algorithm), places(tmp_path))
    assert same(whole, resumed)
    assert (tmp_path / "seed-0" / "memory.rows").exists()


def test_lost_memory_is_said(tmp_path: Path) -> None:
    with pytest.raises(MemoryError):
        run_pack(task(), specs("scaffold"), places(tmp_path), progress=Stop(4, MemoryError),
                 checkpoint_seconds=0)  # fmt: skip
    (tmp_path / "seed-1" / "memory.stamps").unlink()
    with pytest.raises(InputError, match=r"memory\.stamps is missing"):
        run_pack(task(), specs("scaffold"), places(tmp_path))


def test_ctrl_c_waits_for_the_round_and_keeps_it(tmp_path: Path) -> None:
    class Press(Silent):
        said = ""

        def advance(self, report: RoundReport) -> None:
            if report.round == 3:
                signal.raise_signal(signal.SIGINT)

        def say(self, text: str) -> None:
            self.said = text

    progress = Press()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as caught:
        run_pack(task(), specs("scaffold"), places(tmp_path), progress=progress)
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopping after this round" in progress.said
    # Pressed after round 3 was shown: nothing was running, so it stops right there.
    assert caught.value.done in (3, 4)
    assert str(caught.value) == (
        f"interrupted after round {caught.value.done} of 6; nothing is lost, make the same call "
        "again to go on"
    )
    assert same(
        run_pack(task(), specs("scaffold")), run_pack(task(), specs("scaffold"), places(tmp_path))
    )


def test_full_disk_is_one_line_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_pack(task(), specs())

    def full(self: RunDirectory, checkpoint: object, before: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save", full)
        with pytest.raises(InputError, match=r"cannot write to .*: No space left on device"):
            run_pack(task(), specs(), places(tmp_path), checkpoint_seconds=0)
    assert same(whole, run_pack(task(), specs(), places(tmp_path)))


def test_log_that_lost_rounds_is_refused(tmp_path: Path) -> None:
    run_pack(task(), specs(), places(tmp_path))
    (tmp_path / "seed-0" / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="lacks rounds that the checkpoint has"):
        run_pack(task(), specs(), places(tmp_path))


def test_another_model_in_the_same_place_is_refused(tmp_path: Path) -> None:
    run_pack(task(), specs(), places(tmp_path))
    other = task()
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    swapped = dataclasses.replace(other, model=FunctionalModel(net))
    with pytest.raises(InputError, match="was made for another model, test set or metric"):
        run_pack(swapped, specs(), places(tmp_path))


def test_diverged_run_of_a_metric_to_minimise_never_arrives() -> None:
    def squared(outputs: Any, targets: Any) -> Any:
        return (outputs.squeeze(-1) - targets) ** 2

    x = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    regression = Task.from_arrays(
        nn.Linear(3, 1), x, x[:, 0].copy(), np.arange(30) % 5, test=(x, x[:, 0].copy()),
        loss=squared, metric=Metric("mse", squared, higher_is_better=False),
        cohort=3, rounds=6, threshold=0.5,
    )  # fmt: skip
    result = compare(
        regression, ["fedavg", "fedzmg"], seeds=2, settings={"fedzmg": {"client.lr": 1e20}}
    )
    good, bad = result.scores
    assert (bad.mean, bad.test, bad.sd, bad.diverged) == (None, None, None, 2)
    assert bad.arrivals["rolling_mean"] is None
    assert good.mean is not None


def test_runs_of_a_pack_at_different_rounds_go_on(tmp_path: Path) -> None:
    whole = run_pack(task(), specs())
    with pytest.raises(MemoryError):
        run_pack(task(), specs(), places(tmp_path), progress=Stop(4, MemoryError),
                 checkpoint_seconds=0)  # fmt: skip
    (tmp_path / "seed-1" / "checkpoint.safetensors").unlink()
    assert same(whole, run_pack(task(), specs(), places(tmp_path)))


class Said(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(
    "lost",
    [["checkpoint.safetensors"], ["checkpoint.safetensors", "checkpoint.previous.safetensors"]],
)
def test_a_pack_that_must_stay_together_goes_back_to_its_last_common_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: list[str]
) -> None:
    """On a GPU the width of a pack decides the last bits, so it must not fall apart."""
    whole = run_pack(task(), specs())
    stop(tmp_path, "fedzmg", 4)
    for name in lost:
        (tmp_path / "seed-1" / name).unlink()
    monkeypatch.setattr(running, "_must_stay_together", lambda spec: True)
    widths: list[int] = []
    build = training.Simulation

    def counted(task: Task, trials: list[Any], **rest: Any) -> Any:
        widths.append(len(trials))
        return build(task, trials, **rest)

    monkeypatch.setattr(training, "Simulation", counted)
    progress = Said()
    assert same(whole, run_pack(task(), specs(), places(tmp_path), progress=progress))
    assert widths == [2]
    back = 3 if len(lost) == 1 else 0
    assert any(f"seed-0: back to round {back}" in line for line in progress.lines)
    # Complete runs are read, not repeated.
    run_pack(task(), specs(), places(tmp_path))
    assert widths == [2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lost", [[], ["checkpoint.safetensors"]], ids=["whole", "split"])
def test_deterministic_pack_on_a_gpu_goes_on_bit_for_bit(tmp_path: Path, lost: list[str]) -> None:
    options = {"device": "cuda", "deterministic": True}
    wanted = [spec.model_copy(update={"engine": "captured"}) for spec in specs(**options)]
    whole = run_pack(task(), wanted)
    with pytest.raises(MemoryError):
        run_pack(task(), wanted, places(tmp_path), progress=Stop(4, MemoryError),
                 checkpoint_seconds=0)  # fmt: skip
    for name in lost:
        (tmp_path / "seed-1" / name).unlink()
    again = run_pack(task(), wanted, places(tmp_path))
    for one, other in zip(whole, again, strict=True):
        assert [r._replace(seconds=0) for r in one.records] == [
            r._replace(seconds=0) for r in other.records
        ]
        assert all(torch.equal(one.params[n].cpu(), other.params[n].cpu()) for n in one.params)


def stop(root: Path, algorithm: str, after: int, seconds: float = 0.0) -> None:
    with pytest.raises(MemoryError):
        run_pack(task(), specs(algorithm), places(root), progress=Stop(after, MemoryError),
                 checkpoint_seconds=seconds)  # fmt: skip


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("algorithm", "rounds"),
    [("fedadam", (3,)), ("scaffold", (2,)), ("scaffold", (5,)), ("scaffold", (2, 4, 5))],
)
def test_previous_checkpoint_leads_to_the_same_bits(
    tmp_path: Path, algorithm: str, rounds: tuple[int, ...]
) -> None:
    """Half of the clients take part in every round, so every slot is in use."""
    whole = run_pack(task(), specs(algorithm))
    for after in rounds:
        stop(tmp_path, algorithm, after)
        for place in places(tmp_path):
            damage(place / "checkpoint.safetensors")
    progress = Said()
    assert same(whole, run_pack(task(), specs(algorithm), places(tmp_path), progress=progress))
    assert len(progress.lines) == 2
    for line, place in zip(progress.lines, places(tmp_path), strict=True):
        assert f"{place}/checkpoint.safetensors is damaged (its bytes do not have" in line
        assert f"the previous checkpoint is used, from round {rounds[-1] - 1}" in line
    # Even the last checkpoint of a complete run may be lost.
    damage(tmp_path / "seed-1" / "checkpoint.safetensors")
    assert same(whole, run_pack(task(), specs(algorithm), places(tmp_path)))


def test_previous_checkpoint_survives_going_on_from_the_newest(tmp_path: Path) -> None:
    """What is put back after a crash must not take the place of what the previous one needs."""
    whole = run_pack(task(), specs("scaffold"))
    stop(tmp_path, "scaffold", 4)
    stop(tmp_path, "scaffold", 5, seconds=1e9)
    for place in places(tmp_path):
        (place / "checkpoint.safetensors").write_bytes(b"")
    progress = Said()
    assert same(whole, run_pack(task(), specs("scaffold"), places(tmp_path), progress=progress))
    assert "(0 bytes that are not a whole checkpoint)" in progress.lines[0]


def test_previous_checkpoint_survives_rounds_after_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What clients remember goes on changing, and must not take the place of what it needs."""
    clock = [0.0]
    monkeypatch.setattr(training.time, "monotonic", lambda: clock[0])

    class Ticks(Stop):
        def advance(self, report: RoundReport) -> None:
            # So that checkpoints are due after the rounds 2, 4 and 6.
            clock[0] += 10.0 if report.round in (1, 3, 5) else 0.0
            super().advance(report)

    longer = specs("scaffold", protocol={"rounds": 10})
    whole = run_pack(task(), longer)
    with pytest.raises(MemoryError):
        run_pack(task(), longer, places(tmp_path), progress=Ticks(9, MemoryError),
                 checkpoint_seconds=5)  # fmt: skip
    for place in places(tmp_path):
        damage(place / "checkpoint.safetensors")
    progress = Said()
    assert same(whole, run_pack(task(), longer, places(tmp_path), progress=progress))
    assert "the previous checkpoint is used, from round 4" in progress.lines[0]


def test_no_checkpoint_left_names_the_remedy_which_works(tmp_path: Path) -> None:
    stop(tmp_path, "scaffold", 4)
    names = ("checkpoint.safetensors", "checkpoint.previous.safetensors")
    for name in names:
        damage(tmp_path / "seed-0" / name)
    with pytest.raises(InputError, match=r"or remove .* to start this run again") as caught:
        run_pack(task(), specs("scaffold"), places(tmp_path))
    assert all(f"{name} is damaged" in str(caught.value) for name in names)
    for name in names:
        (tmp_path / "seed-0" / name).unlink()
    (tmp_path / "seed-0" / "memory.stamps").write_bytes(b"cut")
    whole = run_pack(task(), specs("scaffold"))
    assert same(whole, run_pack(task(), specs("scaffold"), places(tmp_path)))


def test_much_memory_is_copied_in_small_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedzmg.experiment.runs.checkpoints.COPIED_BYTES", 1)
    stop(tmp_path, "scaffold", 4, seconds=1e9)
    kept = RunDirectory(tmp_path / "seed-0").position()
    assert kept is not None
    assert (kept.checkpoint.round, kept.before) == (4, 3)
    copied = {n.split("|")[1] for n in kept.checkpoint.tensors if n.startswith("memory|")}
    assert len(copied) == 3


SAMPLE = Path(__file__).parent / "samples" / "format-1"


def test_directory_of_the_first_format_goes_on(tmp_path: Path) -> None:
    """Made before checkpoints had hashes, on another machine: bits are not compared."""
    import shutil

    from fedzmg import tasks

    place = tmp_path / "run"
    shutil.copytree(SAMPLE, place)
    directory = RunDirectory(place)
    spec = directory.spec()
    kept = directory.position()
    assert kept is not None
    assert (kept.checkpoint.round, kept.before, kept.rejected) == (2, 2, "")
    digits = tasks.get("digits", {})
    [history] = run_pack(digits, [spec], [place])
    assert [r.round for r in history.records] == [1, 2, 3]
    assert list(history.records[:2]) == RunDirectory(SAMPLE).records()
    # A file without a hash is kept as the previous one, and can be gone back to.
    damage(place / "checkpoint.safetensors")
    again = run_pack(digits, [spec], [place])
    assert same([history], again)


def test_complete_run_is_read_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_pack(task(), specs(), places(tmp_path))

    def refuse(*arguments: object) -> None:
        raise AssertionError("a complete run is only read")

    monkeypatch.setattr("fedzmg.storage.lock.write_atomic", refuse)
    assert same(whole, run_pack(task(), specs(), places(tmp_path)))


def test_seconds_between_checkpoints_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDZMG_CHECKPOINT_SECONDS", "0")
    with pytest.raises(MemoryError):
        run_pack(task(), specs(), places(tmp_path), progress=Stop(3, MemoryError))
    kept = RunDirectory(tmp_path / "seed-0").checkpoint()
    assert kept is not None
    assert kept.round == 3
    monkeypatch.setenv("FEDZMG_CHECKPOINT_SECONDS", "-1")
    with pytest.raises(InputError, match=r"FEDZMG_CHECKPOINT_SECONDS = '-1': expected a number"):
        run_pack(task(), specs(), places(tmp_path))


def test_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    run_pack(task(), specs(), places(tmp_path))
    with pytest.raises(
        InputError, match=r"holds another run \(client.lr is 0.1 there and 0.2 here\)"
    ):
        run_pack(task(), specs(client={"lr": 0.2}), places(tmp_path))
    with pytest.raises(InputError, match="was trained on other data than 'toy' holds now"):
        run_pack(task(seed=1), specs(), places(tmp_path))


def test_manifest_says_how_it_was_run(tmp_path: Path) -> None:
    run_pack(task(), specs(), places(tmp_path))
    facts = RunDirectory(tmp_path / "seed-0").manifest()
    assert facts["engine"] == "vectorized"
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["pack"] == ["fedzmg/seed-0", "fedzmg/seed-1"]
    assert facts["data_sha256"] == task().train.fingerprint()
    assert {p.name for p in (tmp_path / "seed-0").iterdir()} == {
        "spec.toml", "manifest.json", "metrics.jsonl", "checkpoint.safetensors",
        "clients.safetensors",
    }  # fmt: skip


def test_export_is_a_state_dict_of_the_trained_model(tmp_path: Path) -> None:
    import safetensors.torch

    [history, _] = run_pack(task(), specs(), places(tmp_path))
    path = export_model(tmp_path / "seed-0")
    fresh = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    fresh.load_state_dict(safetensors.torch.load_file(path))
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fresh(x), history.model()(x))
    with pytest.raises(InputError, match=r"holds no spec\.toml"):
        export_model(tmp_path)


def test_export_before_the_first_checkpoint_is_refused(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run").create(specs()[0], {"format": 1})
    with pytest.raises(InputError, match="holds no checkpoint: let the run finish"):
        export_model(tmp_path / "run")


def test_compare_pairs_seeds_and_tests_against_the_first(tmp_path: Path) -> None:
    result = compare(task(), ["fedavg", "fedzmg"], seeds=[3, 5], out=tmp_path, engine="vectorized")
    rows = result.scores
    assert [r.algorithm for r in rows] == ["fedavg", "fedzmg"]
    assert rows[0].test is None
    assert rows[1].test is not None
    first, second = (list(row.finals.values()) for row in rows)
    difference = np.mean(first) - np.mean(second)
    assert rows[1].test.mean_difference == pytest.approx(difference, abs=1e-12)
    model = 5 * 4 + 4 + 4 * 3 + 3
    traffic = rows[0].traffic
    assert traffic["bytes_down"] == traffic["bytes_up"] == 6 * 3 * 4 * model
    assert (tmp_path / "fedzmg" / "seed-5" / "spec.toml").exists()
    # Same seed, same cohort: both algorithms saw the same clients and examples.
    for a, b in zip(result.histories["fedavg"], result.histories["fedzmg"], strict=True):
        assert [r.steps for r in a.records] == [r.steps for r in b.records]


def test_diverging_run_is_reported_and_does_not_stop_the_others() -> None:
    result = compare(
        task(), ["fedavg", "fedzmg"], seeds=2, engine="vectorized",
        settings={"fedavg": {"client.lr": 1e30}},
    )  # fmt: skip
    bad, good = result.scores
    assert (bad.diverged, bad.mean) == (2, None)
    assert bad.dropped > 0
    assert (good.diverged, good.dropped) == (0, 0)
    assert good.mean is not None
    assert good.mean > 0.2
    assert result.as_dict()["curves"]["fedavg"]["runs"][0][-1] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithms": ["fedagv"]}, r"unknown algorithm 'fedagv': did you mean 'fedavg'\?"),
        ({"algorithms": []}, "give at least one"),
        ({"algorithms": ["fedavg", "fedavg"]}, "each once"),
        ({"seeds": 0}, "seeds = 0: give at least one"),
        ({"rounds": 0}, "rounds = 0: expected a whole number of at least 1"),
        (
            {"settings": {"fedzmg": {"client.lr": "fast"}}},
            "lr = 'fast': expected a finite number > 0",
        ),
        ({"settings": {"fedzmg": {"client.lr": float("nan")}}}, "lr = nan"),
        ({"settings": {"fedzmg": {"client.lr": True}}}, "lr = True"),
        ({"settings": {"fedzgm": {}}}, "unknown algorithm in settings 'fedzgm'"),
        ({"settings": {"fedzmg": {"seed": 4}}}, "seed cannot be set for one algorithm"),
        ({"settings": {"fedzmg": {"protocol.replacement": "False"}}}, "expected true or false"),
        ({"settings": {"fedzmg": {"protocol.threshold": "high"}}}, "threshold = 'high'"),
        ({"settings": {"fedzmg": {"protocol.cohort": 7}}}, "cohort = 7 but there are 6 clients"),
        ({"settings": {"fedzmg": {"protocol.chort": 7}}}, "did you mean 'cohort'"),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    options: dict[str, Any] = {"algorithms": ["fedzmg"], "seeds": 1, "out": tmp_path / "out"}
    with pytest.raises(InputError, match=message):
        compare(task(), **{**options, **changes})
    assert not (tmp_path / "out").exists()
