"""Input axes that an optimizer uses, and arguments that it rejects."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fedzmg.algorithms.fedavg import SGD
from fedzmg.errors import InputError
from fedzmg.models import layout, layout_of
from fedzmg.optim import Centred, ZeroMeanSGD, zero_mean_
from fedzmg.tree import Tree
from golden_problems import make_context


@pytest.fixture
def not_warned() -> None:
    layout.warn_once.cache_clear()


def found(optimizer: ZeroMeanSGD) -> list[list[tuple[int, ...]]]:
    return [group["input_axes"] for group in optimizer.param_groups]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(2, 3))
        self.offset = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.usefixtures("not_warned")
def test_a_bare_list_warns_once_and_keeps_the_first_axis() -> None:
    params = [nn.Parameter(torch.ones(s)) for s in ((2, 3), (2, 3, 4, 5), (3,), ())]
    with pytest.warns(UserWarning, match=r"for_model.*input_axes") as warned:
        optimizer = ZeroMeanSGD(params, 0.1)
    assert warned[0].filename == __file__
    assert found(optimizer) == [[(1,), (1, 2, 3), (), ()]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ZeroMeanSGD(params, 0.1)


def test_a_model_knows_its_axes() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.ConvTranspose2d(3, 2, 2), nn.Linear(4, 2))
    for optimizer in (ZeroMeanSGD(model, 0.1), ZeroMeanSGD.for_model(model, 0.1)):
        assert found(optimizer) == [[(0,), (0, 2, 3), (), (1,), ()]]
        assert optimizer.param_groups[0]["param_names"][0] == "0.weight"


@pytest.mark.usefixtures("not_warned")
def test_unknown_modules_matter_only_for_their_matrices() -> None:
    with pytest.warns(UserWarning, match=r"matrix \(Own\)") as warned:
        assert found(ZeroMeanSGD(Own(), 0.1)) == [[(), (), (), ()]]
    assert (len(warned), warned[0].filename) == (1, __file__)
    for given in ({"matrix": (0,)}, {"mat*": (0,)}):
        optimizer = ZeroMeanSGD(Own(), 0.1, axes=given)
        assert found(optimizer) == [[(0,), (), (), ()]]
    assert "frozen.weight" not in optimizer.param_groups[0]["param_names"]


def test_decay_scope_spares_biases_and_norms_as_the_simulator_does() -> None:
    """By role, not by rank: this layer norm has weights and biases of two axes."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (2, 4)), nn.LayerNorm((2, 4)))
    optimizer = ZeroMeanSGD.for_model(model, 0.5, weight_decay=0.2, decay_scope="kernels")
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.0]
    params = Tree({n: p.detach().clone() for n, p in model.named_parameters()})
    rule = SGD(0.5, decay=0.2, decay_scope="kernels").for_layout(layout_of(model))
    expected, _ = rule.step(make_context(params), params, (), params.zeros())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name])
        assert torch.equal(p, params[name]) == (name != "0.weight")
    with pytest.raises(InputError, match=r"'kernel'.*'kernels'"):
        ZeroMeanSGD.for_model(model, 0.1, decay_scope="kernel")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "given", "match"),
    [
        (lambda m: m.parameters(), {"weight": (1,)}, r"no names.*named_parameters\(\)"),
        (lambda m: m.named_parameters(), {"bias": ()}, "'weight' of shape .* not known"),
        (lambda m: m.named_parameters(), {"weight": (1,), "wieght": ()}, "did you mean 'weight'"),
        (lambda m: m.named_parameters(), {"weight": (2,)}, "weight"),
        (lambda m: m.named_parameters(), {"weight": (1, -1)}, "weight"),
        (lambda m: m, {"weights": (1,)}, "'weights'"),
        (lambda m: m, {"*.kernel": (1,)}, r"'\*.kernel'"),
        (lambda m: m.named_parameters(), {"w*": (1,), "k*": ()}, r"'k\*'"),
    ],
)
@pytest.mark.filterwarnings("ignore:input axes are not known")
def test_maps_that_do_not_fit_are_rejected(params: Any, given: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        ZeroMeanSGD(params(nn.Linear(3, 2)), 0.1, axes=given)


@pytest.mark.parametrize("given", [[(1,)], [(1,), (0,), ()], (3,), [(1,), (1,)]])
def test_groups_that_do_not_fit_are_rejected(given: Any) -> None:
    params = list(nn.Linear(3, 2).parameters())
    with pytest.raises(InputError):
        ZeroMeanSGD([{"params": params, "input_axes": given}], 0.1)


@pytest.mark.parametrize("given", [1, np.int64(1), (np.int64(1),), [(-1,), ()], (-1,)])
def test_axes_may_be_any_whole_numbers(given: Any) -> None:
    layer = nn.Linear(3, 2)
    assert found(ZeroMeanSGD([{"params": layer.parameters(), "input_axes": given}], 0.1)) == [
        [(1,), ()]
    ]
    if not isinstance(given, list):
        assert found(ZeroMeanSGD(layer, 0.1, axes={"weight": given})) == [[(1,), ()]]


# --- parameters without a shape, and with one input ------------------------------------------


def test_lazy_layers_are_rejected_until_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyConv1d(2, 1))
    inner = torch.optim.SGD(model.parameters(), 0.1)
    for make in (
        lambda: ZeroMeanSGD(model, 0.1),
        lambda: ZeroMeanSGD([{"params": model.parameters(), "input_axes": (1,)}], 0.1),
        lambda: Centred(inner, model),
        lambda: zero_mean_(model),
    ):
        with pytest.raises(InputError, match="has no shape yet: run one forward first"):
            make()
    layer = nn.LazyLinear(3)
    layer(torch.ones(2, 4))
    assert found(ZeroMeanSGD(layer, 0.1)) == [[(1,), ()]]


