"""Loss scalers, ``torch.compile`` and several processes: the same steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedzmg.engine.choose import can_compile
from fedzmg.models import cifar100_cnn, emnist_cnn, mlp, shakespeare_gru
from fedzmg.optim import ZeroMeanSGD


def small() -> nn.Module:
    torch.manual_seed(3)
    return mlp(6, 5, outputs=3)


def loaded(model: nn.Module) -> ZeroMeanSGD:
    optimizer = ZeroMeanSGD(model, 0.05, fused=True)
    optimizer.load_state_dict(ZeroMeanSGD(small(), 0.05, foreach=False).state_dict())
    return optimizer


def mixed(model: nn.Module) -> ZeroMeanSGD:
    first, *rest = model.named_parameters()
    slow = {"params": [first], "foreach": False, "fused": False, "input_axes": (1,)}
    return ZeroMeanSGD([slow, {"params": rest, "input_axes": (1,)}], 0.05, fused=True)


def compiled(model: nn.Module) -> Any:
    torch._dynamo.reset()
    optimizer: Any = ZeroMeanSGD(model, 0.05, fused=True)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return optimizer


MAKERS: dict[str, Callable[[nn.Module], ZeroMeanSGD]] = {
    "single": lambda model: ZeroMeanSGD(model, 0.05, foreach=False),
    "foreach": lambda model: ZeroMeanSGD(model, 0.05, foreach=True),
    "fused": lambda model: ZeroMeanSGD(model, 0.05, fused=True),
    "loaded": loaded,
    "mixed": mixed,
    "compiled": compiled,
}
SLOWEST_LAST = [*[*MAKERS.values()][:-1], pytest.param(compiled, marks=pytest.mark.slow)]


@pytest.mark.filterwarnings("ignore")  # what the compiler warns of inside itself changes
@pytest.mark.parametrize("beforehand", [False, True])
@pytest.mark.parametrize("make", SLOWEST_LAST, ids=MAKERS)
def test_gradients_are_unscaled_and_infinite_ones_skipped(
    make: Callable[[nn.Module], ZeroMeanSGD], beforehand: bool
) -> None:
    plain, scaled = small(), small()
    reference, optimizer = ZeroMeanSGD(plain, 0.05, foreach=False), make(scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x = torch.randn(4, 6)
    for blow_up in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(scaled(x).square().mean()).backward()
        if blow_up:
            next(scaled.parameters()).grad[0, 0] = torch.inf
        else:
            reference.zero_grad()
            plain(x).square().mean().backward()
            reference.step()
        if beforehand:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**9
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    # The same optimizer without a scaler takes gradients as they are.
    for model, each in ((plain, reference), (scaled, optimizer)):
        each.zero_grad()
        model(x).square().mean().backward()
        each.step()
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


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


@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_inductor_compiles_models(model: str) -> None:
    """Inductor of torch 2.13 fails if it fuses a mean of 8 or more with the updates after it."""
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


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_two_processes_train_as_one() -> None:
    script = Path(__file__).with_name("spread_training.py")
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(script),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("moved") > 0.1
    assert len(found) == 9
    assert {name: value for name, value in found.items() if not value < 1e-12} == {}
