"""Time of the paper's local training in plain PyTorch and in fedzmg, in one run.

    python benchmarks/plain_loop.py cifar100 --device cuda --precision tf32

The loop trains one client after another with ``torch.optim.SGD`` (momentum, no projection), on
data that is already on the device, with the same batch size and number of steps. Prints
milliseconds per round and their ratio.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from fedzmg.bench import WORKLOADS, Machine, environment, time_rounds, wait
from fedzmg.models.kernels import rounding
from fedzmg.simulation import resolve_device
from fedzmg.tasks.task import Task

Batch = tuple[torch.Tensor, torch.Tensor]


def plain_round(
    model: nn.Module,
    cohort: Sequence[Iterable[Batch]],
    *,
    lr: float,
    momentum: float = 0.0,
    bf16: bool = False,
) -> int:
    """Train one round of federated averaging as a loop over clients and batches.

    Clients have equal weights; the mean of their models becomes the model. Returns the number of
    local steps.
    """
    params = list(model.parameters())
    start = [p.detach().clone() for p in params]
    total = [torch.zeros_like(p) for p in start]
    steps = 0
    for batches in cohort:
        _set(params, start)
        optimizer = torch.optim.SGD(params, lr=lr, momentum=momentum)
        for inputs, targets in batches:
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                out = _forward(model, inputs)
            loss = F.cross_entropy(out.to(params[0].dtype).flatten(0, -2), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
        torch._foreach_add_(total, [p.detach() for p in params], alpha=1 / len(cohort))
    _set(params, total)
    return steps


def rounds_of(task: Task, device: torch.device, precision: str) -> Callable[[], None]:
    """Return a function that trains one round on a cohort and batches drawn on the device."""
    model: nn.Module = copy.deepcopy(task.model.source).to(device).train()
    if task.name in ("shakespeare", "ragged-text"):
        model.gru = nn.GRU(256, 1024, batch_first=True).to(device)  # cuDNN's own
    data, batching = task.train.to(device), task.protocol.batching
    x, y = data.examples

    def batches(client: int) -> Iterator[Batch]:
        first, last = (int(o) for o in data.offsets[client : client + 2])
        order = torch.cat(
            [first + torch.randperm(last - first, device=device) for _ in range(batching.epochs)]
        )
        for rows in order.split(batching.size)[: batching.steps(last - first)]:
            yield task.prepare(x[rows], torch.float32), y[rows]

    def once() -> None:
        cohort = torch.randperm(len(data))[: task.protocol.cohort].tolist()
        clients = [batches(client) for client in cohort]
        plain_round(model, clients, lr=0.01, momentum=0.9, bf16=precision == "bf16")

    return once


def _set(params: list[nn.Parameter], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for own, new in zip(params, values, strict=True):
            own.copy_(new)


def _forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if hasattr(model, "gru") and isinstance(model.gru, nn.GRU):
        return model.dense(model.gru(model.embedding(x))[0])
    return model(x)


def median_ms(function: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Measure the median milliseconds of a call, after two calls to warm up."""
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
        task = WORKLOADS[name]()
        with rounding(arguments.precision):
            plain = median_ms(
                rounds_of(task, device, arguments.precision), device, arguments.rounds
            )
        ours = time_rounds(
            task, Machine(1.0, 1.0), engine=arguments.engine,
            precision=arguments.precision, rounds=arguments.rounds, device=device,
        )  # fmt: skip
        ms = ours["round_ms"]
        found.append(
            {"workload": name, "plain_ms": plain, "fedzmg_ms": ms, "ratio": plain / ms,
             "engine": ours["engine"], "precision": arguments.precision}
        )  # fmt: skip
        print(
            f"{name}: plain loop {plain:.1f} ms, fedzmg ({ours['engine']}) {ms:.1f} ms "
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
