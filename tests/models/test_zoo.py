"""Models of other packages: mapped clients train like clients one after another."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedzmg import Task, Trial
from fedzmg.errors import InputError
from fedzmg.simulation import Simulation
from fedzmg.tree import Tree, row

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the packages


def load() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "zoo.py"
    spec = importlib.util.spec_from_file_location("zoo", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["zoo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ZOO = load().ZOO


def trained(task: Task, engine: str, dtype: torch.dtype) -> tuple[Tree, Simulation]:
    trial = Trial.of("fedzmg", client_lr=0.01)
    simulation = Simulation(
        task, [trial], rounds=1, device=torch.device("cpu"), dtype=dtype,
        engine=engine,  # type: ignore[arg-type]
    )  # fmt: skip
    simulation.run_round()
    return row(simulation.snapshot.params, 0), simulation


@pytest.mark.parametrize("name", ZOO)
def test_engines_agree(name: str) -> None:
    """By ``auto`` in float32 and mapped in float64; a model that cannot be mapped has a reason."""
    package, build = ZOO[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    task = build()
    start = task.model.params()
    for engine, dtype, limit in (
        ("auto", torch.float32, 1e-4),
        ("vectorized", torch.float64, 1e-8),
    ):
        loop, _ = trained(task, "sequential", dtype)
        try:
            found, simulation = trained(task, engine, dtype)
        except InputError as error:
            assert engine == "vectorized"
            assert "cannot be mapped" in str(error)
            continue
        for leaf, expected in zip(found.values(), loop.values(), strict=True):
            torch.testing.assert_close(leaf, expected, rtol=limit, atol=limit)
        assert any(not torch.equal(loop[n].to(start[n].dtype), start[n]) for n in loop)
        assert simulation.choice.reason
