"""Damaged files, and files of another training: an error or the same bits, never other numbers."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from toys import Stop, bare, same, toy

from fedzmg.errors import InputError
from fedzmg.experiment.grids.grid import run_grid
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.specs.files import GridSpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.results.reading import read
from fedzmg.storage import lock

TASK = toy(rounds=8, epochs=1, eval_every=2)
SEEDS = (0, 1)
TRIES = 12


def run(path: Path, seed: int, progress: Any = None) -> Any:
    spec = RunSpec(
        task="toy", algorithm="scaffold", engine="vectorized", device="cpu", seed=seed,
        client_metrics_every=2,
    )  # fmt: skip
    [history] = run_pack(TASK, [spec], [path], progress=progress, checkpoint_seconds=0)
    return history


def grid(path: Path, seed: int, progress: Any = None) -> Any:
    spec = GridSpec.model_validate(
        {
            "task": "toy", "algorithms": ["scaffold"], "rounds": 8, "last": 2, "seeds": [seed],
            "axes": {"client.lr": [0.1, 1.0], "server.lr": [1.0]}, "engine": "vectorized",
            "device": "cpu", "together": 1,
        }
    )  # fmt: skip
    found = run_grid(spec, path, task=TASK, progress=progress, checkpoint_seconds=0)
    return [point["runs"] for point in found["algorithms"]["scaffold"]["points"]]


def flip(path: Path, _: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, _: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def zero(path: Path, _: Path, rng: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def remove(path: Path, _: Path, rng: random.Random) -> None:
    path.unlink()


def exchange(path: Path, other: Path, rng: random.Random) -> None:
    if other.exists():
        shutil.copyfile(other, path)


DAMAGES: tuple[Callable[[Path, Path, random.Random], None], ...] = (
    flip, flip, flip, truncate, zero, remove, exchange, exchange,
)  # fmt: skip


def files(path: Path) -> Iterator[Path]:
    return (p for p in sorted(path.rglob("*")) if p.is_file() and p.stat().st_size)


def test_a_report_rejects_the_log_of_another_seed(tmp_path: Path) -> None:
    for seed in SEEDS:
        run(tmp_path / f"{seed}", seed)
    log = tmp_path / "0" / "metrics.jsonl"
    shutil.copyfile(tmp_path / "1" / "metrics.jsonl", log)
    with pytest.raises(InputError, match=str(log)):
        read([tmp_path / "0"])


@pytest.mark.parametrize("train", [run, grid])
@pytest.mark.parametrize("tries", [TRIES, pytest.param(30 * TRIES, marks=pytest.mark.slow)])
def test_damage_never_gives_other_numbers(
    train: Callable[..., Any], tries: int, tmp_path: Path
) -> None:
    wholes = [train(tmp_path / f"whole-{seed}", seed) for seed in SEEDS]
    for seed in SEEDS:
        with pytest.raises(MemoryError):
            train(tmp_path / f"part-{seed}", seed, Stop(5, pack=1 if train is run else 2))
        (tmp_path / f"part-{seed}" / lock.NAME).unlink(missing_ok=True)
    kinds = {"equal": 0, "error": 0}
    for number in range(tries):
        rng = random.Random(number)
        name = rng.choice(["part", "whole"])
        broken = tmp_path / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(tmp_path / f"{name}-0", broken)
        victim = rng.choice(list(files(broken)))
        damage = rng.choice(DAMAGES)
        relative = victim.relative_to(broken)
        damage(victim, tmp_path / f"{name}-1" / relative, rng)
        try:
            found = train(broken, 0)
        except InputError:
            kinds["error"] += 1
        else:
            equal = same([wholes[0]], [found]) if train is run else found == wholes[0]
            assert equal, f"try {number}: {damage.__name__} of {name}/{relative}"
            kinds["equal"] += 1
    assert min(kinds.values()) > 0, kinds
    if train is run:
        assert bare(wholes[0].records) != bare(wholes[1].records)
