"""The paper's local training as one writes it in plain PyTorch, against fedzmg, in one run.

    python benchmarks/plain_loop.py cifar100 --device cuda --precision tf32

The loop trains one client after another with ``torch.optim.SGD`` (momentum, no projection: the
least that FedZMG's clients do), on data that already lies on the device, with the same batch size
and number of steps. Prints milliseconds per round and their ratio.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from fedzmg.bench.machine import wait
from fedzmg.bench.measure import NEVER, environment
from fedzmg.bench.workloads import WORKLOADS
from fedzmg.models.kernels import rounding
from fedzmg.simulation import Simulation, Trial, resolve_device
from fedzmg.tasks.task import Task


def plain_round(task: Task, device: torch.device, precision: str) -> Callable[[], None]:
    """One round of federated averaging as a loop over clients, batches and layers."""
    model: nn.Module = copy.deepcopy(task.model.source).to(device).train()
    if task.name in ("shakespeare", "ragged-text"):
        model.gru = nn.GRU(256, 1024, batch_first=True).to(device)  # cuDNN's own
    data, batching = task.train.to(device), task.protocol.batching
    x, y = data.examples
    params = list(model.parameters())

    def train(client: int, start: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            for own, new in zip(params, start, strict=True):
                own.copy_(new)
        optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9)
        first, last = (int(o) for o in data.offsets[client : client + 2])
        order = torch.cat(
            [first + torch.randperm(last - first, device=device) for _ in range(batching.epochs)]
        )
        for batch in order.split(batching.size)[: batching.steps(last - first)]:
            inputs = task.prepare(x[batch], torch.float32)
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                out = _forward(model, inputs)
            loss = F.cross_entropy(out.float().flatten(0, -2), y[batch].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach().clone() for p in params]

    def once() -> None:
        start = [p.detach().clone() for p in params]
        total = [torch.zeros_like(p) for p in start]
        cohort = torch.randperm(len(data))[: task.protocol.cohort].tolist()
        for client in cohort:
            torch._foreach_add_(total, train(client, start), alpha=1 / len(cohort))
        with torch.no_grad():
            for own, new in zip(params, total, strict=True):
                own.copy_(new)

    return once


def _forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if hasattr(model, "gru") and isinstance(model.gru, nn.GRU):
        return model.dense(model.gru(model.embedding(x))[0])
    return model(x)


def median_ms(function: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Milliseconds of one call, after two that warm up."""
    for _ in range(2):
        function()
    seconds = []
    for _ in range(rounds):
        wait(device)
        began = time.perf_counter()
        function()
        wait(device)
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds)


def main() -> None:
    """Measure both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS))
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    found = []
    for name in arguments.workloads:
        task = WORKLOADS[name].build()
        with rounding(arguments.precision):
            plain = median_ms(
                plain_round(task, device, arguments.precision), device, arguments.rounds
            )
        ours = Simulation(
            task, [Trial.of("fedzmg", client_lr=0.01)], rounds=NEVER, device=device,
            dtype=torch.float32, engine=arguments.engine, precision=arguments.precision,
        )  # fmt: skip
        ms = median_ms(ours.run_round, device, arguments.rounds)
        found.append(
            {"workload": name, "plain_ms": plain, "fedzmg_ms": ms, "ratio": plain / ms,
             "engine": ours.choice.path, "precision": arguments.precision}
        )  # fmt: skip
        print(
            f"{name}: plain loop {plain:.1f} ms, fedzmg ({ours.choice.path}) {ms:.1f} ms "
            f"per round: {plain / ms:.1f} x",
            flush=True,
        )
    if arguments.out:
        command = " ".join(["python", *sys.argv])
        facts = {**environment(device), "command": command}
        arguments.out.write_text(
            json.dumps({"environment": facts, "ratios": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
