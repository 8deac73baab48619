"""Helpers of the tests of algorithms: make one, drive a server by hand, small federations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedzmg
from fedzmg import algorithms
from fedzmg.contract import Algorithm, ServerRule, bind, numbers
from fedzmg.data.plan import ClientBatch
from fedzmg.messages import Cohort
from fedzmg.models import CharGRU
from fedzmg.simulation import RoundPlanner, Simulation
from fedzmg.tree import Tree
from golden_problems import Net

ENGINES = ["sequential", "vectorized"]


def made(name: str, **options: Any) -> Algorithm:
    """Make an algorithm; ``server_lr`` sets ``server.lr``."""
    changed = {key.replace("_", ".", 1): value for key, value in options.items()}
    return algorithms.get(name).with_options(changed)


def named(name: str, **options: Any) -> Algorithm:
    """The same at client rate 0.1, that of the golden problems."""
    return made(name, **({"client_lr": 0.1} | options))


def close(got: Any, expected: Any, atol: float = 1e-9) -> None:
    got = torch.as_tensor(got).double()
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got.reshape(wanted.shape), wanted, rtol=0, atol=atol)


def cohort(delta: Tensor | Tree, round_: int, name: str = "w") -> Cohort:
    """Make the cohort of a round with one client."""
    tree = delta if isinstance(delta, Tree) else Tree({name: delta})
    return Cohort(tree, (), (), torch.tensor(1), torch.tensor(1), torch.tensor(round_))


def drive(
    rule: ServerRule,
    start: list[float],
    deltas: list[list[float]],
    *,
    dtype: torch.dtype = torch.float64,
    bound: bool = False,
) -> list[list[float]]:
    """The models of a server that receives some deltas; ``bound`` as inside an engine."""
    if bound:
        rule = bind(rule, {n: torch.tensor(v, dtype=dtype) for n, v in numbers(rule).items()})
    params = Tree({"w": torch.tensor(start, dtype=dtype)})
    state = rule.init(params)
    found = []
    for round_, delta in enumerate(deltas, 1):
        params, state = rule.update(params, state, cohort(torch.tensor(delta, dtype=dtype), round_))
        found.append(params["w"].tolist())
    return found


def simulation(
    task: fedzmg.Task,
    algorithm: Algorithm,
    *,
    engine: Any = "sequential",
    dtype: torch.dtype = torch.float64,
    participants: list[list[str]] | None = None,
    cohort: int | None = None,
    steps: dict[str, int] | None = None,
) -> Simulation:
    """Build a simulation; ``participants`` names the clients of a round, ``steps`` cuts theirs."""
    protocol = replace(task.protocol, cohort=cohort or task.protocol.cohort, eval_every=1000)
    task = replace(task, protocol=protocol)

    class Chosen(RoundPlanner):
        def batches(self, round_: int) -> list[ClientBatch]:
            batches = super().batches(round_)
            if steps is not None:
                batches = [b._replace(stream=b.stream[: steps["AB"[b.client]]]) for b in batches]
            if participants is None:
                return batches
            return [b for b in batches if "AB"[b.client] in participants[round_ - 1]]

    return Simulation(
        task,
        [fedzmg.Trial(algorithm)],
        rounds=1000,
        device=torch.device("cpu"),
        dtype=dtype,
        engine=engine,
        planner=Chosen(task, [0]),
    )


COUNTS = [9, 4, 6]
"""Examples of the three clients of the small federations."""


def mixed() -> nn.Module:
    """Two convolutions, normalisation and two dense layers on 6x6 images."""

    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(torch.tanh(m.hidden(m.up(m.norm(m.conv(x))).flatten(1))))

    first = {"conv": nn.Conv2d(1, 3, 3, stride=2), "norm": nn.GroupNorm(1, 3)}
    last = {"hidden": nn.Linear(18, 5), "out": nn.Linear(5, 3)}
    return Net(run, **first, up=nn.ConvTranspose2d(3, 2, 2), **last)


def image_task(**more: Any) -> fedzmg.Task:
    """Images of 6x6 pixels in three classes."""
    generator = torch.Generator().manual_seed(11)
    x = torch.rand(sum(COUNTS), 1, 6, 6, generator=generator)
    y = torch.randint(0, 3, (sum(COUNTS),), generator=generator)
    return _small_task(mixed(), x, y, **more)


def text_task() -> fedzmg.Task:
    """Sequences of five characters out of seven, each with the next."""
    generator = torch.Generator().manual_seed(12)
    tokens = torch.randint(0, 7, (sum(COUNTS), 6), generator=generator)
    return _small_task(CharGRU(7, 3, 4), tokens[:, :-1], tokens[:, 1:])


TASKS = {"images": image_task, "text": text_task}


def _small_task(module: nn.Module, x: Tensor, y: Tensor, **more: Any) -> fedzmg.Task:
    owners = np.repeat(np.arange(len(COUNTS)), COUNTS)
    fields = {"cohort": len(COUNTS), "batch_size": 4, "epochs": 2} | more
    return fedzmg.Task.from_arrays(module, x, y, owners, test=(x[:5], y[:5]), **fields)
