"""Any torch optimizer, its final step centred."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from fedzmg.algorithms.projection import zero_mean
from fedzmg.errors import InputError
from fedzmg.models import CharGRU, layout_of
from fedzmg.optim import Centred

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, 0.05),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}


def model_of(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return CharGRU(9, 5, 6).to(dtype)


def backward(model: nn.Module, seed: int) -> Tensor:
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(torch.randint(0, 9, (2, 4))).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_step_is_the_inner_step_centred(name: str) -> None:
    model = model_of()
    centred = Centred(OPTIMIZERS[name](model.parameters()), model)
    sums = {n: p.detach().sum(i.input_axes) for n, p, i in projected(model)}
    for seed in range(4):
        backward(model, seed)
        twin = copy.deepcopy(model)
        inner = OPTIMIZERS[name](twin.parameters())
        inner.load_state_dict(copy.deepcopy(centred.state_dict()))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        inner.step()
        centred.step()
        axes = {n: i.input_axes for n, i in layout_of(model).items()}
        for n, p in twin.named_parameters():
            expected = before[n] + zero_mean(p.detach() - before[n], axes[n])
            torch.testing.assert_close(model.get_parameter(n).detach(), expected)
    for n, p, i in projected(model):
        torch.testing.assert_close(p.detach().sum(i.input_axes), sums[n])


def projected(model: nn.Module) -> list[Any]:
    layout = layout_of(model)
    return [(n, p, layout[n]) for n, p in model.named_parameters() if layout[n].input_axes]


def test_it_is_one_optimizer_for_schedulers_and_checkpoints(tmp_path: Path) -> None:
    model = model_of()
    centred = Centred(torch.optim.Adam(model.parameters(), 0.1), model)
    assert isinstance(centred, torch.optim.Optimizer)
    scheduler = StepLR(centred, 1, 0.5)
    backward(model, 0)
    centred.step()
    scheduler.step()
    assert centred.optimizer.param_groups[0]["lr"] == 0.05
    torch.save(centred.state_dict(), tmp_path / "state")

    again = copy.deepcopy(model)
    restored = Centred(torch.optim.Adam(again.parameters(), 0.9), again)
    restored.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert restored.param_groups is restored.optimizer.param_groups
    assert restored.state is restored.optimizer.state
    assert restored.param_groups[0]["lr"] == 0.05
    for m, o in ((model, centred), (again, restored)):
        backward(m, 1)
        o.step()
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_copies_closures_cycles_and_more_groups() -> None:
    model = model_of()
    centred = Centred(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    scheduler = OneCycleLR(centred, 0.2, total_steps=5)
    assert centred.step(lambda: backward(model, 0)).item() > 0
    scheduler.step()
    model2, centred2 = copy.deepcopy((model, centred))
    assert centred2.optimizer is not centred.optimizer
    assert centred2.param_groups is centred2.optimizer.param_groups
    for m, o in ((model, centred), (model2, centred2)):
        backward(m, 1)
        o.step()
    for a, b in zip(model.parameters(), model2.parameters(), strict=True):
        assert torch.equal(a, b)
    more = nn.Parameter(torch.ones(2, 3).double())
    centred.add_param_group({"params": [more], "input_axes": (1,)})
    assert len(centred.optimizer.param_groups) == 2
    more.grad = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 5.0]], dtype=torch.float64)
    centred.step()
    torch.testing.assert_close(more.detach().sum(1), torch.tensor([3.0, 3.0], dtype=torch.float64))
    with pytest.raises(InputError, match="none of the model's"):
        centred.add_param_group({"params": [nn.Parameter(torch.ones(2, 3))]})
    assert len(centred.optimizer.param_groups) == 2


def test_a_scaler_skips_infinite_steps() -> None:
    model = model_of(torch.float32)
    centred = Centred(torch.optim.Adam(model.parameters(), 0.1), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, 0)
    next(model.parameters()).grad[0, 0] = torch.inf
    scaler.scale(torch.ones(()))
    scaler.step(centred)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)


def test_what_it_wraps_must_be_an_optimizer_of_the_model() -> None:
    with pytest.raises(InputError, match=r"expected a torch\.optim\.Optimizer"):
        Centred(nn.Linear(2, 2))  # type: ignore[arg-type]
    stranger = torch.optim.Adam(nn.Linear(2, 2).parameters())
    with pytest.raises(InputError, match="none of the model's"):
        Centred(stranger, nn.Linear(2, 2))
    assert "input_axes" not in stranger.param_groups[0]


def test_axes_by_name() -> None:
    layer = nn.Embedding(4, 3)
    inner = torch.optim.Adam(layer.named_parameters(), 0.1)
    assert Centred(inner, axes={"weight": (0,)}).param_groups[0]["input_axes"] == [(0,)]
    with pytest.raises(InputError, match="did you mean 'weight'"):
        Centred(torch.optim.Adam(layer.named_parameters(), 0.1), axes={"wieght": (0,)})


def test_frozen_layers_are_left_alone_until_they_train() -> None:
    model = model_of()
    model.requires_grad_(False)
    last = list(model.children())[-1].requires_grad_(True)
    centred = Centred(torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1), model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    backward(model, 0)
    centred.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in model.named_parameters() if p.requires_grad}
    assert last.weight.requires_grad
    model.requires_grad_(True)
    backward(model, 1)
    centred.step()
    for n, p, i in projected(model):
        torch.testing.assert_close(p.detach().sum(i.input_axes), before[n].sum(i.input_axes))
        assert not torch.equal(p, before[n])
