"""Time of federated rounds in a plain PyTorch loop and in fedzmg, in one run.

    python benchmarks/plain_loop.py mlp logistic resnet --device cpu --threads 1
    python benchmarks/plain_loop.py cifar100 --device cuda --precision tf32 --algorithm fedzmg

The loop trains one client after another with ``torch.optim.SGD``, on data that is already on the
device, with the clients and batches of our plan, and averages state dictionaries. Planning is not
part of its time. Rounds of all paths are interleaved: a turn is one round of each, on a GPU
several, since the host prepares one while the GPU computes another. ``speed`` is the median over
turns of the loop's time over ours; ``cpu_speed`` is the same of processor time, which a busy
machine changes less. Our first round includes building a simulation and choosing its path.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bench import NEVER, WORKLOADS, wait
from fedzmg import tasks
from fedzmg.data.plan import ClientBatch
from fedzmg.kernels import onednn, rounding
from fedzmg.models import networks
from fedzmg.models.objective import cross_entropy
from fedzmg.provenance import environment
from fedzmg.simulation import EnginePlanner, RoundPlanner, Simulation, Trial, resolve_device
from fedzmg.tasks.task import Task

Batch = tuple[torch.Tensor, torch.Tensor]
CPU = torch.device("cpu")
FEWEST_TURNS = 3
TOGETHER = 5  # rounds of a turn on a GPU
WITHOUT, LAST = "plain without oneDNN", "plain channels last"
PEAK = 494e12  # operations per second of an H200 in TF32
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def mean_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute torch's own cross-entropy, averaged over examples and positions."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def plain_round(
    model: nn.Module,
    cohort: Sequence[Iterable[Batch]],
    *,
    lr: float,
    momentum: float = 0.0,
    bf16: bool = False,
    loss: Loss = mean_cross_entropy,
    weights: Sequence[float] = (),
) -> int:
    """Train one round of federated averaging as a loop over clients and batches.

    The weighted mean of the clients' models becomes the model; without ``weights`` all are equal.
    Returns the number of local steps.
    """
    params = list(model.parameters())
    start = {name: value.clone() for name, value in model.state_dict().items()}
    averaged = [name for name, value in start.items() if value.is_floating_point()]
    total = [torch.zeros_like(start[name]) for name in averaged]
    shares = [w / sum(weights) for w in weights] or [1 / len(cohort)] * len(cohort)
    steps = 0
    for batches, share in zip(cohort, shares, strict=True):
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(params, lr=lr, momentum=momentum)
        for inputs, targets in batches:
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                out = model(inputs)
            optimizer.zero_grad()
            loss(out.to(params[0].dtype), targets).backward()
            optimizer.step()
            steps += 1
        trained = model.state_dict()
        torch._foreach_add_(total, [trained[name] for name in averaged], alpha=share)
    model.load_state_dict({**model.state_dict(), **dict(zip(averaged, total, strict=True))})
    return steps


class PlainLoop:
    """The plain loop on a task, with the batches of our plan."""

    def __init__(
        self,
        task: Task,
        device: torch.device,
        precision: str = "float32",
        *,
        channels_last: bool = False,
        **options: float,
    ) -> None:
        self.task, self.device, self.options = task, device, options
        self.bf16 = precision == "bf16"
        self.format = torch.channels_last if channels_last else torch.preserve_format
        self.model: nn.Module = copy.deepcopy(task.model.source).to(device).train()
        self.model.to(memory_format=self.format)
        self.examples = task.train.to(device, torch.float32).examples

    def run_round(self, cohort: Sequence[ClientBatch]) -> int:
        """Train one round."""
        own = self.task.objective.loss
        return plain_round(
            self.model,
            [self._batches(client) for client in cohort],
            loss=mean_cross_entropy if own is cross_entropy else lambda *both: own(*both).mean(),
            weights=[client.examples for client in cohort],
            bf16=self.bf16,
            **self.options,  # type: ignore[arg-type]
        )

    def _batches(self, client: ClientBatch) -> Iterator[Batch]:
        x, y = self.examples
        for indices, count in zip(client.stream.indices, client.stream.counts, strict=True):
            rows = torch.from_numpy(indices[:count]).to(self.device)
            inputs = self.task.prepare(x[rows], torch.float32)
            images = isinstance(inputs, torch.Tensor) and inputs.ndim == 4
            yield inputs.to(memory_format=self.format) if images else inputs, y[rows]


class TimedPlanner(EnginePlanner):
    """Planner that notes how long it takes to choose."""

    seconds = 0.0

    def plan(self, *args: Any, **options: Any) -> None:
        began = time.perf_counter()
        super().plan(*args, **options)
        self.seconds = time.perf_counter() - began


def compare(
    task: Task,
    engines: Sequence[str] = ("sequential", "vectorized", "auto"),
    *,
    turns: int = 7,
    seconds: float = math.inf,
    rounds: int = 100,
    lr: float = 0.01,
    momentum: float = 0.0,
    trial: Trial | None = None,
    device: torch.device = CPU,
    precision: str = "float32",
) -> dict[str, dict[str, Any]]:
    """Time paired rounds of a plain loop and of engines on a task, without evaluation.

    Args:
        task: any task.
        engines: names of paths, or ``auto``.
        turns: measured turns of each.
        seconds: time after which no further turn begins once there are three.
        rounds: planned length of the training, which ``auto`` takes into account.
        lr: learning rate.
        momentum: momentum of the loop's clients.
        trial: our algorithm and seed; by default the same, FedAvg.
        device: CPU or GPU.
        precision: rounding of layers on a GPU.

    Returns:
        Values for JSON by path, ``plain`` among them, on a CPU also without oneDNN and with
        convolutions that have channels last: ``first_s``
        (all up to the end of the first round), ``round_ms`` and ``cpu_ms`` (medians), ``speed`` and
        ``cpu_speed`` (median ratios to the loop's turns, above 1 is faster), and ``peak_share``,
        what the loop's products use of an H200's peak. Of engines also ``choosing_s``, its share of
        the planned training, ``total_speed`` (the loop's time for all of it over ours, the start
        included), ``path``, ``onednn`` and ``reason``.
    """
    quiet = replace(task, protocol=replace(task.protocol, eval_every=NEVER))
    own = {"client_lr": lr} | ({"client_momentum": momentum} if momentum else {})
    chosen = trial or Trial.of("fedavg", 0, **own)
    plan = RoundPlanner(quiet, [chosen.seed])
    own_loops = ("plain", WITHOUT) if device.type == "cpu" else ("plain",)
    if device.type == "cpu" and any(isinstance(m, nn.Conv2d) for m in task.model.source.modules()):
        own_loops = (*own_loops, LAST)
    each = 1 if device.type == "cpu" else TOGETHER
    found: dict[str, dict[str, Any]] = {path: {} for path in (*own_loops, *engines)}
    rounds_of: dict[str, Callable[[list[ClientBatch]], object]] = {}

    def first(path: str) -> None:
        if path in own_loops:
            loop = PlainLoop(
                quiet, device, precision, channels_last=path == LAST, lr=lr, momentum=momentum
            )
            rounds_of[path] = onednn(False)(loop.run_round) if path == WITHOUT else loop.run_round
        else:
            planner = TimedPlanner(path)  # type: ignore[arg-type]
            made = Simulation(
                quiet, [chosen], rounds=max(rounds, (turns + 1) * each + 3), device=device,
                dtype=torch.float32, engine=planner, precision=precision,  # type: ignore[arg-type]
            )  # fmt: skip
            made.round = 1  # which alone would be evaluated
            rounds_of[path] = lambda _: made.run_round()
            found[path].update(choosing_s=planner.seconds, **vars(made.choice))
        rounds_of[path](plan.batches(2))

    times: dict[str, list[tuple[float, float]]] = {path: [] for path in found}
    began = time.perf_counter()
    with rounding(precision):  # type: ignore[arg-type]
        # The first pass of a process loads libraries: no path should pay for all of them.
        PlainLoop(quiet, device, precision, lr=lr, momentum=momentum).run_round(plan.batches(2))
        for path, facts in found.items():
            facts["first_s"] = _timed(lambda p=path: first(p), device)[0]  # type: ignore[misc]
        for turn in range(turns + 1):
            if turn > FEWEST_TURNS and time.perf_counter() - began > seconds:
                break
            planned = [plan.batches(3 + turn * each + i) for i in range(each)]
            order = list(found)
            for path in order[turn % len(order) :] + order[: turn % len(order)]:
                spent = _timed(lambda p=path: [*map(rounds_of[p], planned)], device)  # type: ignore[misc]  # noqa: B023
                times[path].append((spent[0] / each, spent[1] / each))
    with FlopCounterMode(display=False) as counter:
        rounds_of["plain"](plan.batches(2))
    plain, loop = np.array(times["plain"][1:]), found["plain"]
    for path, facts in found.items():
        own_times = np.array(times[path][1:])  # the first turn is a warm-up
        facts["round_ms"], facts["cpu_ms"] = (1e3 * np.median(own_times, 0)).tolist()
        facts["speed"], facts["cpu_speed"] = np.median(plain / own_times, 0).tolist()
        if path in engines:
            facts["choosing_share"] = facts["choosing_s"] / (rounds * facts["round_ms"] / 1e3)
            totals = [f["first_s"] + (rounds - 1) * f["round_ms"] / 1e3 for f in (loop, facts)]
            facts["total_speed"] = totals[0] / totals[1]
    operations = counter.get_total_flops() / found["plain"]["round_ms"] * 1e3
    found["plain"]["peak_share"] = operations / PEAK
    return found


def _timed(function: Callable[[], object], device: torch.device) -> tuple[float, float]:
    wait(device)
    wall, processor = time.perf_counter(), time.process_time()
    function()
    wait(device)
    return time.perf_counter() - wall, time.process_time() - processor


def _pictures(model: nn.Module, shape: tuple[int, ...], *, each: int, batch: int) -> Task:
    """Build a task of few clients on random images."""
    rng, clients = np.random.default_rng(0), 8
    x = rng.normal(size=(clients * each, *shape)).astype(np.float32)
    y, owner = rng.integers(0, 10, len(x)), np.repeat(np.arange(clients), each)
    test = x[:2], y[:2]
    return Task.from_arrays(model, x, y, owner, test=test, cohort=4, batch_size=batch)


def _letters(model: nn.Module) -> Task:
    """Build a task of few clients on random characters."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 66, (8 * 32, 41))
    x, y, owner = text[:, :-1], text[:, 1:], np.repeat(np.arange(8), 32)
    return Task.from_arrays(model, x, y, owner, test=(x[:2], y[:2]), cohort=4, batch_size=8)


NETWORKS: dict[str, Callable[[], Task]] = {
    **WORKLOADS,
    **{name: functools.partial(tasks.get, name) for name in ("logistic", "digits", "plays")},
    "wide-mlp": lambda: _pictures(
        networks.mlp(784, 2048, 2048, outputs=10), (784,), each=80, batch=20
    ),
    "emnist-cnn": lambda: _pictures(networks.emnist_cnn(10), (28, 28), each=80, batch=20),
    "resnet": lambda: _pictures(networks.resnet18_gn(10), (3, 32, 32), each=16, batch=8),
    "small-resnet": lambda: _pictures(
        networks.resnet18_gn(10, width=8), (3, 32, 32), each=16, batch=8
    ),
    "gru": lambda: _letters(networks.CharGRU(66, 32, 64)),
    "transformer": lambda: _letters(networks.CharTransformer(66, 64, 4, 2, 40)),
}
"""Builders of tasks by name."""


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="+", choices=sorted(NETWORKS))
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--engines", nargs="+", default=["sequential", "vectorized", "auto"])
    parser.add_argument("--algorithm", default="fedavg", help="the loop's always is FedAvg")
    parser.add_argument("--rounds", type=int, default=100, help="planned length of the training")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = resolve_device(arguments.device)
    trial = None
    if arguments.algorithm != "fedavg":
        trial = Trial.of(arguments.algorithm, 0, client_lr=0.01)
    command = shlex.join(["python", *sys.argv])
    kept: dict[str, Any] = {"environment": {**environment(device), "command": command}}
    print(
        f"{'network':<12} {'path':<22} {'ms/round':>9} {'speed':>6} {'by CPU':>6} {'first s':>8} "
        f"{'choosing':>8}"
    )
    for name in arguments.networks:
        kept[name] = compare(
            NETWORKS[name](), arguments.engines, turns=arguments.turns, rounds=arguments.rounds,
            momentum=0.9 if arguments.algorithm == "fedzmg" else 0.0, trial=trial, device=device,
            precision=arguments.precision,
        )  # fmt: skip
        for path, facts in kept[name].items():
            label = f"auto: {facts['path']}" if path == "auto" else path
            print(
                f"{name:<12} {label:<22} {facts['round_ms']:9.1f} {facts['speed']:6.2f} "
                f"{facts['cpu_speed']:6.2f} {facts['first_s']:8.2f} "
                f"{facts.get('choosing_share', 0):8.1%}",
                flush=True,
            )
    if arguments.out:
        arguments.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
