"""A module as a function of its parameters: same outputs, no hidden state, clear rejections."""

from __future__ import annotations

import copy
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedzmg.errors import InputError
from fedzmg.models import CharGRU, FunctionalModel, digits_cnn, mlp
from fedzmg.models.layers import KeyedDropout
from fedzmg.tree import Tree
from golden_problems import Net

KEY = torch.tensor(123456789)


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (mlp(6, 4, outputs=3), inputs(5, 2, 3)),
        (digits_cnn(), inputs(2, 28, 28)),
        (CharGRU(7, 3, 4), torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(1))),
        (nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.PReLU()), inputs(6, 3)),
    ],
    ids=["mlp", "cnn", "gru", "norm"],
)
def test_same_outputs_and_gradients_as_the_module(module: nn.Module, x: Tensor) -> None:
    model = FunctionalModel(module)
    params = model.params()
    assert set(params) == {name for name, _ in module.named_parameters()}
    expected = module(x)
    for function in (model.evaluate, model.train):
        torch.testing.assert_close(function(params, x), expected.detach())
    expected.square().sum().backward()
    tracked = params.map(lambda leaf: leaf.requires_grad_())
    model.train(tracked, x).square().sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(tracked[name].grad, parameter.grad)


def test_model_and_module_do_not_change_each_other() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    before = copy.deepcopy(module.state_dict())
    model = FunctionalModel(module)
    assert model.train(model.params(), inputs(4, 3), KEY).shape == (4, 2)
    assert [type(m[1]) for m in (module, model.source, model.module)] == [  # type: ignore[index]
        nn.Dropout, nn.Dropout, KeyedDropout
    ]  # fmt: skip
    assert not module.training
    assert set(module.state_dict()) == set(before)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    with torch.no_grad():
        module[0].weight.zero_()
    assert torch.equal(model.params()["0.weight"], before["0.weight"])


def test_tied_weights_move_together() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    model = FunctionalModel(module)
    params = Tree({name: inputs(*leaf.shape, seed=4) for name, leaf in model.params().items()})
    x = inputs(2, 3, seed=5)
    w = params["0.weight"]
    expected = (x @ w.T + params["0.bias"]) @ w.T + params["1.bias"]
    torch.testing.assert_close(model.evaluate(params, x), expected)


def test_plain_tensors_move_with_the_model() -> None:
    # nn.Module.to() does not move plain attributes.
    module: Any = Net(
        lambda m, x: m.layer((x @ m.scale)[:, m.order]),
        layer=nn.Linear(3, 2),
        scale=torch.diag(torch.tensor([1.0, 2.0, 4.0])),
        order=torch.tensor([2, 0, 1]),
    )
    model = FunctionalModel(module)
    wide = model.to(torch.device("cpu"), torch.float64)
    assert wide.module.scale.dtype == torch.float64
    assert wide.module.order.dtype == torch.int64
    assert module.scale.dtype == model.module.scale.dtype == torch.float32  # type: ignore[union-attr]
    x = inputs(4, 3)
    out = wide.evaluate(wide.params(), x.double())
    torch.testing.assert_close(out, module(x).detach().double(), rtol=0, atol=1e-5)
    meta = model.to(torch.device("meta"), torch.float32)
    assert meta.module.scale.device.type == meta.module.order.device.type == "meta"  # type: ignore[union-attr]


def dense(function: Callable[[Any, Tensor], Any]) -> nn.Module:
    """A dense layer and a function of it and the inputs."""
    return Net(function, layer=nn.Linear(3, 4))


LOOPED: dict[str, Callable[[Any, Tensor], Any]] = {
    "numpy": lambda m, x: m.layer(x) * float(np.random.rand()),  # noqa: NPY002
    "python": lambda m, x: m.layer(x) * (random.random() if m.training else 1),
    # Batches are padded and split: mapped examples must not see each other.
    "batch-mean": lambda m, x: m.layer(x - x.mean(0)),
    "only-in-training": lambda m, x: m.layer(x - x.mean(0) if m.training else x),
    "two-outputs": lambda m, x: (m.layer(x), x - x.mean(0)),
}


@pytest.mark.parametrize("name", LOOPED)
def test_randomness_without_a_key_and_mixed_examples_are_left_to_the_loop(name: str) -> None:
    model = FunctionalModel(dense(LOOPED[name]))
    model.try_out(model.params(), inputs(2, 3))
    assert model.loop_reason
    assert model.needs_key == (name in ("numpy", "python"))


def test_a_lone_example_keeps_its_axis() -> None:
    model, x = FunctionalModel(dense(lambda m, x: m.layer(x).squeeze())), inputs(2, 3)
    several = model.try_out(model.params(), x)
    assert model.loop_reason == ""
    for call in (model.train, model.evaluate):
        torch.testing.assert_close(call(model.params(), x[1:]), several[1:])


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)),
        dense(lambda m, x: (m.layer(x), x)),  # type: ignore[arg-type,return-value]
        dense(lambda m, x: (m.layer(x), x.sum(), None)),  # type: ignore[arg-type,return-value]
        dense(lambda m, x: m.layer(x) * math.inf),
        dense(lambda m, x: m.layer(x) * 1e30),
    ],
    ids=["dropout", "two-outputs", "a-sum-besides", "infinite", "huge"],
)
def test_try_out_returns_the_outputs_of_a_supported_model(module: nn.Module) -> None:
    model = FunctionalModel(module)
    for rows in (1, 2, 3):
        x = inputs(rows, 3)
        out, expected = model.try_out(model.params(), x), model.evaluate(model.params(), x)
        assert model.loop_reason == ""
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_a_module_that_cannot_be_copied_is_rejected() -> None:
    module = nn.Linear(3, 2)
    module.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(InputError, match="copied"):
        FunctionalModel(module)
