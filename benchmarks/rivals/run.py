"""Time benchmarks that other systems publish: fedzmg as a whole, a plain PyTorch loop in part.

    python benchmarks/rivals/run.py pfl-cifar10 flute-mnist --device cuda --precision tf32
    python benchmarks/rivals/run.py flute-femnist --device cpu --scale 0.01 --rounds 3    # a trial

Our time is that of a whole training in a new process with empty caches of compiled kernels: from
its start, over imports, data, compilation and evaluations, to the last round. The loop is timed for
some rounds after a warm-up, and for one evaluation; its whole training is extrapolated from them.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[0] = str(Path(__file__).resolve().parents[1])

from fedzmg.errors import InputError
from fedzmg.kernels import rounding
from fedzmg.provenance import environment
from fedzmg.simulation import RoundPlanner, RoundReport, Trial, resolve_device, simulate
from fedzmg.storage.formats import write_json
from plain_loop import PlainLoop, _timed
from rivals.published import BENCHMARKS

CACHES = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


class Enough(Exception):
    """Signal that the time limit is reached."""


def train(
    name: str, rounds: int, began: float, *, scale: float, device: str, precision: Any,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Train a benchmark with fedzmg; beyond the time limit, extrapolate.

    ``began`` is the Unix time at which the process was started.
    """
    ends: list[float] = []
    task = BENCHMARKS[name].build(scale=scale)
    facts: dict[str, Any] = {"data_seconds": time.time() - began}

    def observe(report: RoundReport) -> None:
        ends.append(time.time() - began)
        if report.records[0].diverged:
            raise SystemExit(f"{name}: diverged in round {report.round}, its time means nothing")
        facts["engine"] = report.simulation.choice.path
        if ends[-1] > seconds and len(ends) > 1:
            raise Enough

    trial = Trial.of("fedavg", 0, client_lr=BENCHMARKS[name].lr)
    try:
        simulate(task, trial, rounds=rounds, device=device, precision=precision, observer=observe)
        ends[-1] = time.time() - began  # the last model is there
    except Enough:
        pass
    left = rounds - len(ends)
    each = (ends[-1] - ends[0]) / max(1, len(ends) - 1)
    return {
        **facts, "rounds_done": len(ends), "cold_seconds": ends[0], "round_ms": 1e3 * each,
        "seconds": ends[-1] + left * each, "extrapolated": left > 0,
        "parameters": sum(p.numel() for p in task.model.params().values()),
    }  # fmt: skip


def time_loop(
    name: str, rounds: int, timed: int, *, scale: float, device: str, precision: Any,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Time rounds and an evaluation of the plain loop, and extrapolate to the whole training."""
    task, place = BENCHMARKS[name].build(scale=scale), resolve_device(device)
    loop = PlainLoop(task, place, precision, lr=BENCHMARKS[name].lr)
    plan = RoundPlanner(replace(task, protocol=replace(task.protocol, rounds=rounds)), [0])
    x, y = task.test.to(place, torch.float32)

    @torch.no_grad()
    def evaluate() -> None:
        loop.model.eval()
        for inputs, targets in zip(x.split(1000), y.split(1000), strict=True):
            (loop.model(task.prepare(inputs, torch.float32)).argmax(-1) == targets).sum()
        loop.model.train()

    began, times = time.perf_counter(), []
    with rounding(precision):
        for number in range(1, min(timed, max(rounds - 1, 1)) + 2):
            batches = plan.batches(number)
            times.append(_timed(lambda b=batches: loop.run_round(b), place)[0])  # type: ignore[misc]
            if time.perf_counter() - began > seconds and number > 1:
                break
        evaluate()
        evaluation = _timed(evaluate, place)[0]
    each = statistics.median(times[1:])
    evaluations = len({*range(1, rounds + 1, task.protocol.eval_every), rounds})
    return {
        "rounds_timed": len(times) - 1, "round_ms": 1e3 * each, "evaluation_ms": 1e3 * evaluation,
        "seconds": rounds * each + evaluations * evaluation, "extrapolated": True,
    }  # fmt: skip


def in_new_process(function: Callable[..., dict[str, Any]], *args: Any, **options: Any) -> Any:
    """Call a function in a process of its own, with empty caches of compiled kernels."""
    with tempfile.TemporaryDirectory(prefix="rivals-", ignore_cleanup_errors=True) as folder:
        os.environ.update({name: os.path.join(folder, name) for name in CACHES})
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawned) as pool:
            return pool.submit(function, *args, **options).result()


def clock(seconds: float) -> str:
    """Format a time as the systems print theirs."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


COLUMNS = "benchmark", "rounds", "printed by others", "plain loop", "fedzmg", "of it cold start"


def cells(name: str, found: dict[str, Any]) -> list[str]:
    """Format a row of the table."""
    loop, ours = found.get("loop"), found["fedzmg"]
    return [
        name, f"{found['rounds']:,}", found["printed"] or "-",
        f"{clock(loop['seconds'])} (from {loop['rounds_timed']} rounds)" if loop else "-",
        clock(ours["seconds"])
        + (f" (from {ours['rounds_done']} rounds)" if ours["extrapolated"] else ""),
        clock(ours["cold_seconds"]),
    ]  # fmt: skip


def main() -> None:
    """Measure, print a Markdown table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmarks", nargs="+", choices=list(BENCHMARKS), metavar="NAME",
                        help=", ".join(BENCHMARKS))  # fmt: skip
    parser.add_argument("--rounds", type=int, help="instead of the published number")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--precision", default="tf32", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--seconds", type=float, default=420, help="limit of our training")
    parser.add_argument("--loop-rounds", type=int, default=20, help="timed rounds; 0: no loop")
    parser.add_argument("--loop-seconds", type=float, default=60, help="limit of the loop")
    parser.add_argument("--scale", type=float, default=1.0, help="share of all clients")
    parser.add_argument("--out", type=Path, help="keep the figures in this JSON file")
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: must be at least 1")
    if not 0 < arguments.scale <= 1:
        parser.error(f"--scale {arguments.scale}: must be above 0 and at most 1")
    try:
        device = resolve_device(arguments.device)
    except InputError as error:
        parser.error(str(error))
    command = shlex.join(["python", *sys.argv])
    kept: dict[str, Any] = {}
    common: dict[str, Any] = {
        "scale": arguments.scale, "device": device.type, "precision": arguments.precision
    }  # fmt: skip
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for name in arguments.benchmarks:
        chosen, rounds = BENCHMARKS[name], arguments.rounds or BENCHMARKS[name].rounds
        whole = rounds == chosen.rounds and arguments.scale == 1
        printed = {"printed": chosen.printed if whole else "", "source": chosen.source}
        found = kept[name] = {"rounds": rounds, **printed, **common}
        found["fedzmg"] = in_new_process(
            train, name, rounds, time.time(), seconds=arguments.seconds, **common
        )
        if arguments.loop_rounds:
            found["loop"] = in_new_process(
                time_loop, name, rounds, arguments.loop_rounds, seconds=arguments.loop_seconds,
                **common,
            )  # fmt: skip
        print(f"| {' | '.join(cells(name, found))} |", flush=True)
        if arguments.out:
            facts = {**environment(device), "command": command}
            write_json(arguments.out, {"environment": facts, "benchmarks": kept})


if __name__ == "__main__":
    main()
