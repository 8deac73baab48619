"""Runs on disk: a resumed run equals an uninterrupted one, wherever the interruption falls."""

from __future__ import annotations

import dataclasses
import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from toys import Press, Stop, same, toy

from fedzmg import Task, compare
from fedzmg.engine import client_memory
from fedzmg.errors import InputError, Interrupted
from fedzmg.experiment import run as running
from fedzmg.experiment import training
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.run_directory import RunDirectory, export_model
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.models import FunctionalModel
from fedzmg.simulation import History, RoundReport

NEWEST, PREVIOUS = "checkpoint.safetensors", "checkpoint.previous.safetensors"


def task(seed: int = 0) -> Task:
    return toy(seed, rounds=6, eval_every=2)


def specs(algorithm: str = "fedzmg", **changes: Any) -> list[RunSpec]:
    options = {"engine": "vectorized", **changes}
    return [RunSpec(task="toy", algorithm=algorithm, seed=seed, **options) for seed in (0, 1)]


def places(root: Path) -> list[Path]:
    return [root / "seed-0", root / "seed-1"]


def stop(
    root: Path,
    algorithm: str,
    after: int,
    seconds: float = 0.0,
    error: type[BaseException] = MemoryError,
) -> None:
    with pytest.raises((Interrupted, MemoryError)):
        run_pack(task(), specs(algorithm), places(root), progress=Stop(after, error=error),
                 checkpoint_seconds=seconds)  # fmt: skip


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@functools.cache
def whole(algorithm: str) -> list[History]:
    """An uninterrupted training."""
    return run_pack(task(), specs(algorithm))


@pytest.mark.parametrize(
    ("algorithm", "after", "error", "seconds"),
    [
        ("fedzmg", 1, KeyboardInterrupt, 0.0),
        ("fedzmg", 5, MemoryError, 1e9),
        ("scaffold", 4, MemoryError, 0.0),
        ("scaffold", 4, KeyboardInterrupt, 1e9),
        ("adabest", 4, MemoryError, 1e9),
    ],
)
def test_interrupted_run_continues_bit_for_bit(
    tmp_path: Path, algorithm: str, after: int, error: type[BaseException], seconds: float
) -> None:
    stop(tmp_path, algorithm, after, seconds, error)
    for _ in range(2):  # the second time it is only read
        assert same(whole(algorithm), run_pack(task(), specs(algorithm), places(tmp_path)))
    assert (tmp_path / "seed-0" / "memory.rows").exists() == (algorithm != "fedzmg")


def test_memory_that_a_gpu_holds_reaches_the_files_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_memory, "_room", lambda _: 10**9)
    stop(tmp_path, "scaffold", 4, 0.0, MemoryError)
    assert same(whole("scaffold"), run_pack(task(), specs("scaffold"), places(tmp_path)))


def test_lost_memory_is_reported(tmp_path: Path) -> None:
    stop(tmp_path, "scaffold", 4)
    (tmp_path / "seed-1" / "memory.stamps").unlink()
    with pytest.raises(InputError, match=r"memory\.stamps"):
        run_pack(task(), specs("scaffold"), places(tmp_path))


def test_ctrl_c_waits_for_the_round_and_keeps_it(tmp_path: Path) -> None:
    progress, before = Press(3), signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as caught:
        run_pack(task(), specs("scaffold"), places(tmp_path), progress=progress)
    assert signal.getsignal(signal.SIGINT) is before
    assert "Ctrl-C" in progress.said
    assert caught.value.done == 3
    kept = RunDirectory(tmp_path / "seed-1").checkpoint()
    assert kept is not None
    assert kept.round == 3
    assert same(whole("scaffold"), run_pack(task(), specs("scaffold"), places(tmp_path)))


def test_directory_of_another_training_is_refused(tmp_path: Path) -> None:
    run_pack(task(), specs(), places(tmp_path))
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    other = dataclasses.replace(task(), model=FunctionalModel(net))
    for wanted, given, message in (
        (task(), specs(client={"lr": 0.2}), r"client.lr is 0.1 there and 0.2 here"),
        (task(seed=1), specs(), "other data than 'toy'"),
        (other, specs(), "another model"),
    ):
        with pytest.raises(InputError, match=message):
            run_pack(wanted, given, places(tmp_path))
    (tmp_path / "seed-0" / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match=r"metrics\.jsonl is damaged"):
        run_pack(task(), specs(), places(tmp_path))


