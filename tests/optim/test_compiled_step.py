"""``torch.compile`` of a step: one graph, the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedzmg.models import cifar100_cnn, emnist_cnn, shakespeare_gru
from fedzmg.optim import ZeroMeanSGD

pytestmark = pytest.mark.filterwarnings("ignore")
"""Internal warnings of the compiler change with every version."""


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(16, 3),
    "emnist_cnn": emnist_cnn,
    "cifar100_cnn": cifar100_cnn,
    "shakespeare_gru": shakespeare_gru,
}


def apart(backend: str, lr: Any, model: str = "linear", **options: Any) -> float:
    """Largest difference between compiled and eager steps; fails unless there is one graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        net = MODELS[model]()
        rate = lr.clone() if isinstance(lr, torch.Tensor) else lr
        optimizer = ZeroMeanSGD(net, rate, **options)
        step = torch.compile(optimizer.step, backend=backend) if compiled else optimizer.step
        for _ in range(3):
            for p in net.parameters():
                p.grad = torch.randn_like(p)
            step()
            if isinstance(lr, torch.Tensor):
                optimizer.param_groups[0]["lr"].mul_(0.5)
        found.append([p.detach() for p in net.parameters()])
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def test_one_graph_for_all_rates() -> None:
    assert apart("eager", torch.tensor(0.1)) < 1e-5


def test_inductor_compiles_rows_of_eight_and_more() -> None:
    """Inductor of torch 2.13 fails if it fuses a mean with the updates after it."""
    assert apart("inductor", 0.1) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in MODELS if name != "linear"])
def test_models_of_the_paper_compile(model: str) -> None:
    assert apart("inductor", 0.1, model) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "options",
    [
        {"lr": torch.tensor(0.1)},
        {"nesterov": True},
        {"momentum": 0.0},
        {"maximize": True, "fused": True},
    ],
)
def test_every_option(backend: str, options: dict[str, Any]) -> None:
    assert apart(backend, **{"lr": 0.1, **options}) < 1e-5
