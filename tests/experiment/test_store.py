"""Run directories: atomic, append-only, and clear about damage."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch

from fedzmg.errors import InputError
from fedzmg.experiment.runs.store import FORMAT, RunDirectory, write_json
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.simulation import Checkpoint, Record
from fedzmg.storage.files import write_atomic


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
    with pytest.raises(InputError, match=r"is damaged \(14 bytes .* to start this run again"):
        directory.checkpoint()


def saved(directory: RunDirectory, *rounds: int) -> None:
    before = 0
    for round_ in rounds:
        directory.save(
            Checkpoint(round_, {"model.params['a']": torch.tensor([float(round_)])}), before
        )
        before = round_


def test_two_generations_are_kept(directory: RunDirectory) -> None:
    saved(directory, 2, 5, 9)
    kept = directory.position()
    assert kept is not None
    assert (kept.checkpoint.round, kept.before, kept.rejected) == (9, 5, "")
    (directory.path / "checkpoint.safetensors").unlink()
    kept = directory.position()
    assert kept is not None
    assert (kept.checkpoint.round, kept.before) == (5, 2)
    assert kept.rejected.endswith("checkpoint.safetensors is missing")
    reader = directory.checkpoint()
    assert reader is not None
    assert reader.round == 5


def test_file_is_a_plain_safetensors_file(directory: RunDirectory) -> None:
    import safetensors.torch

    saved(directory, 2)
    tensors = safetensors.torch.load_file(directory.path / "checkpoint.safetensors")
    assert tensors["model.params['a']"].tolist() == [2.0]


def test_flipped_bit_is_found_in_every_byte(directory: RunDirectory) -> None:
    saved(directory, 2, 5)
    newest = directory.path / "checkpoint.safetensors"
    content = newest.read_bytes()
    for place in range(len(content)):
        broken = bytearray(content)
        broken[place] ^= 1 << place % 8
        newest.write_bytes(broken)
        kept = directory.position()
        assert kept is not None
        assert (kept.checkpoint.round, place) == (2, place)


def test_every_cut_is_found(directory: RunDirectory) -> None:
    saved(directory, 2, 5)
    newest = directory.path / "checkpoint.safetensors"
    content = newest.read_bytes()
    for length in range(len(content)):
        newest.write_bytes(content[:length])
        kept = directory.position()
        assert kept is not None
        assert (kept.checkpoint.round, length) == (2, length)
    newest.write_bytes(content + b"\0")
    kept = directory.position()
    assert kept is not None
    assert kept.checkpoint.round == 2
    with pytest.raises(InputError, match="run the same command again, it goes on from round 2"):
        directory.checkpoint()


def test_checkpoint_ahead_of_the_log_is_not_used(directory: RunDirectory) -> None:
    saved(directory, 2, 5)
    kept = directory.position(logged=range(1, 5))
    assert kept is not None
    assert kept.checkpoint.round == 2
    assert "lacks rounds that the checkpoint has" in kept.rejected
    with pytest.raises(InputError, match="lacks rounds that the checkpoint has"):
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
    kept = directory.position()
    assert kept is not None
    assert kept.checkpoint.round == (9 if moves == 2 else 5)
    directory.repair(kept)
    assert directory.position() == kept._replace(rejected="")
    assert not [p for p in directory.path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("names", [["lock.json"], ["manifest.json", "lock.json", ".spec.toml.x1"]])
def test_what_a_crash_leaves_of_a_beginning_is_no_run(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    assert not RunDirectory(tmp_path).exists
    (tmp_path / "notes.txt").write_text("")
    assert RunDirectory(tmp_path).exists


def test_missing_and_foreign_parts_are_refused(directory: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing is no directory: give a run directory"):
        RunDirectory(tmp_path / "nothing").spec()
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no spec\.toml"):
        RunDirectory(tmp_path / "empty").spec()
    write_json(directory.path / "manifest.json", {"format": 99})
    with pytest.raises(InputError, match="has format 99, this version reads 1"):
        directory.manifest()
    (directory.path / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="is not valid JSON"):
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
