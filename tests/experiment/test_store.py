"""Run directories: atomic, append-only, and clear about damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedzmg.errors import InputError
from fedzmg.experiment.spec import RunSpec
from fedzmg.experiment.store import FORMAT, RunDirectory, write_json
from fedzmg.files import write_atomic
from fedzmg.simulation import Checkpoint, Record


def record(round_: int, metric: float | None = 0.5, train_loss: float = 1.0) -> Record:
    return Record(
        round=round_, clients=5, dropped=0, steps=50, train_loss=train_loss,
        bytes_down=10, bytes_up=20, bytes_up_bound=20, scalar_bytes_down=0, scalar_bytes_up=8,
        bytes_kept=0, total_bytes_down=10, total_bytes_up=28,
        seconds=0.1, loss=metric, metric=metric,
    )  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.create(RunSpec(task="digits"), {"format": FORMAT})
    return made


def test_round_trip(directory: RunDirectory) -> None:
    assert directory.spec() == RunSpec(task="digits")
    assert directory.manifest() == {"format": FORMAT}
    assert directory.checkpoint() is None
    for i in (1, 2, 3):
        directory.append(record(i))
    assert directory.records() == [record(1), record(2), record(3)]
    tensors = {"model.params['a']": torch.arange(3.0), "model.alive": torch.tensor(True)}
    directory.save(Checkpoint(3, tensors))
    kept = directory.checkpoint()
    assert kept is not None
    assert kept.round == 3
    assert kept.tensors.keys() == tensors.keys()
    assert torch.equal(kept.params()["a"], torch.arange(3.0))


def test_later_lines_supersede_and_none_is_edited(directory: RunDirectory) -> None:
    for round_, metric in ((1, 0.1), (2, 0.2), (2, 0.3)):
        directory.append(record(round_, metric))
    assert [r.metric for r in directory.records()] == [0.1, 0.3]
    assert [r.metric for r in directory.records(until=1)] == [0.1]
    assert len((directory.path / "metrics.jsonl").read_text().splitlines()) == 3


def test_line_broken_off_by_a_crash_is_superseded(directory: RunDirectory) -> None:
    directory.append(record(1))
    log = directory.path / "metrics.jsonl"
    log.write_bytes(log.read_bytes() + b'{"round": 2, "clie')
    assert directory.records() == [record(1)]
    directory.append(record(2))
    assert directory.records() == [record(1), record(2)]


def test_damage_in_the_middle_is_named(directory: RunDirectory) -> None:
    directory.append(record(1))
    log = directory.path / "metrics.jsonl"
    log.write_bytes(b'{"round": "x"}\n' + log.read_bytes())
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 1 is damaged"):
        directory.records()


def test_numbers_that_are_not_finite_stay_strict_json(directory: RunDirectory) -> None:
    directory.append(record(1, train_loss=float("nan")))
    line = (directory.path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail)["train_loss"] == "nan"
    assert directory.records()[0].train_loss != directory.records()[0].train_loss


def test_damaged_checkpoint_is_refused(directory: RunDirectory) -> None:
    (directory.path / "checkpoint.safetensors").write_bytes(b"\x80\x04not a tensor")
    with pytest.raises(InputError, match="remove it to start this run again"):
        directory.checkpoint()


def test_missing_and_foreign_parts_are_refused(directory: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no spec\.toml"):
        RunDirectory(tmp_path / "nothing").spec()
    write_json(directory.path / "manifest.json", {"format": 99})
    with pytest.raises(InputError, match="has format 99, this version reads 1"):
        directory.manifest()
    (directory.path / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        directory.manifest()
    (directory.path / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"manifest\.json is missing"):
        directory.manifest()


def test_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose another place with --out"):
        RunDirectory(tmp_path / "file" / "run").create(RunSpec(task="digits"), {})


def test_failed_write_leaves_the_old_file_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a"
    write_atomic(target, b"old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, b"new")
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
