"""Stored metrics of single clients: complete or absent, the same bits after any interruption."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import Stop, toy
from toys import same as same_runs

from fedzmg import Task
from fedzmg.errors import InputError
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.run_directory import RunDirectory
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.simulation import ClientMetrics, History
from fedzmg.storage.client_metrics import CLIENTS


def task() -> Task:
    return toy(rounds=6, eval_every=2, epochs=1, fine_tune=1)


def specs(every: int = 2) -> list[RunSpec]:
    return [
        RunSpec(
            task="toy",
            algorithm="fedper",
            seed=seed,
            engine="vectorized",
            client_metrics_every=every,
        )
        for seed in (0, 1)
    ]


def places(root: Path) -> list[Path]:
    return [root / "seed-0", root / "seed-1"]


def same(one: tuple[ClientMetrics, ...], other: tuple[ClientMetrics, ...]) -> bool:
    return len(one) == len(other) and all(
        (a.round, a.part, a.population) == (b.round, b.part, b.population)
        and all(
            np.array_equal(getattr(a, name), getattr(b, name))
            for name in ("clients", "examples", "metric", "loss", "personal", "tuned")
        )
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def whole() -> list[History]:
    return run_pack(task(), specs())


def test_interval_of_evaluations_does_not_change_a_bit(whole: list[History]) -> None:
    [seldom, _] = run_pack(task(), specs(0))
    assert [found.round for found in whole[0].clients] == [1, 3, 5, 6]
    assert [found.round for found in seldom.clients] == [6]
    assert same_runs([seldom], whole[:1])
    assert same(seldom.clients, whole[0].clients[-1:])


@pytest.mark.parametrize(("after", "seconds"), [(1, 1e9), (3, 0.0), (4, 0.0)])
def test_interrupted_goes_on_bit_for_bit(
    tmp_path: Path, whole: list[History], after: int, seconds: float
) -> None:
    with pytest.raises(MemoryError):
        run_pack(task(), specs(), places(tmp_path), progress=Stop(after),
                 checkpoint_seconds=seconds)  # fmt: skip
    resumed = run_pack(task(), specs(), places(tmp_path))
    for history, expected, place in zip(resumed, whole, places(tmp_path), strict=True):
        assert same(history.clients, expected.clients)
        assert same(RunDirectory(place).clients(), expected.clients)
        assert [r.client_loss for r in history.records] == [r.client_loss for r in expected.records]
    assert same(run_pack(task(), specs(), places(tmp_path))[1].clients, whole[1].clients)


@pytest.mark.parametrize("fails", ["save", "save_clients"])
def test_end_of_a_process_between_the_last_two_files(
    tmp_path: Path, whole: list[History], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A checkpoint never stands for an evaluation that is not there."""
    inner = getattr(RunDirectory, fails)

    def die(self: RunDirectory, found: Any, *rest: Any) -> None:
        if (found.round if fails == "save" else found[-1].round) == 6:
            raise MemoryError
        inner(self, found, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, fails, die)
        with pytest.raises(MemoryError):
            run_pack(task(), specs(), places(tmp_path), checkpoint_seconds=0)
    left = tmp_path / "seed-0" / f".{CLIENTS}.0123abcd"
    left.write_bytes(b"half")
    resumed = run_pack(task(), specs(), places(tmp_path))
    assert all(same(a.clients, b.clients) for a, b in zip(resumed, whole, strict=True))
    assert not left.exists()


def test_file_is_plain_tensors_and_damage_is_one_line(tmp_path: Path, whole: list[History]) -> None:
    directory = RunDirectory(tmp_path)
    directory.save_clients(whole[0].clients)
    assert same(directory.clients(), whole[0].clients)
    assert same(directory.clients(until=3), whole[0].clients[:2])
    content = (tmp_path / CLIENTS).read_bytes()
    for cut in (b"", content[:40], content[:-1], b"\x80\x04pickle"):
        (tmp_path / CLIENTS).write_bytes(cut)
        with pytest.raises(InputError, match=r"clients\.safetensors") as caught:
            directory.clients()
        assert "\n" not in str(caught.value)


def test_fields_of_a_later_version_are_left_out(tmp_path: Path, whole: list[History]) -> None:
    directory = RunDirectory(tmp_path)
    record = whole[0].records[0]._replace(client_loss=(0.5, 1.0, 2.0, float("inf"), float("inf")))
    directory.append(record)
    log = tmp_path / "metrics.jsonl"
    line = json.loads(log.read_text(), parse_constant=pytest.fail)
    assert line["client_loss"] == [0.5, 1.0, 2.0, "inf", "inf"]
    log.write_text(json.dumps({**line, "mood": "fine"}) + "\n")
    assert directory.records() == [record]


def test_manifest_says_what_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_pack(task(), specs(0)[:1], [tmp_path / "called"])
    assert RunDirectory(tmp_path / "called").manifest()["command"] == "Python"
    monkeypatch.setattr(sys, "argv", ["/opt/x/bin/fedzmg", "run", "toy", "--out", "my place"])
    run_pack(task(), specs(0)[:1], [tmp_path / "typed"])
    facts = RunDirectory(tmp_path / "typed").manifest()
    assert facts["command"] == "fedzmg run toy --out 'my place'"
