"""Input axes of layers: the table, layer by layer, and its meaning."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedzmg.contract import ParamInfo
from fedzmg.errors import InputError
from fedzmg.models import GRU, CharGRU, digits_cnn
from fedzmg.models import layout_of as full_layout

BIAS = ParamInfo("bias", ())
NORM = ParamInfo("norm", ())


def layout_of(model: nn.Module, axes: Any = None) -> dict[str, ParamInfo]:
    """Role and axes; the layer's type has a test of its own."""
    return {name: info._replace(layer="") for name, info in full_layout(model, axes).items()}


def test_layers_are_named_by_their_type() -> None:
    layout = full_layout(digits_cnn())
    assert {name: info.layer for name, info in layout.items() if name.endswith("weight")} == {
        "1.weight": "Conv2d", "3.weight": "Conv2d", "6.weight": "Linear", "8.weight": "Linear"
    }  # fmt: skip


def kernel(*axes: int) -> ParamInfo:
    return ParamInfo("kernel", axes)


def recurrent(suffix: str) -> dict[str, ParamInfo]:
    return {
        f"weight_ih_{suffix}": kernel(1),
        f"weight_hh_{suffix}": ParamInfo("recurrent_kernel", (1,)),
        f"bias_ih_{suffix}": BIAS,
        f"bias_hh_{suffix}": BIAS,
    }


CELL = {name.removesuffix("_x"): info for name, info in recurrent("x").items()}

TABLE: list[tuple[nn.Module, dict[str, ParamInfo]]] = [
    (nn.Linear(3, 2), {"weight": kernel(1), "bias": BIAS}),
    (nn.Linear(3, 2, bias=False), {"weight": kernel(1)}),
    (nn.Bilinear(3, 4, 2), {"weight": kernel(1, 2), "bias": BIAS}),
    (nn.Conv1d(3, 2, 5), {"weight": kernel(1, 2), "bias": BIAS}),
    (nn.Conv2d(3, 2, 5), {"weight": kernel(1, 2, 3), "bias": BIAS}),
    (nn.Conv3d(3, 2, 5), {"weight": kernel(1, 2, 3, 4), "bias": BIAS}),
    (nn.Conv2d(4, 6, 3, groups=2), {"weight": kernel(1, 2, 3), "bias": BIAS}),
    (nn.Conv2d(4, 4, 3, groups=4), {"weight": kernel(1, 2, 3), "bias": BIAS}),
    (nn.ConvTranspose1d(3, 2, 5), {"weight": kernel(0, 2), "bias": BIAS}),
    (nn.ConvTranspose2d(3, 2, 5), {"weight": kernel(0, 2, 3), "bias": BIAS}),
    (nn.ConvTranspose3d(3, 2, 5), {"weight": kernel(0, 2, 3, 4), "bias": BIAS}),
    (nn.GRU(3, 2), recurrent("l0")),
    (nn.GRU(3, 2, num_layers=2), recurrent("l0") | recurrent("l1")),
    (nn.GRU(3, 2, bidirectional=True), recurrent("l0") | recurrent("l0_reverse")),
    (nn.LSTM(3, 2), recurrent("l0")),
    (nn.RNN(3, 2), recurrent("l0")),
    (nn.GRUCell(3, 2), CELL),
    (nn.LSTMCell(3, 2), CELL),
    (nn.RNNCell(3, 2), CELL),
    (GRU(3, 2), recurrent("l0")),
    (nn.Embedding(9, 4), {"weight": ParamInfo("embedding", (0,))}),
    (nn.EmbeddingBag(9, 4), {"weight": ParamInfo("embedding", (0,))}),
    (nn.LayerNorm(4), {"weight": NORM, "bias": NORM}),
    (nn.LayerNorm((4, 5)), {"weight": NORM, "bias": NORM}),
    (nn.RMSNorm(4), {"weight": NORM}),
    (nn.GroupNorm(2, 4), {"weight": NORM, "bias": NORM}),
    (nn.InstanceNorm2d(4, affine=True), {"weight": NORM, "bias": NORM}),
    (nn.InstanceNorm1d(4), {}),
    (nn.PReLU(3), {"weight": NORM}),
    (
        nn.MultiheadAttention(4, 2),
        {
            "in_proj_weight": kernel(1),
            "in_proj_bias": BIAS,
            "out_proj.weight": kernel(1),
            "out_proj.bias": BIAS,
        },
    ),
    (
        nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True, bias=False),
        {
            "q_proj_weight": kernel(1),
            "k_proj_weight": kernel(1),
            "v_proj_weight": kernel(1),
            "bias_k": BIAS,
            "bias_v": BIAS,
            "out_proj.weight": kernel(1),
        },
    ),
]


@pytest.mark.parametrize(
    ("module", "expected"), TABLE, ids=[f"{i}-{type(m).__name__}" for i, (m, _) in enumerate(TABLE)]
)
def test_table(module: nn.Module, expected: dict[str, ParamInfo]) -> None:
    assert dict(layout_of(module)) == expected


def test_whole_models_use_full_names() -> None:
    assert dict(layout_of(CharGRU(9, 3, 4))) == {
        "embedding.weight": ParamInfo("embedding", (0,)),
        **{f"gru.{name}": info for name, info in recurrent("l0").items()},
        "dense.weight": kernel(1),
        "dense.bias": BIAS,
    }


