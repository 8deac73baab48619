"""Models of other packages: mapped clients train like clients one after another."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedzmg import Task, Trial
from fedzmg.engine.choose import EngineChoice
from fedzmg.errors import CannotMap
from fedzmg.models import FunctionalModel
from fedzmg.simulation import Simulation
from fedzmg.tree import Tree, row

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the packages


def load() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "zoo.py"
    spec = importlib.util.spec_from_file_location("zoo", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["zoo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ZOO = load()
ZOO.EXAMPLES = 80


def trained(task: Task, engine: Any, dtype: torch.dtype) -> tuple[Tree, Simulation]:
    trial = Trial.of("fedzmg", client_lr=0.001)
    simulation = Simulation(
        task, [trial], rounds=1, device=torch.device("cpu"), dtype=dtype,
        engine=engine,
    )  # fmt: skip
    simulation.run_round()
    return row(simulation.snapshot.params, 0), simulation


@pytest.mark.parametrize("name", ZOO.ZOO)
def test_engines_agree(name: str) -> None:
    """By ``auto`` in float32 and mapped in float64; a model that cannot be mapped has a reason."""
    package, build = ZOO.ZOO[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    task = build()
    # Two steps of each client, the second on a batch that is not full. BatchNorm of two examples
    # and one pixel, as at the end of a ResNet on small images, would magnify rounding too much.
    task = replace(task, protocol=replace(task.protocol, cohort=2, batch_size=6))
    start = task.model.params()
    looped = name == "mixture"  # whose experts read some of a batch
    if looped:
        with pytest.raises(CannotMap):
            trained(task, "vectorized", torch.float64)
    for engine, dtype, limit in (
        ("auto", torch.float32, 1e-4),
        ("auto" if looped else "vectorized", torch.float64, 1e-8),
    ):
        found, simulation = trained(task, engine, dtype)
        # With the same kernels: this BatchNorm magnifies even their rounding.
        same = EngineChoice("sequential", "reference", simulation.choice.onednn)
        loop, _ = trained(task, same, dtype)
        for leaf, expected in zip(found.values(), loop.values(), strict=True):
            torch.testing.assert_close(leaf, expected, rtol=limit, atol=limit)
        assert any(not torch.equal(loop[n].to(start[n].dtype), start[n]) for n in loop)
        assert simulation.choice.reason


def test_whole_examples_are_dropped_by_key() -> None:
    ZOO.torchvision_models()
    drops = pytest.importorskip("torchvision.ops"), pytest.importorskip("timm.layers")
    for layer in (drops[0].StochasticDepth(0.3, "row"), drops[1].DropPath(0.3)):
        model = FunctionalModel(nn.Sequential(nn.Linear(4, 6), layer))
        assert model.layer_keys == ("1.key",)
        x, params = torch.randn(2000, 4), model.params()
        out = model.train(params, x, torch.tensor(7))
        kept = out.any(1)
        torch.testing.assert_close(
            out[kept], (x @ params["0.weight"].T + params["0.bias"])[kept] / 0.7
        )
        assert float(kept.double().mean()) == pytest.approx(0.7, abs=0.05)