@pytest.mark.parametrize(
    ("lost", "together"), [([NEWEST], False), ([NEWEST], True), ([NEWEST, PREVIOUS], True)]
)
def test_runs_of_a_pack_at_different_rounds_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: list[str], together: bool
) -> None:
    """On a GPU the width of a pack changes the last bits, so it goes back to a common round."""
    stop(tmp_path, "fedzmg", 4)
    for name in lost:
        (tmp_path / "seed-1" / name).unlink()
    expected = whole("fedzmg")
    monkeypatch.setattr(running, "_must_stay_together", lambda spec: together)
    widths: list[int] = []
    build = training.Simulation

    def counted(task: Task, trials: list[Any], **rest: Any) -> Any:
        widths.append(len(trials))
        return build(task, trials, **rest)

    monkeypatch.setattr(training, "Simulation", counted)
    progress = Stop(99)
    assert same(expected, run_pack(task(), specs(), places(tmp_path), progress=progress))
    assert widths == ([2] if together else [1, 1])
    assert (f"seed-0: back to round {3 if len(lost) == 1 else 0}" in progress.said) == together
    # Complete runs are read, not repeated.
    run_pack(task(), specs(), places(tmp_path))
    assert len(widths) == (1 if together else 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lost", [[], [NEWEST]], ids=["whole", "split"])
def test_deterministic_pack_on_a_gpu_continues_bit_for_bit(tmp_path: Path, lost: list[str]) -> None:
    wanted = specs(device="cuda", deterministic=True, engine="cuda_graph")
    whole = run_pack(task(), wanted)
    with pytest.raises(MemoryError):
        run_pack(task(), wanted, places(tmp_path), progress=Stop(4), checkpoint_seconds=0)
    for name in lost:
        (tmp_path / "seed-1" / name).unlink()
    assert same(whole, run_pack(task(), wanted, places(tmp_path)))


@pytest.mark.parametrize(
    ("algorithm", "rounds"),
    [("fedadam", (3,)), ("scaffold", (2, 4, 5))],
)
def test_previous_checkpoint_leads_to_the_same_bits(
    tmp_path: Path, algorithm: str, rounds: tuple[int, ...]
) -> None:
    """Half of the clients take part in every round, so every slot is in use."""
    for after in rounds:
        stop(tmp_path, algorithm, after)
        for place in places(tmp_path):
            damage(place / NEWEST)
    progress = Stop(99)
    found = run_pack(task(), specs(algorithm), places(tmp_path), progress=progress)
    assert same(whole(algorithm), found)
    for line, place in zip(progress.lines, places(tmp_path), strict=True):
        assert f"{place}/checkpoint.safetensors cannot be used (its hash" in line
        assert f"from round {rounds[-1] - 1}" in line
    # Even the last checkpoint of a complete run may be lost.
    damage(tmp_path / "seed-1" / NEWEST)
    assert same(whole(algorithm), run_pack(task(), specs(algorithm), places(tmp_path)))


def test_checkpoint_of_another_seed_is_not_used(tmp_path: Path) -> None:
    """A file with a valid hash is rejected if it belongs to another run."""
    stop(tmp_path, "fedzmg", 4)
    content = (tmp_path / "seed-1" / NEWEST).read_bytes()
    (tmp_path / "seed-0" / NEWEST).write_bytes(content)
    progress = Stop(99)
    assert same(whole("fedzmg"), run_pack(task(), specs(), places(tmp_path), progress=progress))
    assert len(progress.lines) == 1
    assert "belongs to another training" in progress.said
    assert "from round 3" in progress.said
    for name in (NEWEST, PREVIOUS):
        (tmp_path / "seed-0" / name).write_bytes(content)
    with pytest.raises(InputError, match="belongs to another training") as caught:
        run_pack(task(), specs(), places(tmp_path))
    assert "\n" not in str(caught.value)


def test_previous_checkpoint_survives_continuing_from_the_newest(tmp_path: Path) -> None:
    """Restored memory must not overwrite memory that the previous checkpoint needs."""
    stop(tmp_path, "scaffold", 4)
    stop(tmp_path, "scaffold", 5, seconds=1e9)
    for place in places(tmp_path):
        (place / NEWEST).write_bytes(b"")
    progress = Stop(99)
    found = run_pack(task(), specs("scaffold"), places(tmp_path), progress=progress)
    assert same(whole("scaffold"), found)
    assert "0 bytes" in progress.lines[0]


def test_previous_checkpoint_survives_rounds_after_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New memory must not overwrite memory that the previous checkpoint needs."""
    clock = [0.0]
    monkeypatch.setattr(training.time, "monotonic", lambda: clock[0])

    class Ticks(Stop):
        def advance(self, report: RoundReport) -> None:
            # Checkpoints are due after rounds 2, 4 and 6.
            clock[0] += 10.0 if report.round in (1, 3, 5) else 0.0
            super().advance(report)

    longer = specs("scaffold", protocol={"rounds": 10})
    whole = run_pack(task(), longer)
    with pytest.raises(MemoryError):
        run_pack(task(), longer, places(tmp_path), progress=Ticks(9), checkpoint_seconds=5)
    for place in places(tmp_path):
        damage(place / NEWEST)
    progress = Stop(99)
    assert same(whole, run_pack(task(), longer, places(tmp_path), progress=progress))
    assert "from round 4" in progress.lines[0]


def test_without_usable_checkpoints_the_remedy_works(tmp_path: Path) -> None:
    stop(tmp_path, "scaffold", 4)
    for name in (NEWEST, PREVIOUS):
        damage(tmp_path / "seed-0" / name)
    with pytest.raises(
        InputError, match=f"{NEWEST} cannot be used.*{PREVIOUS} cannot be used.*remove"
    ):
        run_pack(task(), specs("scaffold"), places(tmp_path))
    for name in (NEWEST, PREVIOUS):
        (tmp_path / "seed-0" / name).unlink()
    (tmp_path / "seed-0" / "memory.stamps").write_bytes(b"cut")
    assert same(whole("scaffold"), run_pack(task(), specs("scaffold"), places(tmp_path)))


def test_complete_run_is_read_from_a_read_only_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_pack(task(), specs(), places(tmp_path))
    monkeypatch.setattr("fedzmg.storage.lock.write_atomic", lambda *_: pytest.fail("written"))
    assert same(whole, run_pack(task(), specs(), places(tmp_path)))


def test_environment_sets_the_checkpoint_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDZMG_CHECKPOINT_SECONDS", "0")
    with pytest.raises(MemoryError):
        run_pack(task(), specs(), places(tmp_path), progress=Stop(3))
    kept = RunDirectory(tmp_path / "seed-0").checkpoint()
    assert kept is not None
    assert kept.round == 3
    monkeypatch.setenv("FEDZMG_CHECKPOINT_SECONDS", "-1")
    with pytest.raises(InputError, match="FEDZMG_CHECKPOINT_SECONDS = '-1'"):
        run_pack(task(), specs(), places(tmp_path))


def test_manifest_describes_the_execution(tmp_path: Path) -> None:
    run_pack(task(), specs(), places(tmp_path))
    facts = RunDirectory(tmp_path / "seed-0").manifest()
    assert facts["engine"] == "vectorized"
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["pack"] == ["fedzmg/seed-0", "fedzmg/seed-1"]
    assert facts["data_sha256"] == task().train.fingerprint()
    assert {p.name for p in (tmp_path / "seed-0").iterdir()} == {
        "spec.toml", "manifest.json", "metrics.jsonl", NEWEST, "clients.safetensors",
    }  # fmt: skip


def test_export_is_a_state_dict_of_the_trained_model(tmp_path: Path) -> None:
    [history, _] = run_pack(task(), specs(), places(tmp_path))
    path = export_model(tmp_path / "seed-0")
    fresh = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    fresh.load_state_dict(safetensors.torch.load_file(path))
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fresh(x), history.model()(x))
    with pytest.raises(InputError, match=r"spec\.toml"):
        export_model(tmp_path)
    RunDirectory(tmp_path / "new").create(specs()[0], {"format": 1})
    with pytest.raises(InputError, match="no checkpoint"):
        export_model(tmp_path / "new")


def test_export_of_a_finished_run_needs_its_last_checkpoint(tmp_path: Path) -> None:
    run, rounds = tmp_path / "seed-0", task().protocol.rounds
    run_pack(task(), specs()[:1], [run], checkpoint_seconds=0)
    (run / NEWEST).unlink()
    with pytest.raises(InputError, match=rf"round, {rounds}"):
        export_model(run)
    run_pack(task(), specs()[:1], [run])
    with safetensors.safe_open(export_model(run), "pt") as file:
        assert file.metadata()["round"] == str(rounds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithms": []}, "algorithms = "),
        ({"algorithms": ["fedavg", "fedavg"]}, "each once"),
        ({"rounds": 0}, "rounds = 0"),
        ({"settings": {"fedzmg": {"client.lr": "fast"}}}, "lr = 'fast'"),
        ({"settings": {"fedzmg": {"client.lr": float("nan")}}}, "lr = nan"),
        ({"settings": {"fedzmg": {"client.lr": True}}}, "lr = True"),
        ({"settings": {"fedzgm": {}}}, "'fedzgm'"),
        ({"settings": {"fedzmg": {"seed": 4}}}, "seed"),
        ({"settings": {"fedzmg": {"protocol.replacement": "False"}}}, "true or false"),
        ({"settings": {"fedzmg": {"protocol.threshold": "high"}}}, "threshold = 'high'"),
        ({"settings": {"fedzmg": {"protocol.cohort": 7}}}, "cohort = 7.*6 clients"),
        ({"settings": {"fedzmg": {"protocol.chort": 7}}}, "'cohort'"),
    ],
)
def test_mistakes_are_found_before_training(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    options: dict[str, Any] = {"algorithms": ["fedzmg"], "seeds": 1, "out": tmp_path / "out"}
    with pytest.raises(InputError, match=message):
        compare(task(), **{**options, **changes})
    assert not (tmp_path / "out").exists()
