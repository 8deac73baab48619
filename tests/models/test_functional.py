"""A module as a function of its parameters: same outputs, nothing hidden, misfits refused."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedzmg.errors import InputError
from fedzmg.models import GRU, CharGRU, FunctionalModel, digits_cnn, mlp
from fedzmg.models.keyed import KeyedDropout
from fedzmg.tree import Tree

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


def test_outputs_depend_on_the_parameters_given_and_on_nothing_else() -> None:
    module = nn.Linear(3, 2)
    model = FunctionalModel(module)
    other = Tree({"weight": inputs(2, 3), "bias": inputs(2)})
    x = inputs(4, 3, seed=1)
    expected = x @ other["weight"].T + other["bias"]
    torch.testing.assert_close(model.evaluate(other, x), expected)
    with torch.no_grad():
        module.weight.zero_()
    torch.testing.assert_close(model.evaluate(other, x), expected)
    assert float(model.params()["weight"].abs().max()) > 0


def test_the_module_given_is_not_changed() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    before = copy.deepcopy(module.state_dict())
    model = FunctionalModel(module)
    out = model.train(model.params(), inputs(4, 3), KEY)
    assert out.shape == (4, 2)
    assert type(module[1]) is nn.Dropout
    assert type(model.source[1]) is nn.Dropout
    assert type(model.module[1]) is KeyedDropout
    assert not module.training
    assert set(module.state_dict()) == set(before)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_params_are_copies() -> None:
    model = FunctionalModel(nn.Linear(3, 2))
    model.params()["weight"].zero_()
    assert float(model.params()["weight"].abs().max()) > 0
    assert not model.params()["weight"].requires_grad


def test_no_global_randomness_is_used() -> None:
    model = FunctionalModel(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5)))
    params, x = model.params(), inputs(4, 3)
    before = torch.get_rng_state()
    first = model.train(params, x, KEY)
    torch.manual_seed(99)
    assert torch.equal(model.train(params, x, KEY), first)
    torch.set_rng_state(before)
    model.train(params, x, KEY)
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_on_in_training_and_off_in_evaluation() -> None:
    model = FunctionalModel(nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5)))
    params, x = model.params(), inputs(4, 3)
    assert model.needs_key
    plain = model.evaluate(params, x)
    torch.testing.assert_close(plain, x @ params["0.weight"].T + params["0.bias"])
    dropped = model.train(params, x, KEY)
    kept = dropped != 0
    assert 0.2 < float(kept.float().mean()) < 0.8
    torch.testing.assert_close(dropped[kept], 2 * plain[kept])
    other = model.train(params, x, KEY + 1)
    assert not torch.equal(other, dropped)


def test_every_dropout_of_a_deep_model_is_exchanged() -> None:
    block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1))
    model = FunctionalModel(nn.Sequential(block, nn.Dropout(0.2), nn.Sequential(nn.Dropout(0.3))))
    assert sorted(model.layer_keys) == ["0.1.key", "1.key", "2.0.key"]
    found = {n: m for n, m in model.module.named_modules() if isinstance(m, KeyedDropout)}
    assert {n: m.p for n, m in found.items()} == {"0.1": 0.1, "1": 0.2, "2.0": 0.3}
    assert len({m.layer for m in found.values()}) == 3
    assert not any(isinstance(m, nn.Dropout) for m in model.module.modules())


def test_a_dropout_module_used_in_two_places_is_exchanged_in_both() -> None:
    shared = nn.Dropout(0.5)
    model = FunctionalModel(nn.Sequential(nn.Linear(3, 8), shared, nn.Linear(8, 8), shared))
    assert not any(isinstance(m, nn.Dropout) for m in model.module.modules())
    params, x = model.params(), inputs(4, 3)
    assert torch.equal(model.train(params, x, KEY), model.train(params, x, KEY))


def test_models_without_dropout_need_no_key() -> None:
    model = FunctionalModel(nn.Linear(3, 2))
    assert not model.needs_key
    assert model.layer_keys == ()
    model.train(model.params(), inputs(1, 3))


def test_frozen_parameters_stay_constant() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    model = FunctionalModel(module)
    assert set(model.params()) == {"1.weight", "1.bias"}
    x = inputs(5, 3)
    torch.testing.assert_close(model.evaluate(model.params(), x), module(x).detach())


def test_tied_weights_move_together() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    model = FunctionalModel(module)
    params = Tree({name: inputs(*leaf.shape, seed=4) for name, leaf in model.params().items()})
    x = inputs(2, 3, seed=5)
    w = params["0.weight"]
    expected = (x @ w.T + params["0.bias"]) @ w.T + params["1.bias"]
    torch.testing.assert_close(model.evaluate(params, x), expected)


def test_runs_under_vmap_as_alone() -> None:
    model = FunctionalModel(nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 2)))
    many = model.params().map(lambda leaf: torch.stack([leaf, 2 * leaf, -leaf]))
    x, keys = inputs(3, 4, 3), torch.tensor([5, 6, 7])
    mapped = torch.vmap(model.train)(many, x, keys)
    for i in range(3):
        alone = model.train(many.map(lambda leaf, i=i: leaf[i]), x[i], keys[i])
        torch.testing.assert_close(mapped[i], alone)


def test_to_moves_constants_and_leaves_the_original() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    model = FunctionalModel(module)
    wide = model.to(torch.device("cpu"), torch.float64)
    params = wide.params()
    assert {leaf.dtype for leaf in params.values()} == {torch.float64}
    assert wide.train(params, inputs(2, 3).double(), KEY).dtype == torch.float64
    assert {leaf.dtype for leaf in model.params().values()} == {torch.float32}
    assert model.evaluate(model.params(), inputs(2, 3)).dtype == torch.float32


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "batch-norm": (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "'1' is a BatchNorm1d"),
    "batch-norm-2d": (nn.BatchNorm2d(3, track_running_stats=False), "'model' is a BatchNorm2d"),
    "gru": (nn.Sequential(nn.GRU(3, 2)), "'0' is a fused GRU.*fedzmg.models.GRU"),
    "lstm": (nn.LSTM(3, 2), "'model' is a fused LSTM.*nn.LSTMCell"),
    "dropout-2d": (nn.Sequential(nn.Linear(3, 3), nn.Dropout2d(0.5)), "'1' is a Dropout2d"),
    "alpha": (nn.Sequential(nn.Linear(3, 3), nn.AlphaDropout(0.5)), "'1' is a AlphaDropout"),
    "none": (nn.ReLU(), "requires_grad"),
    "frozen": (nn.Linear(3, 3).requires_grad_(False), "requires_grad"),
    "buffer": (nn.Sequential(Buffered()), r"'0' \(Buffered\) has the buffer 'mean'"),
    # Attention drops weights inside of itself, out of reach of addressed masks.
    "attention": (
        nn.Sequential(nn.MultiheadAttention(4, 2, dropout=0.5)), "'0' is a Multihead"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_modules_are_refused(name: str) -> None:
    module, named = REFUSED[name]
    with pytest.raises(InputError, match=named) as caught:
        FunctionalModel(module)
    assert "\n" not in str(caught.value)


def test_attention_without_dropout_needs_no_key() -> None:
    assert not FunctionalModel(nn.MultiheadAttention(4, 2)).needs_key


def test_addressed_gru_is_accepted() -> None:
    assert len(FunctionalModel(GRU(3, 2)).params()) == 4


class Scaled(nn.Module):
    """A constant as a plain attribute, which nn.Module.to() does not move."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.scale = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
        self.order = torch.tensor([2, 0, 1])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer((x @ self.scale)[:, self.order])
        return out


