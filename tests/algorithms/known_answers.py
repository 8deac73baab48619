"""Helpers of the tests of algorithms: make one, drive a rule by hand, compare with traces.

A trace is a list of rounds as the files under ``golden`` store them: the model ``w`` after each,
and where they are known the ``local_iterates`` of every client.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import fedzmg
from fedzmg import algorithms
from fedzmg.contract import Algorithm, Cohort, ServerRule, bind, numbers
from fedzmg.models import CharGRU
from fedzmg.tree import Tree
from golden_problems import TOLERANCE, make_context, models, quadratic_task

ENGINES = ["sequential", "vectorized"]
DTYPES = [torch.float64, torch.float32]


def made(name: str, **options: Any) -> Algorithm:
    """An algorithm; ``server_lr`` stands for ``server.lr``."""
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


class Trace(NamedTuple):
    """Golden rounds of an algorithm on a problem."""

    problem: dict[str, Any]
    algorithm: Algorithm
    rounds: list[dict[str, Any]]


def check_models(trace: Trace, engine: str, dtype: torch.dtype) -> None:
    """The global model after every round of a whole federation, and its sum where it is stored."""
    problem, algorithm, rounds = trace
    found = models(quadratic_task(problem), algorithm, engine=engine, dtype=dtype)
    assert len(found) == len(rounds) == 2
    for model, expected in zip(found, rounds, strict=True):
        assert model["weight"].dtype == dtype
        close(model["weight"], expected["w"], TOLERANCE[dtype])
        if "sum_w" in expected:
            close(model["weight"].sum(), expected["sum_w"], TOLERANCE[dtype])


def check_local_iterates(trace: Trace) -> None:
    """Every local step of every client, and what a client without a memory sends in the end."""
    problem, algorithm, rounds = trace
    rule = algorithm.for_layout(quadratic_task(problem).model.layout).client
    start = problem["w0"]
    for expected in rounds:
        sent = Tree({"weight": torch.tensor([start], dtype=torch.float64)})
        for client, iterates in expected["local_iterates"].items():
            curvature = torch.tensor([problem["H"][client]], dtype=torch.float64)
            centre = torch.tensor([problem["c"][client]], dtype=torch.float64)
            context = make_context(sent, examples=problem["n"][client])
            params, scratch = sent, rule.begin(context, ())
            for iterate in iterates:
                grad = Tree({"weight": curvature * (params["weight"] - centre)})
                params, scratch = rule.step(context, params, scratch, grad)
                close(params["weight"], [iterate])
            upload, memory = rule.finish(context, params, scratch, torch.tensor(len(iterates)))
            # The library's delta is global minus local.
            moved = [before - after for before, after in zip(start, iterates[-1], strict=True)]
            close(upload.delta["weight"], [moved])
            assert memory == ()
        start = expected["w"]


COUNTS = [9, 4, 6]
"""Examples of the three clients of the small federations."""


def image_task(module: nn.Module, **more: Any) -> fedzmg.Task:
    """Images of 6x6 pixels in three classes."""
    generator = torch.Generator().manual_seed(11)
    x = torch.rand(sum(COUNTS), 1, 6, 6, generator=generator)
    y = torch.randint(0, 3, (sum(COUNTS),), generator=generator)
    return _small_task(module, x, y, **more)


def text_task() -> fedzmg.Task:
    """Sequences of five characters out of seven, each with the next."""
    generator = torch.Generator().manual_seed(12)
    tokens = torch.randint(0, 7, (sum(COUNTS), 6), generator=generator)
    return _small_task(CharGRU(7, 3, 4), tokens[:, :-1], tokens[:, 1:])


def _small_task(module: nn.Module, x: Tensor, y: Tensor, **more: Any) -> fedzmg.Task:
    owners = np.repeat(np.arange(len(COUNTS)), COUNTS)
    fields = {"cohort": len(COUNTS), "batch_size": 4, "epochs": 2} | more
    return fedzmg.Task.from_arrays(module, x, y, owners, test=(x[:5], y[:5]), **fields)
