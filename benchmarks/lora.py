"""Time and memory of federated LoRA in fedzmg and in an eager loop with peft, in one run.

    python benchmarks/lora.py --device cuda --precision tf32

Both fine-tune a GPT of characters with SGD and momentum: the loop trains one client after another,
on the same numbers of clients, steps and characters, with the data on the device. Without peft, the
loop has the package's own adapters. Prints milliseconds per round and their ratio, and bytes of
parameters and optimizer state of all clients relative to those of one.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bench import Machine, seconds, time_rounds
from fedzmg.engine.vectorized import Vectorized
from fedzmg.kernels import rounding
from fedzmg.models import CharTransformer, add_lora
from fedzmg.models.objective import cross_entropy
from fedzmg.provenance import environment
from fedzmg.simulation import Simulation, Trial, resolve_device
from fedzmg.tasks.task import Task
from fedzmg.tree import num_bytes, row

VOCABULARY = 66
TARGETS = ("query", "value")
ALGORITHM = "fedavg:momentum"


def with_peft(model: nn.Module, rank: int) -> tuple[nn.Module, str]:
    """Add adapters by peft, or by this package if it is not installed."""
    try:
        import peft
    except ImportError:
        return add_lora(model, rank, 2 * rank, [f"*.{t}" for t in TARGETS]), "own adapters"
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS))
    return peft.get_peft_model(copy.deepcopy(model), config), f"peft {peft.__version__}"


def eager_rounds(model: nn.Module, task: Task, device: torch.device) -> Callable[[], None]:
    """Return a function that trains one round in a loop over clients and batches."""
    model = model.to(device).train()
    params = [p for p in model.parameters() if p.requires_grad]
    (x, y), protocol = task.train.to(device, torch.float32).examples, task.protocol

    def once() -> None:
        start = [p.detach().clone() for p in params]
        total = [torch.zeros_like(p) for p in start]
        for client in range(protocol.cohort):
            torch._foreach_copy_([p.data for p in params], start)
            optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=5e-4)
            first, last = (int(o) for o in task.train.offsets[client : client + 2])
            order = first + torch.randperm(last - first, device=device)
            for chosen in order.split(protocol.batch_size):
                loss = cross_entropy(model(x[chosen]), y[chosen]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            torch._foreach_add_(total, [p.detach() for p in params], alpha=1 / protocol.cohort)
        torch._foreach_copy_([p.data for p in params], total)

    return once


def state_bytes(task: Task, device: torch.device) -> dict[str, float]:
    """Count parameters and optimizer state of a round: constants, of one client, of all."""
    simulation = Simulation(
        task, [Trial.of(ALGORITHM)], rounds=1, device=device, dtype=torch.float32,
        engine="cuda_graph",
    )  # fmt: skip
    simulation.run_round()
    assert isinstance(simulation.engine, Vectorized)
    graphs = simulation.engine.graphs
    assert graphs is not None
    [buffers] = graphs._buffers.values()
    work = buffers.state.work.params, buffers.state.work.scratch
    constants = num_bytes(simulation.program.objective.model.frozen())
    one, all_ = (constants + num_bytes(row(work, slice(n))) for n in (1, None))
    return {"constants": constants, "one": one, "all": all_, "ratio": all_ / one}


def main() -> None:
    """Measure both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--engine", default="auto")
    for name, value in (
        ("dim", 128), ("heads", 4), ("layers", 4), ("length", 128), ("rank", 8), ("clients", 10),
        ("steps", 8), ("batch", 8), ("rounds", 5),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = resolve_device(given.device)
    base = CharTransformer(VOCABULARY, given.dim, given.heads, given.layers, given.length)
    rng = np.random.default_rng(0)
    own = given.steps * given.batch
    text = rng.integers(0, VOCABULARY, (given.clients * own, given.length + 1))
    x, y = text[:, :-1], text[:, 1:]
    model = add_lora(base, given.rank, 2 * given.rank, [f"*.{t}" for t in TARGETS])
    task = Task.from_arrays(
        model, x, y, np.repeat(np.arange(given.clients), own), test=(x[:8], y[:8]),
        cohort=given.clients, batch_size=given.batch, name="lora",
    )  # fmt: skip
    other, kind = with_peft(base, given.rank)
    with rounding(given.precision):
        once = eager_rounds(other, task, device)
        half = given.precision == "bf16" and device.type == "cuda"

        def timed() -> None:
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                once()

        seconds(timed, device, 2)
        eager = 1e3 * statistics.median(seconds(timed, device, 1) for _ in range(given.rounds))
    ours: dict[str, Any] = time_rounds(
        task, Machine(1.0, 1.0), algorithm=ALGORITHM, engine=given.engine,
        precision=given.precision, rounds=given.rounds, device=device,
    )  # fmt: skip
    held = state_bytes(task, device)
    ms = ours["round_ms"]
    print(
        f"eager loop ({kind}) {eager:.1f} ms, fedzmg ({ours['engine']}) {ms:.1f} ms per round: "
        f"{eager / ms:.1f} x\nparameters and optimizer state: 1 client {held['one'] / 1e6:.2f} MB, "
        f"{given.clients} clients {held['all'] / 1e6:.2f} MB: {held['ratio']:.2f} x"
    )
    if given.out:
        facts = {**environment(device), "command": " ".join(["python", *sys.argv])}
        found = {"eager_ms": eager, "eager": kind, "fedzmg": ours, "state_bytes": held}
        given.out.write_text(json.dumps({"environment": facts, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
