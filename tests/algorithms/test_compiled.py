"""Every client rule traces as one graph on the path that GPUs take, alone or inside wrappers."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from known_answers import close, simulation
from torch import nn

from fedzmg import Task, algorithms
from fedzmg.algorithms.options import configure
from fedzmg.contract import Rule, chain
from fedzmg.engine import cuda_graph
from fedzmg.engine.choose import EnginePlanner
from golden_problems import random_task

RULES = {
    tuple(map(type, chain(info.algorithm.client))): name
    for name, info in algorithms.ALGORITHMS.items()
}
"""An algorithm for every client rule, by the classes of its chain."""
CASES = [(name, "alone") for name in RULES.values()]
CASES += [(name, "wrapped") for name in ("fedmuon", "fedspeed", "mofedsam:cold-start", "pfedme")]
WRAPPED = {
    "client.project": "all",
    "client.clip_norm": 1.0,
    "client.schedule": "exponential",
    "client.gamma": 0.5,
}


@cache
def task() -> Task:
    """Equal clients, so that one width is traced."""
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return random_task(net, [4] * 3, inputs=6, classes=3, cohort=3, batch_size=4, epochs=1)


def test_no_default_of_a_field_is_a_rule() -> None:
    """The compiler cannot wrap a rule that is a default, once it traces a constructor."""
    for kinds in RULES:
        for kind in kinds:
            assert not any(isinstance(f.default, Rule) for f in dataclasses.fields(kind)), kind


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(("name", "inside"), CASES)
def test_compiled_cuda_graphs_agree(
    name: str, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_apart = cuda_graph.compile_apart

    def traced(function: Any, backend: str = "eager") -> Any:
        return compile_apart(function, "eager")

    monkeypatch.setattr(cuda_graph, "compile_apart", traced)
    algorithm = algorithms.get(name)
    algorithm = configure(algorithm, WRAPPED if inside == "wrapped" else {})
    torch.compiler.reset()
    compiled = EnginePlanner("compiled_cuda_graph", backend="eager")
    loop, graph = (simulation(task(), algorithm, engine=e) for e in ("sequential", compiled))
    for _ in range(2):
        expected, found = (sim.run_round().simulation.snapshot.params for sim in (loop, graph))
        for key, leaf in expected.items():
            close(found[key], leaf)
