"""Timings: counts by hand, and a run of the command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import WORKLOADS, Machine, measure_all, time_rounds
from fedzmg import InputError, Task
from fedzmg.experiment.estimate import step_operations
from golden_problems import random_task

CPU = torch.device("cpu")


def dense(inputs: int, outputs: int, batch: int, sizes: tuple[int, ...] = (8, 8, 8)) -> Task:
    net = nn.Linear(inputs, outputs)
    return random_task(net, sizes, inputs=inputs, classes=outputs, cohort=2, batch_size=batch)


def test_operations_of_two_dense_layers() -> None:
    """Forward, and the gradients of the weights and of hidden units; the inputs need none."""
    net = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 3))
    task = random_task(net, (8, 8), inputs=10, classes=3, cohort=2, batch_size=8)
    assert step_operations(task) == 2 * 8 * (2 * (10 * 4 + 4 * 3) + 4 * 3)


def test_the_papers_models_have_the_operations_of_their_layers() -> None:
    task = WORKLOADS["cifar100"](clients=10)
    forward = 2 * 16 * (
        32 * 32 * 27 * 32 + 32 * 32 * 288 * 32 + 16 * 16 * 288 * 64 + 16 * 16 * 576 * 64
        + 4096 * 512 + 512 * 100
    )  # fmt: skip
    first = 2 * 16 * 32 * 32 * 27 * 32
    assert step_operations(task) == 3 * forward - first


def test_times_are_compared_with_the_machine() -> None:
    machine = Machine(flops=1e9, bandwidth=1e9)
    got = time_rounds(dense(10, 4, batch=4), machine, engine="vectorized", rounds=2, device=CPU)
    assert (got["engine"], got["clients"], got["trials"], got["steps"]) == ("vectorized", 2, 1, 4)
    assert got["padded_over_useful"] == 1.0
    assert got["bytes"] == 2 * (2 * 4 * (10 * 4 + 4) + 8 * 8 * (10 + 1))  # examples are 64-bit
    assert got["floor_ms"] == pytest.approx(1e3 * max(got["flops"], got["bytes"]) / 1e9)
    assert got["over_floor"] == pytest.approx(got["round_ms"] / got["floor_ms"])
    assert got["matmul_share"] == pytest.approx(got["flops"] / 1e9 / (got["round_ms"] / 1e3))


def test_padding_of_ragged_clients_is_counted() -> None:
    machine = Machine(1e9, 1e9)
    task = dense(3, 2, batch=1, sizes=(9, 1))
    # Clients of nine steps and of one step; a lone client runs beside a copy.
    got = time_rounds(task, machine, engine="vectorized", rounds=1, device=CPU)
    assert got["padded_over_useful"] == pytest.approx((2 + 8 * 2) / 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["nope"], ["auto"], ["float32"], [1]), "workload 'nope'"),
        ((["mlp"], ["fast"], ["float32"], [1]), "engine 'fast'"),
        ((["mlp"], ["auto"], ["fp8"], [1]), "precision 'fp8'"),
        ((["mlp"], ["auto"], ["float32"], ["x"]), "trials = 'x'"),
    ],
)
def test_bad_input_is_rejected_before_anything_runs(
    arguments: tuple[list[str], ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        list(measure_all(*arguments, rounds=1, algorithm="fedzmg", device=CPU))  # type: ignore[call-arg, arg-type]


def test_command_prints_a_table_and_keeps_json(tmp_path: Path) -> None:
    kept = tmp_path / "bench.json"
    words = ["mlp", "--engine", "vectorized", "--rounds", "1", "--device", "cpu", "--out", kept]
    script = Path(__file__).parents[2] / "benchmarks" / "bench.py"
    done = subprocess.run(
        [sys.executable, script, *words], env={**os.environ, "COLUMNS": "60"}, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    assert "floor" in done.stdout
    table = [line for line in done.stdout.splitlines() if "ms per trial" not in line]
    assert max(map(len, table)) <= 60
    assert "…" not in done.stdout
    data = json.loads(kept.read_text())
    assert data["timings"][0]["workload"] == "mlp"
    made = data["environment"]
    assert made["torch"] == torch.__version__
    assert made["commit"] is None or re.fullmatch(r"[0-9a-f]{40}", made["commit"])
    assert made["dirty"] in (None, True, False)
    assert datetime.fromisoformat(made["date"]) <= datetime.now(UTC)
