"""The worked example of CONTRIBUTING.md, taken from the file itself, works as it says."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import Algorithm, Task, Trial, algorithms, simulate

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
HEADER = """
from dataclasses import dataclass
from typing import final
from fedzmg.algorithms import Average, Entry
from fedzmg.contract import Algorithm, ClientRule, Given, Number, State, number
from fedzmg.tree import Tree
"""


def example() -> algorithms.Entry:
    code, row = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    module = types.ModuleType("contributing_example")
    sys.modules[module.__name__] = module
    exec(HEADER + code, module.__dict__)
    [entry] = eval(f"[{row}]", {"fedprox_like": module})
    assert isinstance(entry, algorithms.Entry)
    return entry


def task() -> Task:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 4)), rng.integers(0, 3, 24)
    owner = np.repeat(np.arange(4), [3, 9, 7, 5])
    return Task.from_arrays(
        nn.Linear(4, 3), x, y, owner, test=(x, y), cohort=3, batch_size=4, epochs=2
    )


def params(algorithm: Algorithm, engine: str) -> torch.Tensor:
    [history] = simulate(
        task(),
        [Trial(algorithm)],
        rounds=3,
        engine=engine,
        dtype=torch.float64,  # type: ignore[arg-type]
    )
    return history.params["weight"]


def test_example_runs_on_both_engines_and_degenerates_to_fedavg() -> None:
    algorithm = example().algorithm
    loop, mapped = params(algorithm, "sequential"), params(algorithm, "vectorized")
    torch.testing.assert_close(loop, mapped, rtol=0, atol=1e-9)
    fedavg = params(algorithms.get("fedavg"), "sequential")
    assert (loop - fedavg).abs().max() > 1e-6
    torch.testing.assert_close(
        params(algorithm.with_options({"client.mu": 0.0}), "sequential"), fedavg, rtol=0, atol=1e-12
    )
    with pytest.raises(ValueError, match="mu = -1: expected a finite number >= 0"):
        algorithm.with_options({"client.mu": -1})