def all_ones(module: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Compute the outputs for inputs that are all one."""
    with torch.no_grad():
        return module(torch.ones(shape, dtype=torch.float64))


@pytest.mark.parametrize(
    ("module", "shape", "place"),
    [
        (nn.Linear(3, 4, bias=False), (1, 3), (0,)),
        (nn.Conv1d(3, 4, 2, bias=False), (1, 3, 6), (0, slice(None), 2)),
        (nn.Conv2d(3, 4, (2, 3), bias=False), (1, 3, 6, 6), (0, slice(None), 2, 2)),
        (nn.Conv2d(4, 6, 3, groups=2, bias=False), (1, 4, 6, 6), (0, slice(None), 2, 2)),
        (nn.Conv2d(4, 8, 3, groups=4, bias=False), (1, 4, 6, 6), (0, slice(None), 2, 2)),
        (nn.ConvTranspose1d(3, 4, 3, bias=False), (1, 3, 9), (0, slice(None), 5)),
        (nn.ConvTranspose2d(3, 4, (3, 2), bias=False), (1, 3, 9, 9), (0, slice(None), 5, 5)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_input_axes_are_what_a_unit_sums_over(
    module: nn.Module, shape: tuple[int, ...], place: tuple[Any, ...]
) -> None:
    """A unit that reads only ones answers the sum of its weights over its input axes."""
    module = module.double()
    axes = layout_of(module)["weight"].input_axes
    answer = all_ones(module, shape)[place]
    torch.testing.assert_close(module.weight.detach().sum(axes), answer, rtol=0, atol=1e-12)


def test_an_embedding_is_a_linear_map_of_one_hot_rows() -> None:
    table = nn.Embedding(6, 3).double()
    one_hot_sum = table(torch.arange(6)).sum(0)
    axes = layout_of(table)["weight"].input_axes
    torch.testing.assert_close(table.weight.sum(axes), one_hot_sum)


def test_subclasses_follow_their_base() -> None:
    class Special(nn.Linear):
        pass

    assert dict(layout_of(Special(3, 2))) == {"weight": kernel(1), "bias": BIAS}


class Scaled(nn.Module):
    """A module type of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2, 3))
        self.inner = nn.Linear(3, 2)


def test_unknown_module_is_refused_with_the_remedy() -> None:
    with pytest.raises(InputError, match=r"'1.gain' belongs to a Scaled.*axes={'1.gain': "):
        layout_of(nn.Sequential(nn.Linear(3, 3), Scaled()))


def test_grouped_transposed_convolution_is_refused() -> None:
    """Its units read a block of the first axis, which no tuple of axes can say."""
    with pytest.raises(InputError, match=r"'weight' belongs to a ConvTranspose2d"):
        layout_of(nn.ConvTranspose2d(4, 4, 3, groups=2))
    free = layout_of(nn.ConvTranspose2d(4, 4, 3, groups=2), {"weight": ()})
    assert free["weight"].input_axes == ()


def test_a_strange_parameter_of_a_known_layer_is_refused() -> None:
    """Old weight norm puts lengths ``(out, 1)`` there; centred over one input they never move."""
    for layer in (nn.Linear(3, 2), nn.Conv2d(1, 2, 3), nn.ConvTranspose2d(1, 2, 3)):
        layer.weight_g = nn.Parameter(torch.ones(2, 1))  # type: ignore[assignment]
        with pytest.raises(InputError, match=r"parameter 'weight_g' belongs to a"):
            layout_of(layer)
        assert layout_of(layer, {"weight_g": ()})["weight_g"].input_axes == ()


def test_named_axes() -> None:
    layout = layout_of(Scaled(), {"gain": (1,)})
    assert layout["gain"] == kernel(1)
    assert layout["inner.weight"] == kernel(1)
    assert layout_of(Scaled(), {"gain": ()})["gain"] == BIAS
    assert layout_of(Scaled(), {"gain": (0, 1)})["gain"] == kernel(0, 1)


def test_named_axes_win_over_the_table() -> None:
    layout = layout_of(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)), {"0.weight": (1,)})
    assert layout["0.weight"].input_axes == (1,)
    assert layout["1.weight"] == kernel(1)


@pytest.mark.parametrize("axes", [(2,), (-1,), (0, 0), (0, 1, 2), (0.5,)])
def test_impossible_axes_are_refused(axes: tuple[Any, ...]) -> None:
    with pytest.raises(InputError, match=re.escape(f"axes['gain'] = {axes}: ")):
        layout_of(Scaled(), {"gain": axes})


@pytest.mark.parametrize("name", ["gian", "inner", "inner.weights"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=re.escape(repr(name))):
        layout_of(Scaled(), {"gain": (), name: (1,)})


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    assert dict(layout_of(model)) == {"1.weight": kernel(1)}
    with pytest.raises(InputError, match=r"axes names '0.weight'"):
        layout_of(model, {"0.weight": ()})


def test_a_frozen_module_of_unknown_type_is_no_obstacle() -> None:
    model = Scaled()
    model.gain.requires_grad_(False)
    assert set(layout_of(model)) == {"inner.weight", "inner.bias"}


class Tied(nn.Module):
    """An embedding whose table is the output layer's kernel, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_that_disagree_are_refused() -> None:
    with pytest.raises(InputError, match=r"'head.weight' is tied to 'embedding.weight'"):
        layout_of(Tied())
    assert dict(layout_of(Tied(), {"embedding.weight": (0,)})) == {"embedding.weight": kernel(0)}
    assert layout_of(Tied(), {"embedding.weight": ()})["embedding.weight"].input_axes == ()


def test_tied_weights_that_agree_appear_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    assert set(layout_of(model)) == {"0.weight", "0.bias", "2.bias"}
    layer = nn.Linear(3, 3)
    assert set(layout_of(nn.Sequential(layer, layer))) == {"0.weight", "0.bias"}
