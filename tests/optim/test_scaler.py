"""Scalers of losses, also those that leave unscaling to the optimizer: right on every way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedzmg.models import mlp
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


@pytest.mark.filterwarnings("ignore")  # what the compiler warns of inside itself changes
@pytest.mark.parametrize("beforehand", [False, True])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
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
