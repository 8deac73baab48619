"""Time rounds of a workload and compare them with the machine's peak rates."""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, get_args

import torch

from fedzmg.bench.machine import Machine, host_peak_mib, measure, reset_host_peak, step_cost, wait
from fedzmg.bench.workloads import WORKLOADS
from fedzmg.errors import InputError, unknown
from fedzmg.models.kernels import PRECISIONS
from fedzmg.models.kernels.precision import Precision
from fedzmg.provenance import provenance
from fedzmg.simulation import EngineName, Simulation, Trial
from fedzmg.tasks.task import Task

NEVER = 10**9
BLOCKS = 3


@dataclass(frozen=True)
class Timing:
    """Measurements of one configuration; times are medians without evaluation."""

    workload: str
    algorithm: str
    engine: str
    """Engine that was chosen."""
    precision: str
    trials: int
    clients: int
    """Clients per round, over all trials."""
    steps: int
    """Local steps per round, over all clients."""
    cold_seconds: float
    """Time to the end of the first round: set-up, compilation, CUDA graph capture."""
    round_ms: float
    trial_round_ms: float
    steps_per_second: float
    flops: float
    """Operations per round."""
    bytes: float
    matmul_share: float
    """Share of the machine's rate of matrix products."""
    bandwidth_share: float
    floor_ms: float
    """Lower bound: the longer of all operations and all bytes at the machine's rates."""
    over_floor: float
    peak_mib: float
    """Peak GPU memory; without a GPU, peak memory of the process."""
    padded_over_useful: float
    """Steps computed, padding included, over the clients' own steps."""
    deterministic: bool = False
    outside_steps: float | None = None
    """Share of a round that a GPU spends on planning, merging and logging."""

    def as_dict(self) -> dict[str, Any]:
        """Convert for JSON."""
        return asdict(self)


def time_rounds(
    task: Task,
    machine: Machine,
    *,
    algorithm: str = "fedzmg",
    engine: EngineName = "auto",
    precision: Precision = "float32",
    trials: int = 1,
    rounds: int = 5,
    deterministic: bool = False,
    device: torch.device,
) -> Timing:
    """Train a few rounds, :data:`BLOCKS` times, and measure them.

    Rounds are timed together: a GPU computes the next one while the host reads the last.
    """
    task = replace(task, protocol=replace(task.protocol, eval_every=NEVER))
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_host_peak()
    began = time.perf_counter()
    packed = [Trial.of(algorithm, seed=0, client_lr=0.01 * (1 + i / 1000)) for i in range(trials)]
    simulation = Simulation(
        task, packed, rounds=NEVER, device=device, dtype=torch.float32, engine=engine,
        precision=precision, deterministic=deterministic,
    )  # fmt: skip
    simulation.run_round()
    wait(device)
    cold = time.perf_counter() - began
    simulation.run_round()  # finishes deferred set-up
    seconds, steps, on_steps = [], [], []
    for _ in range(BLOCKS):
        wait(device)
        simulation.step_seconds()
        began = time.perf_counter()
        reports = [simulation.run_round() for _ in range(rounds)]
        wait(device)
        seconds.append((time.perf_counter() - began) / rounds)
        steps.append(sum(r.steps for report in reports for r in report.records) / rounds)
        spent = simulation.step_seconds()
        on_steps.append(None if spent is None else spent / rounds)
    cost = step_cost(task, packed[0].algorithm)
    median, done = statistics.median(seconds), statistics.mean(steps)
    flops, moved = cost.flops * done, cost.bytes * done
    floor = max(flops / machine.flops, moved / machine.bandwidth)
    return Timing(
        workload=task.name,
        algorithm=algorithm,
        engine=simulation.choice.path,
        precision=precision,
        trials=trials,
        clients=trials * task.protocol.cohort,
        steps=round(done),
        cold_seconds=cold,
        round_ms=1e3 * median,
        trial_round_ms=1e3 * median / trials,
        steps_per_second=done / median,
        flops=flops,
        bytes=moved,
        matmul_share=flops / median / machine.flops,
        bandwidth_share=moved / median / machine.bandwidth,
        floor_ms=1e3 * floor,
        over_floor=median / floor,
        peak_mib=torch.cuda.max_memory_allocated(device) / 2**20
        if device.type == "cuda"
        else host_peak_mib(),
        padded_over_useful=simulation.padding(),
        deterministic=simulation.deterministic,
        outside_steps=None if None in on_steps else 1 - statistics.median(on_steps) / median,  # type: ignore[type-var, operator]
    )


def measure_all(
    workloads: Sequence[str],
    engines: Sequence[str],
    precisions: Sequence[str],
    trials: Sequence[int | str],
    *,
    rounds: int,
    algorithm: str,
    deterministic: bool = False,
    device: torch.device,
) -> Iterator[Timing]:
    """Time every combination."""
    for kind, names, known in (
        ("workload", workloads, list(WORKLOADS)),
        ("engine", engines, get_args(EngineName)),
        ("precision", precisions, PRECISIONS),
    ):
        for name in names:
            if name not in known:
                raise unknown(kind, name, known)
    for count in trials:
        if not isinstance(count, int) or count < 1:
            raise InputError(f"trials = {count!r}: expected whole numbers of at least 1")
    for precision in precisions:
        machine = measure(device, precision)  # type: ignore[arg-type]
        for name in workloads:
            task = WORKLOADS[name].build()
            for engine, count in itertools.product(engines, trials):
                yield time_rounds(
                    task, machine, algorithm=algorithm, engine=engine,  # type: ignore[arg-type]
                    precision=precision, trials=count, rounds=rounds,  # type: ignore[arg-type]
                    deterministic=deterministic, device=device,
                )  # fmt: skip


def environment(device: torch.device) -> dict[str, Any]:
    """Describe machine, versions, commit and date."""
    machine = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    return {
        "machine": machine,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(),
    }