def test_plain_tensors_move_with_the_model() -> None:
    module = Scaled()
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


class Function(nn.Module):
    """A dense layer and whatever a test does with what goes in and comes out."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


RANDOM: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "functional-dropout": lambda m, x: F.dropout(m.layer(x), 0.5, m.training),
    "dropout-always-on": lambda m, x: F.dropout(m.layer(x)),
    "torch-noise": lambda m, x: m.layer(x + torch.randn_like(x)),
    "numpy": lambda m, x: m.layer(x) * float(np.random.rand()),  # noqa: NPY002
    "python": lambda m, x: m.layer(x) * (random.random() if m.training else 1),
    "rrelu": lambda m, x: F.rrelu(m.layer(x), training=m.training),
    "gumbel": lambda m, x: F.gumbel_softmax(m.layer(x)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_randomness_without_an_address_is_refused(name: str) -> None:
    model = FunctionalModel(Function(RANDOM[name]))
    with pytest.raises(InputError, match="random numbers"):
        model.try_out(model.params(), inputs(2, 3))


MIXING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "batch-mean": lambda m, x: m.layer(x - x.mean(0)),
    "only-in-training": lambda m, x: m.layer(x - x.mean(0) if m.training else x),
    "squeeze": lambda m, x: m.layer(x).squeeze(),
    "softmax-over-the-batch": lambda m, x: m.layer(x).softmax(0),
    "two-outputs": lambda m, x: (m.layer(x), x - x.mean(0)),  # type: ignore[dict-item,return-value]
}


@pytest.mark.parametrize("name", MIXING)
def test_examples_must_not_see_each_other(name: str) -> None:
    """Batches are padded and split: what an example gives may not depend on its neighbours."""
    model = FunctionalModel(Function(MIXING[name]))
    with pytest.raises(InputError, match="other examples of its batch"):
        model.try_out(model.params(), inputs(2, 3))


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)),
        Function(lambda m, x: m.layer(x)),
        Function(lambda m, x: (m.layer(x), x)),  # type: ignore[arg-type,return-value]
        Function(lambda m, x: (m.layer(x), x.sum(), None)),  # type: ignore[arg-type,return-value]
        Function(lambda m, x: m.layer(x) * math.inf),
        Function(lambda m, x: m.layer(x) * 1e30),
    ],
    ids=["dropout", "plain", "two-outputs", "a-sum-besides", "infinite", "huge"],
)
def test_trying_out_gives_the_outputs_of_what_is_fine(module: nn.Module) -> None:
    model = FunctionalModel(module)
    for rows in (1, 2, 3):
        x = inputs(rows, 3)
        out, expected = model.try_out(model.params(), x), model.evaluate(model.params(), x)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


UNMAPPED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "branch": (lambda m, x: m.layer(x) if x.sum() > 0 else -m.layer(x), "torch.where"),
    "item": (lambda m, x: m.layer(x) * m.layer(x).mean().item(), "torch.where"),
    "dropout": (RANDOM["functional-dropout"], "random numbers"),
    "dynamic": (lambda m, x: m.layer(x) * len(x.nonzero()), "engine='sequential'"),
}


@pytest.mark.parametrize("name", UNMAPPED)
def test_a_model_that_cannot_be_mapped_is_refused_in_one_line(name: str) -> None:
    function, named = UNMAPPED[name]
    model = FunctionalModel(Function(function))
    many = model.params().map(lambda leaf: torch.stack([leaf, leaf]))
    with pytest.raises(InputError, match=named) as caught:
        torch.vmap(model.train)(many, inputs(2, 5, 3))
    assert "\n" not in str(caught.value)
    # The private module is restored: a plain call works as before.
    assert model.train(model.params(), inputs(5, 3)).shape == (5, 4)


def test_other_errors_of_a_model_pass_unchanged() -> None:
    model = FunctionalModel(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.evaluate(model.params(), inputs(2, 4))


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = nn.Linear(3, 2)
    module.cache = module.weight * 2  # type: ignore[assignment]
    with pytest.raises(
        InputError, match=r"^the model cannot be copied \(.*\): keep only parameters"
    ):
        FunctionalModel(module)
