"""Benchmarks that other systems publish: the networks are theirs, and the command runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PARAMETERS = {
    "pfl-cifar10": 1_626_442, "pfl-cifar10-dirichlet": 1_626_442, "flute-mnist": 7_850,
    "flute-femnist": 1_206_590, "flute-cifar100": 11_227_812, "flute-shakespeare": 822_570,
    "blazefl-cnn": 62_006, "blazefl-resnet18": 11_181_642,
}  # fmt: skip
"""Those of the systems' own networks; ResNet-18 as in torchvision."""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] in ("rivals", "plain_loop")]:
        del sys.modules[name]


def test_networks_are_those_of_the_systems() -> None:
    from rivals.published import BENCHMARKS as PUBLISHED

    sources = {name: each.build(scale=0.001).model.source for name, each in PUBLISHED.items()}
    found = {name: sum(p.numel() for p in s.parameters()) for name, s in sources.items()}
    assert found == PARAMETERS


def test_a_training_beyond_its_time_limit_is_extrapolated() -> None:
    from rivals.run import train

    options = {"scale": 0.01, "device": "cpu", "precision": "float32"}
    found = train("flute-mnist", 101, time.time(), seconds=0.0, **options)
    assert found["extrapolated"]
    assert found["rounds_done"] == 2
    rest = found["seconds"] - found["cold_seconds"]
    assert rest == pytest.approx(100 * found["round_ms"] / 1e3)


@pytest.mark.slow
def test_the_command_times_a_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "rivals.json"
    options = ["--device=cpu", "--scale=0.01", "--rounds=3", "--loop-rounds=1", f"--out={out}"]
    script = str(BENCHMARKS / "rivals" / "run.py")
    done = subprocess.run(
        [sys.executable, script, "flute-mnist", *options],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    kept = json.loads(out.read_text())
    assert {"machine", "torch", "command", "date"} <= kept["environment"].keys()
    [(name, found)] = kept["benchmarks"].items()
    assert (name, found["rounds"], found["fedzmg"]["rounds_done"]) == ("flute-mnist", 3, 3)
    assert 0 < found["fedzmg"]["cold_seconds"] <= found["fedzmg"]["seconds"]
    assert found["loop"]["seconds"] > 0
    assert done.stdout.splitlines()[-1].startswith("| flute-mnist | 3 | - |")
