"""Run directories: atomic, append-only, and clear about damage."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fedzmg.errors import InputError
from fedzmg.experiment.run_directory import FORMAT, Position, RunDirectory
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.simulation import Checkpoint, Record
from fedzmg.storage.files import write_atomic
from fedzmg.storage.formats import write_json

FACTS = {"format": FORMAT, "data_sha256": "", "engine": "vectorized", "onednn": False}
FACTS |= {"device": "cpu"}


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
    made.create(RunSpec(task="digits"), FACTS)
    return made


def saved(directory: RunDirectory, *rounds: int) -> Path:
    before = 0
    for round_ in rounds:
        tensors = {"model.params['a']": torch.tensor([float(round_)])}
        directory.save(Checkpoint(round_, tensors), before)
        before = round_
    return directory.path / "checkpoint.safetensors"


def position(directory: RunDirectory) -> Position:
    found = directory.position()
    assert found is not None
    return found


def test_round_trip(directory: RunDirectory) -> None:
    assert directory.spec() == RunSpec(task="digits")
    assert directory.manifest() == FACTS
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
    # No pickle: any safetensors reader opens the file.
    names = safetensors.torch.load_file(directory.path / "checkpoint.safetensors")
    assert names.keys() == {f"0|{name}" for name in tensors}


def test_log_lines_supersede_and_damage_is_named(directory: RunDirectory) -> None:
    log = directory.path / "metrics.jsonl"
    for round_, metric in ((1, 0.1), (2, 0.2), (2, 0.3)):
        directory.append(record(round_, metric))
    assert [r.metric for r in directory.records()] == [0.1, 0.3]
    assert len(log.read_text().splitlines()) == 3
    log.write_bytes(log.read_bytes() + b'{"round": 3, "clie')
    assert len(directory.records()) == 2
    directory.append(record(3, train_loss=float("nan")))
    assert [r.round for r in directory.records()] == [1, 2, 3]
    line = log.read_text().splitlines()[-1]
    assert json.loads(line, parse_constant=pytest.fail)["train_loss"] == "nan"
    assert directory.records()[2].train_loss != directory.records()[2].train_loss
    log.write_bytes(b'{"round": "x"}\n' + log.read_bytes())
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 1"):
        directory.records()


def test_two_generations_are_kept(directory: RunDirectory) -> None:
    newest = saved(directory, 2, 5, 9)
    kept = position(directory)
    assert (kept.checkpoint.round, kept.before, kept.rejected) == (9, 5, "")
    newest.unlink()
    kept = position(directory)
    assert (kept.checkpoint.round, kept.before) == (5, 2)
    assert "checkpoint.safetensors is missing" in kept.rejected
    reader = directory.checkpoint()
    assert reader is not None
    assert reader.round == 5


def test_every_flipped_bit_and_every_cut_is_found(directory: RunDirectory) -> None:
    """Header, round, binding, tensors: the hash covers the whole file."""
    newest = saved(directory, 2, 5)
    content = newest.read_bytes()
    newest.write_bytes(content + b"\0")
    assert position(directory).checkpoint.round == 2
    for at in range(len(content)):
        for broken in (content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :],
                       content[:at]):  # fmt: skip
            newest.write_bytes(broken)
            assert (position(directory).checkpoint.round, at) == (2, at)
    with pytest.raises(InputError, match="from round 2"):
        directory.checkpoint()
    (directory.path / "checkpoint.previous.safetensors").unlink()
    with pytest.raises(InputError, match="cannot be used"):
        directory.checkpoint()


def test_checkpoint_belongs_to_its_specification_and_seed(directory: RunDirectory) -> None:
    content = saved(directory, 2).read_bytes()
    for i, changes in enumerate(({"seed": 1}, {"client": {"lr": 0.5}})):
        other = RunDirectory(directory.path.with_name(f"other-{i}"))
        other.create(RunSpec(task="digits", **changes), FACTS)
        (other.path / "checkpoint.safetensors").write_bytes(content)
        with pytest.raises(InputError, match="another training"):
            other.position()


def test_checkpoint_ahead_of_the_log_is_not_used(directory: RunDirectory) -> None:
    saved(directory, 2, 5)
    kept = directory.position(logged=range(1, 5))
    assert kept is not None
    assert kept.checkpoint.round == 2
    assert "metrics.jsonl lacks rounds" in kept.rejected
    with pytest.raises(InputError, match=r"metrics\.jsonl lacks rounds"):
        directory.position(logged=[2, 3])


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_crash_between_any_two_moves_keeps_a_whole_checkpoint(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    saved(directory, 2, 5)
    done: list[str] = []
    move = os.replace

    def crash(source: str, target: str) -> None:
        if len(done) == moves:
            raise SystemExit
        done.append(str(target))
        move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", crash)
        patch.setattr("os.unlink", lambda path: None)  # a killed process cleans nothing up
        with contextlib.suppress(SystemExit):
            directory.save(Checkpoint(9, {"a": torch.ones(1)}), 5)
    kept = position(directory)
    assert kept.checkpoint.round == (9 if moves == 2 else 5)
    directory.repair(kept)
    assert directory.position() == kept._replace(rejected="")
    assert not [p for p in directory.path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("names", [["lock.json"], ["manifest.json", "lock.json", ".spec.toml.x1"]])
def test_leftovers_of_a_creation_are_not_a_run(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    assert not RunDirectory(tmp_path).exists
    (tmp_path / "notes.txt").write_text("")
    assert RunDirectory(tmp_path).exists


def test_missing_and_foreign_parts_are_refused(directory: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing"):
        RunDirectory(tmp_path / "nothing").spec()
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"spec\.toml"):
        RunDirectory(tmp_path / "empty").spec()
    path = directory.path / "manifest.json"
    write_json(path, {"format": 99})
    with pytest.raises(InputError, match="format 99"):
        directory.manifest()
    path.write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        directory.manifest()
    path.unlink()
    with pytest.raises(InputError, match=r"manifest\.json"):
        directory.manifest()


def test_failed_write_leaves_the_old_file_only(
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
