"""``torch.compile`` of a step: one graph, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedzmg.models import mlp
from fedzmg.optim import ZeroMeanSGD

pytestmark = pytest.mark.filterwarnings("ignore")
"""What the compiler warns of inside itself changes with every version."""


def apart(backend: str, lr: Any, **options: Any) -> float:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    models, steps, optimizers = [], [], []
    for compiled in (True, False):
        torch.manual_seed(0)
        model: nn.Module = mlp(6, 5, outputs=3)
        rate = lr.clone() if isinstance(lr, torch.Tensor) else lr
        optimizer = ZeroMeanSGD(model, rate, **options)
        models.append(model)
        optimizers.append(optimizer)
        steps.append(torch.compile(optimizer.step, backend=backend) if compiled else optimizer.step)
    for _ in range(3):
        x = torch.randn(4, 6)
        for model, step, optimizer in zip(models, steps, optimizers, strict=True):
            model.zero_grad()
            model(x).square().mean().backward()
            step()
            if isinstance(lr, torch.Tensor):
                optimizer.param_groups[0]["lr"].mul_(0.5)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def test_one_graph_for_all_rates() -> None:
    assert apart("eager", torch.tensor(0.1)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
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
    assert apart(backend, **{"lr": 0.1, **options}) < 1e-6
