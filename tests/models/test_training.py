"""Every network of the library trains one round alike under both engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import assert_engines_agree, federation, ids, normal
from torch import nn

from fedzmg import Task, Trial
from fedzmg.engine.choose import can_compile
from fedzmg.models import (
    CharGRU,
    CharTransformer,
    RandomFlip,
    RandomShift,
    digits_cnn,
    logistic_regression,
    mlp,
    resnet18_gn,
)
from fedzmg.simulation import Simulation
from fedzmg.tree import Tree

TEXT = ids(7, 5)
NEXT = np.roll(TEXT, -1, 1)

NETWORKS: dict[str, Callable[[], Task]] = {
    "logistic-regression": lambda: federation(logistic_regression(12, 3), normal(3, 4)),
    "mlp": lambda: federation(mlp(12, 6, 5, outputs=3), normal(3, 4)),
    "digits-cnn": lambda: federation(digits_cnn(3), normal(28, 28)),
    "gru": lambda: federation(CharGRU(7, 3, 4), TEXT, NEXT, init="keras"),
    "transformer": lambda: federation(CharTransformer(7, 8, 2, 2, 5), TEXT, NEXT),
    "transformer-dropout": lambda: federation(CharTransformer(7, 4, 1, 1, 6, 0.3), TEXT, NEXT),
    "resnet": lambda: federation(resnet18_gn(3, width=4), normal(3, 8, 8)),
    "resnet-keras": lambda: federation(
        resnet18_gn(3, channels=1, width=2, groups=1), normal(1, 8, 8), init="keras"
    ),
    "augmented": lambda: federation(
        nn.Sequential(
            RandomShift(2), RandomFlip(), mlp(48, 5, outputs=3), nn.Dropout(0.2), nn.Linear(3, 3)
        ),
        normal(3, 4, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_engines_agree(name: str, dtype: torch.dtype) -> None:
    assert_engines_agree(NETWORKS[name](), dtype)


def one_round(task: Task, *, compiled: bool) -> Tree:
    # One step per client, so that there is one width to compile.
    task = replace(task, protocol=replace(task.protocol, batch_size=5))
    simulation = Simulation(
        task,
        [Trial.of("fedzmg")],
        rounds=1,
        device=torch.device("cpu"),
        dtype=torch.float64,
        engine="compiled" if compiled else "vectorized",
    )
    simulation.run_round()
    return simulation.snapshot.params


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["augmented", "transformer-dropout"])
def test_compiled_agrees(name: str) -> None:
    eager, compiled = (one_round(NETWORKS[name](), compiled=flag) for flag in (False, True))
    for key, leaf in eager.items():
        torch.testing.assert_close(leaf, compiled[key], rtol=0, atol=1e-9)
