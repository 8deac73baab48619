"""Gradients centred in place, and any torch optimizer with its final step centred."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from fedzmg.errors import InputError
from fedzmg.models import CharGRU, layout_of
from fedzmg.optim import Centred, zero_mean_
from fedzmg.wrappers.projection import zero_mean
from golden_problems import GOLDEN

TENSORS = GOLDEN["algorithms"]["projection_tensors"]


@pytest.mark.parametrize("name", TENSORS)
def test_golden_tensors(name: str) -> None:
    entry: dict[str, Any] = TENSORS[name]
    grad = torch.tensor(entry["grad"], dtype=torch.float64).reshape(entry["shape"])
    axes = tuple(entry["axes"]) if "axes" in entry else (entry["axis"],)
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros_like(grad))
    layer.weight.grad = grad
    zero_mean_(layer, {"weight": axes})
    expected = torch.tensor(entry["projected"], dtype=torch.float64).reshape(entry["shape"])
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


def test_a_model_is_centred_as_the_engines_do_it() -> None:
    torch.manual_seed(0)
    model = CharGRU(9, 5, 6).double()
    model(torch.randint(0, 9, (2, 4))).square().sum().backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    zero_mean_(model)
    for name, info in layout_of(model).items():
        grad: Tensor = model.get_parameter(name).grad
        torch.testing.assert_close(grad, zero_mean(before[name], info.input_axes))
    centred = {n: p.grad.clone() for n, p in model.named_parameters()}
    zero_mean_(model)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, centred[name], rtol=0, atol=1e-14)


def test_parameters_without_gradient_and_sparse_ones() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True)])
    zero_mean_(model)
    model[1](torch.tensor([0])).sum().backward()
    with pytest.raises(InputError, match="sparse=False"):
        zero_mean_(model)
    before = model[1].weight.grad.to_dense()
    zero_mean_(model, {"1.weight": ()})
    assert torch.equal(model[1].weight.grad.to_dense(), before)


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
    with pytest.raises(InputError, match="not known"):
        centred.add_param_group({"params": [nn.Parameter(torch.ones(2, 3))]})
    assert len(centred.optimizer.param_groups) == 2


def test_only_optimizers_of_the_model_are_wrapped() -> None:
    with pytest.raises(InputError, match=r"expected a torch\.optim\.Optimizer"):
        Centred(nn.Linear(2, 2))  # type: ignore[arg-type]
    stranger = torch.optim.Adam(nn.Linear(2, 2).parameters())
    with pytest.raises(InputError, match="not known"):
        Centred(stranger, nn.Linear(2, 2))
    assert "input_axes" not in stranger.param_groups[0]


def test_axes_by_name() -> None:
    layer = nn.Embedding(4, 3)
    inner = torch.optim.Adam(layer.named_parameters(), 0.1)
    assert Centred(inner, axes={"weight": (0,)}).param_groups[0]["input_axes"] == [(0,)]
    with pytest.raises(InputError, match="did you mean 'weight'"):
        Centred(torch.optim.Adam(layer.named_parameters(), 0.1), axes={"wieght": (0,)})
