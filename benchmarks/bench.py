"""Time rounds on random data of a task's shape: speed, memory, distance to the floor.

Workloads are mlp, cifar100, emnist62, shakespeare and ragged-text; by default those that suit the
device. Engines, precisions and numbers of trials per pack may be several, separated by commas::

    python benchmarks/bench.py cifar100 --precision tf32 --trials 1,10
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest import mock

import numpy as np
import psutil
import torch
from torch import nn

from fedzmg import algorithms
from fedzmg.engine.vectorized import MIN_WIDTH, Vectorized, step_widths
from fedzmg.errors import InputError, check_names
from fedzmg.experiment.estimate import step_operations
from fedzmg.kernels import PRECISIONS, rounding
from fedzmg.kernels.precision import DEFAULT_PRECISION, Precision, timer
from fedzmg.models.networks import CharGRU, cifar100_cnn, emnist_cnn, mlp
from fedzmg.provenance import environment
from fedzmg.report.tables.table import Table
from fedzmg.simulation import EngineName, RoundReport, Simulation, Trial, resolve_device
from fedzmg.storage.formats import write_json
from fedzmg.tasks.inputs import token_ids, unit_pixels
from fedzmg.tasks.task import Task
from fedzmg.terminal.render import Terminal, render
from fedzmg.tree import num_bytes


class Machine(NamedTuple):
    """Peak operations and bytes per second."""

    flops: float
    bandwidth: float


def measure(device: torch.device, precision: Precision) -> Machine:
    """Time a large matrix product in this precision and a large copy."""
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 1024
    kind = torch.bfloat16 if precision == "bf16" and on_gpu else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))

    def best(function: Callable[[], object]) -> float:
        function()
        return min(seconds(function, device, 3) for _ in range(5))

    with rounding(precision):
        product = best(lambda: a @ b)
    source = torch.zeros((2**30 if on_gpu else 2**26) // 4, device=device)
    target = torch.empty_like(source)
    copy = best(lambda: target.copy_(source))
    return Machine(2 * size**3 / product, 2 * source.numel() * 4 / copy)


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(function: Callable[[], object], device: torch.device, calls: int) -> float:
    """Time calls in a row; return the time of one."""
    wait(device)
    began = time.perf_counter()
    for _ in range(calls):
        function()
    wait(device)
    return (time.perf_counter() - began) / calls


def host_peak_mib() -> float:
    """Return the process's peak memory in MiB; without ``/proc``, its present memory."""
    with contextlib.suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**10
    return float(psutil.Process().memory_info().rss) / 2**20


def reset_host_peak() -> None:
    """Reset the peak to the current size, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def steps_timed(simulation: Simulation) -> Iterator[list[tuple[torch.cuda.Event, ...]]]:
    """Note the begin and the end of every replayed step on the device's own clock."""
    spans: list[tuple[torch.cuda.Event, ...]] = []
    engine = simulation.engine
    graphs = engine.graphs if isinstance(engine, Vectorized) else None
    if graphs is None or simulation.device.type != "cuda":
        yield spans
        return
    replay = graphs.replay

    def timed(clients: int, width: int) -> None:
        span = timer(), timer()
        span[0].record()
        replay(clients, width)
        span[1].record()
        spans.append(span)

    with mock.patch.object(graphs, "replay", timed):
        yield spans


def padding(simulation: Simulation) -> float:
    """Relate the client steps that a round computes to those that were planned."""
    engine, batches = simulation.engine, simulation.planner.batches(1)
    lengths, computed = [len(batch.stream) for batch in batches], 0
    if not isinstance(engine, Vectorized):
        return 1.0
    size = engine.chunk or len(lengths)
    for first in range(0, len(lengths), size):
        own = sorted(lengths[first : first + size], reverse=True)
        own += own[-1:] * (MIN_WIDTH - len(own))
        computed += sum(step_widths(tuple(own), engine.compiled or engine.cuda_graph))
    return computed / max(sum(lengths), 1)


NEVER = 10**9
ON_CPU, ON_GPU = ["mlp"], ["cifar100", "emnist62", "shakespeare"]
BLOCKS = 3


