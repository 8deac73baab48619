"""The golden problems as real tasks, so that their numbers test everything a user runs.

The numbers in ``golden/golden.json`` were worked out by hand and with exact fractions. Two clients
A and B with 10 and 30 equal examples minimise ``0.5 sum_i H_i (w_i - c_i)^2``; the two or three
weights are one column. ``dense_layer`` is a linear layer with bias and half the squared error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedzmg
from fedzmg.messages import ClientContext
from fedzmg.simulation import RoundReport
from fedzmg.tree import Tree

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "golden.json").read_text())

P2: dict[str, Any] = GOLDEN["problem"]
P3: dict[str, Any] = GOLDEN["p3"]["problem"]
DENSE: dict[str, Any] = GOLDEN["dense_layer"]["problem"]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


class Quadratic(nn.Module):
    """Rows ``[H | c]`` in, ``0.5 sum H (w - c)^2`` out; the weights are one column of inputs."""

    def __init__(self, start: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        curvature, centre = rows.chunk(2, dim=1)
        return 0.5 * (curvature * (self.weight - centre) ** 2).sum(1)


class Net(nn.Module):
    """Layers, parameters or constants by name, and a function of them and the inputs."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def outputs_themselves(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * ((outputs - targets) ** 2).sum(1)


def quadratic_task(problem: dict[str, Any], *, epochs: int | None = None) -> fedzmg.Task:
    rows, owners = [], []
    for name, count in problem["n"].items():
        rows += [problem["H"][name] + problem["c"][name]] * count
        owners += [name] * count
    x = torch.tensor(rows)
    return fedzmg.Task.from_arrays(
        Quadratic(problem["w0"]),
        x,
        torch.zeros(len(x)),
        owners,
        test=(x, torch.zeros(len(x))),
        loss=outputs_themselves,
        metric=fedzmg.Metric("loss", outputs_themselves, higher_is_better=False),
        axes={"weight": (1,)},
        init="given",
        cohort=2,
        batch_size=30,
        epochs=problem["local_steps"] if epochs is None else epochs,
        rounds=2,
    )


def dense_task() -> fedzmg.Task:
    module = nn.Linear(3, 2).double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor(DENSE["W0"], dtype=torch.float64).T)
        module.bias.copy_(torch.tensor(DENSE["b0"], dtype=torch.float64))
    x = torch.tensor(DENSE["X"]["A"] + DENSE["X"]["B"])
    y = torch.tensor(DENSE["Y"]["A"] + DENSE["Y"]["B"])
    owners = ["A"] * len(DENSE["X"]["A"]) + ["B"] * len(DENSE["X"]["B"])
    return fedzmg.Task.from_arrays(
        module,
        x,
        y,
        owners,
        test=(x, y),
        loss=half_square,
        metric=fedzmg.Metric("loss", half_square, higher_is_better=False),
        init="given",
        cohort=2,
        batch_size=3,
        epochs=DENSE["local_full_batch_steps"],
        rounds=2,
    )


def random_task(
    module: nn.Module,
    sizes: Sequence[int],
    *,
    inputs: int,
    classes: int,
    seed: int = 0,
    shift: float = 0.0,
    **settings: Any,
) -> fedzmg.Task:
    """Make a task of normal inputs and random labels for clients of some sizes."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    x, y = rng.normal(size=(len(owner), inputs)) + shift, rng.integers(0, classes, len(owner))
    return fedzmg.Task.from_arrays(module, x, y, owner, test=(x, y), **settings)


def models(
    task: fedzmg.Task,
    algorithm: fedzmg.Algorithm,
    *,
    engine: Any = "sequential",
    dtype: torch.dtype = torch.float64,
    rounds: int | None = None,
    seed: int = 0,
) -> list[Tree]:
    """The global model after every round."""
    kept: list[Tree] = []

    def keep(report: RoundReport) -> None:
        kept.append(report.simulation.checkpoint(0).params())

    fedzmg.simulate(
        task,
        [fedzmg.Trial(algorithm, seed)],
        rounds=rounds,
        engine=engine,
        device="cpu",
        dtype=dtype,
        observer=keep,
    )
    return kept


def make_context(
    params: Tree, *, memory: Any = (), shared: Any = (), examples: int = 1
) -> ClientContext:
    """Make the context of a client whose rule a test drives by hand."""
    return ClientContext(params, shared, memory, torch.tensor(1), torch.tensor(examples))