ONE_INPUT: dict[str, Any] = {
    "linear": lambda: nn.Linear(1, 4),
    "depthwise": lambda: nn.Conv2d(4, 4, 1, groups=4),
    "embedding": lambda: nn.Embedding(1, 4),
}


@pytest.mark.usefixtures("not_warned")
@pytest.mark.parametrize("name", ONE_INPUT)
def test_units_with_one_input_stay_andwarn_once(name: str) -> None:
    model = nn.ModuleDict({"first": ONE_INPUT[name](), "more": nn.Linear(2, 2)})
    with pytest.warns(UserWarning, match=r"parameter first\.weight have one input") as warned:
        optimizer = ZeroMeanSGD(model, 0.1, weight_decay=0.0)
    assert len(warned) == 1
    before = model["first"].weight.detach().clone()
    model["first"].weight.grad = torch.randn_like(before)
    optimizer.step()
    # Up to rounding: the mean goes through the velocity.
    torch.testing.assert_close(model["first"].weight.detach(), before, rtol=0, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ZeroMeanSGD(model, 0.1)
        free = ZeroMeanSGD(model, 0.1, axes={"first.weight": ()})
    free.step()
    assert not torch.equal(model["first"].weight, before)


# --- frozen layers ---------------------------------------------------------------------------


def half_frozen() -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    model[:2].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda m: ZeroMeanSGD(m, 0.1),
        lambda m: ZeroMeanSGD.for_model(m, 0.1, decay_scope="kernels"),
        lambda m: Centred(torch.optim.AdamW(m[2].named_parameters("2"), 0.1), m),
    ],
)
def test_layers_that_are_unfrozen_later_have_their_own_axes(make: Any) -> None:
    model = half_frozen()
    optimizer = make(model)
    model.requires_grad_(True)
    optimizer.add_param_group({"params": list(model[:2].named_parameters())})
    assert optimizer.param_groups[-1]["input_axes"] == [(0,), (1,), ()]
    sums = model[0].weight.detach().sum(0)
    model(torch.tensor([1, 2])).square().sum().backward()
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach().sum(0), sums)


def test_frozen_layers_may_be_named_and_are_not_guessed() -> None:
    model = nn.ModuleDict({"own": Own(), "last": nn.Linear(3, 2)})
    model["own"].requires_grad_(False)
    optimizer = ZeroMeanSGD(model, 0.1)
    matrix = {"params": [("own.matrix", model["own"].matrix)]}
    with pytest.raises(InputError, match=r"\(2, 3\) are not known"):
        optimizer.add_param_group(matrix)
    optimizer = ZeroMeanSGD(model, 0.1, axes={"own.matrix": (-2,)})
    optimizer.add_param_group(matrix)
    assert optimizer.param_groups[-1]["input_axes"] == [(0,)]


# --- weights that are made of others ---------------------------------------------------------


def test_spectral_norm_keeps_the_axes_of_its_layer() -> None:
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.ConvTranspose1d(3, 2, 2)),
        parametrizations.spectral_norm(nn.Linear(4, 3)),
    )
    chosen = dict(zip(*[ZeroMeanSGD(model, 0.1).param_groups[0][k] for k in (
        "param_names", "input_axes")], strict=True))  # fmt: skip
    assert chosen["0.parametrizations.weight.original"] == (0, 2)
    assert chosen["1.parametrizations.weight.original"] == (1,)
    alone = parametrizations.spectral_norm(nn.Linear(4, 3, bias=False))
    assert found(ZeroMeanSGD(alone, 0.1)) == [[(1,)]]


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.orthogonal])
@pytest.mark.usefixtures("not_warned")
def test_other_parametrisations_are_named_by_the_user(wrap: Any) -> None:
    model = nn.Sequential(wrap(nn.Linear(4, 3)))
    with pytest.warns(UserWarning, match=r"parametrizations\.weight\.original"):
        ZeroMeanSGD(model, 0.1)
    matrices = [n for n, p in model.named_parameters() if p.ndim > 1]
    given = {n: (1,) if n.endswith("1") else () for n in matrices}  # original1: the directions
    ZeroMeanSGD(model, 0.1, axes=given)


# --- numbers and groups that are rejected ------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": -1.0}, "lr = -1"),
        ({"lr": torch.ones(2)}, "2 entries"),
        ({"lr": torch.tensor(-1.0)}, "lr = -1"),
        ({"lr": torch.tensor(torch.nan)}, "lr = nan"),
        ({"lr": float("inf")}, "lr = inf"),
        ({"lr": "fast"}, "lr = fast"),
        ({"momentum": 1.0}, "momentum = 1"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov"),
        ({"foreach": True, "fused": True}, "exclude"),
    ],
)
def test_bad_numbers_are_rejected(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        ZeroMeanSGD(nn.Linear(3, 2), **{"lr": 0.1, **options})


def test_a_rejected_group_is_not_kept() -> None:
    optimizer = ZeroMeanSGD(nn.Linear(3, 2), 0.1)
    more = nn.Parameter(torch.ones(2, 2))
    for wrong in (
        {"lr": -1.0, "input_axes": (1,)},
        {"input_axes": (5,)},
        {"input_axes": 1.5},
        {"input_axes": [(1,), None]},
        {"input_axes": [None]},
        {"input_axes": "1"},
        {"input_axis": (1,)},
        {"axes": (1,)},
        {"input_axes": (1,), "foreach": True, "fused": True},
        {"input_axes": (1,), "dampening": 0.5},
    ):
        with pytest.raises(InputError):
            optimizer.add_param_group({"params": [("more", more)], **wrong})
    optimizer.add_param_group({"params": [("more", more)], "input_axes": (1,)})
    assert len(optimizer.param_groups) == 2