def time_rounds(
    task: Task, machine: Machine, *, algorithm: str = "fedzmg", engine: EngineName = "auto",
    precision: Precision = DEFAULT_PRECISION, trials: int = 1, rounds: int = 5,
    deterministic: bool = False, device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Train a few rounds, :data:`BLOCKS` times, and measure them.

    Rounds are timed together: a GPU computes the next one while the host reads the last.

    Returns:
        Values for JSON. Times are medians without evaluation; ``cold_seconds`` is the time to the
        end of the first round, with compilation and CUDA graph capture. ``clients``, ``steps``,
        ``flops`` and ``bytes`` count a round of all trials. Bytes are those of an algorithm that
        keeps everything else on the chip: examples, and every client's model, written and read once
        to merge it. ``matmul_share`` is that of the machine's peak; ``floor_ms`` is the longer of
        all operations and all bytes at its peaks. ``peak_mib`` is GPU memory, without a GPU that of
        the process. ``padded_over_useful`` relates steps computed to steps of clients;
        ``outside_steps`` is a GPU's share of everything but replayed steps: planning, merging,
        logging, and waiting between steps.
    """
    task = replace(task, protocol=replace(task.protocol, eval_every=NEVER))
    on_gpu = device.type == "cuda"
    if on_gpu:
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
    reports: list[RoundReport] = []
    times = [
        seconds(lambda: reports.append(simulation.run_round()), device, rounds)
        for _ in range(BLOCKS)
    ]
    with steps_timed(simulation) as spans:
        whole = seconds(simulation.run_round, device, rounds)
    spent = sum(begin.elapsed_time(end) for begin, end in spans) / 1e3 / rounds
    median = statistics.median(times)
    done = sum(one.steps for report in reports for one in report.records) / len(reports)
    clients, data = trials * task.protocol.cohort, num_bytes(task.train.examples)
    flops = done * step_operations(task)
    moved = 2 * clients * task.model_bytes + clients * data / len(task.train)
    floor = max(flops / machine.flops, moved / machine.bandwidth)
    return {
        "workload": task.name, "algorithm": algorithm, "engine": simulation.choice.path,
        "precision": simulation.precision, "trials": trials, "clients": clients,
        "steps": round(done), "cold_seconds": cold, "round_ms": 1e3 * median,
        "trial_round_ms": 1e3 * median / trials, "steps_per_second": done / median,
        "flops": flops, "bytes": moved, "matmul_share": flops / median / machine.flops,
        "floor_ms": 1e3 * floor, "over_floor": median / floor,
        "peak_mib": torch.cuda.max_memory_allocated(device) / 2**20 if on_gpu else host_peak_mib(),
        "padded_over_useful": padding(simulation), "deterministic": simulation.deterministic,
        "outside_steps": 1 - spent / whole if spans else None,
    }  # fmt: skip


def _task(name: str, model: nn.Module, x: Any, y: Any, sizes: Any, tests: int, **more: Any) -> Task:
    """Build a task from clients of these sizes; the first examples test it."""
    owner, test = np.repeat(np.arange(len(sizes)), sizes), (x[:tests], y[:tests])
    return Task.from_arrays(model, x, y, owner, test=test, name=name, cohort=10, epochs=4, **more)


def _images(
    name: str, model: Callable[[], nn.Module], shape: tuple[int, ...], classes: int, each: int,
    *, clients: int,
) -> Task:  # fmt: skip
    rng, images = np.random.default_rng(0), {"prepare": unit_pixels, "init": "keras"}
    x = rng.integers(0, 256, (clients * each, *shape), dtype=np.uint8)
    y = rng.integers(0, classes, len(x))
    sizes = [each] * clients
    return _task(name, model(), x, y, sizes, 1000, batch_size=16, straddle=True, **images)


def _text(name: str, ragged: bool, *, clients: int = 100) -> Task:
    rng, tokens = np.random.default_rng(0), {"prepare": token_ids, "init": "keras"}
    sizes = np.full(clients, 48)
    if ragged:
        sizes = np.maximum(8, np.exp(rng.normal(3.0, 1.2, clients)).astype(int))
    text = rng.integers(0, 66, (int(sizes.sum()), 101)).astype(np.uint8)
    x, y, model = text[:, :-1], text[:, 1:].astype(np.int64), CharGRU(66, 256, 1024)
    return _task(name, model, x, y, sizes, 64, batch_size=8, keep_partial=False, **tokens)


def _vectors(*, clients: int = 100) -> Task:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(clients * 40, 784)).astype(np.float32)
    y = rng.integers(0, 10, len(x))
    return _task("mlp", mlp(784, 64, 48, outputs=10), x, y, [40] * clients, 200, batch_size=20)


WORKLOADS: dict[str, Callable[..., Task]] = {
    # 54,000 parameters, for a laptop's CPU.
    "mlp": _vectors,
    # The paper's models, with 25, 50 and 24 steps a client.
    "cifar100": partial(_images, "cifar100", cifar100_cnn, (3, 32, 32), 100, 100, clients=500),
    "emnist62": partial(_images, "emnist62", emnist_cnn, (28, 28), 62, 200, clients=340),
    "shakespeare": partial(_text, "shakespeare", False),
    # Volumes of roles differ by two orders of magnitude.
    "ragged-text": partial(_text, "ragged-text", True),
}
"""Builders by name; all take a number of ``clients``."""


def measure_all(
    workloads: Sequence[str], engines: Sequence[str], precisions: Sequence[str],
    trials: Sequence[int | str], *, device: torch.device, **options: Any,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Time every combination; ``options`` are those of :func:`time_rounds`."""
    check_names("workload", workloads, WORKLOADS)
    check_names("engine", engines, get_args(EngineName))
    check_names("precision", precisions, PRECISIONS)
    for count in trials:
        if not str(count).isdecimal() or len(str(count)) > 4 or int(count) < 1:
            raise InputError(f"trials = {count!r}: expected whole numbers from 1 to 9999")
    for precision in precisions:
        machine = measure(device, precision)  # type: ignore[arg-type]
        for name in workloads:
            task = WORKLOADS[name]()
            for engine, count in itertools.product(engines, trials):
                setting: Any = {"engine": engine, "precision": precision, "trials": int(count)}
                yield time_rounds(task, machine, device=device, **setting, **options)


def show(data: dict[str, Any]) -> None:
    """Print a table of timings."""
    facts = data["environment"]
    heads = ("workload", "ms / round", "ms / trial round", "steps / s", "of matmul", "over floor",
             "not steps", "peak MiB", "padded", "cold s")  # fmt: skip
    cells = [
        [workload(t), f"{t['round_ms']:.1f}", f"{t['trial_round_ms']:.2f}",
         f"{t['steps_per_second']:,.0f}", f"{t['matmul_share']:.1%}", f"{t['over_floor']:.1f} x",
         "" if t.get("outside_steps") is None else f"{t['outside_steps']:.1%}",
         f"{t['peak_mib']:,.0f}", f"{t['padded_over_useful']:.2f}", f"{t['cold_seconds']:.1f}"]
        for t in data["timings"]
    ]  # fmt: skip
    console = Terminal()
    console.print(
        render(
            [Table.of(f"{facts['machine']}, torch {facts['torch']}", heads, cells)], console.width
        )
    )


def workload(timing: dict[str, Any]) -> str:
    """Name what was timed."""
    return f"{timing['workload']} {timing['engine']} {timing['precision']} x {timing['trials']}"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--precision", default=DEFAULT_PRECISION)
    parser.add_argument("--trials", default="1")
    parser.add_argument("--rounds", type=int, default=5, help="per measurement; there are three")
    parser.add_argument("--algorithm", default="fedzmg")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = resolve_device(given.device)
    found = []
    try:
        algorithms.get(given.algorithm)
        for timing in measure_all(
            given.workloads or (ON_CPU if device.type == "cpu" else ON_GPU),
            given.engine.split(","), given.precision.split(","), given.trials.split(","),
            device=device, rounds=given.rounds, algorithm=given.algorithm,
            deterministic=given.deterministic,
        ):  # fmt: skip
            found.append(timing)
            speed = f"{timing['trial_round_ms']:.2f} ms per trial and round"
            print(f"{workload(timing)}: {speed}", flush=True)
    except InputError as error:
        parser.error(str(error))
    command = " ".join(["python", *sys.argv])
    data = {"environment": {**environment(device), "command": command}, "timings": found}
    show(data)
    if given.out:
        write_json(given.out, data)


if __name__ == "__main__":
    main()
