"""Input axes of layers: the table, layer by layer, and its meaning."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.fedzmg import ZeroMean
from fedzmg.contract import ParamInfo
from fedzmg.errors import InputError
from fedzmg.models import digits_cnn, layout
from fedzmg.models import layout_of as full_layout

BIAS = ParamInfo("bias", ())
NORM = dict.fromkeys(("weight", "bias"), ParamInfo("norm", ()))
TABLE = {"weight": ParamInfo("embedding", (0,))}


def layout_of(model: nn.Module, axes: Any = None) -> dict[str, ParamInfo]:
    """Role and axes; the layer's type has a test of its own."""
    return {name: info._replace(layer="") for name, info in full_layout(model, axes).items()}


def test_layers_are_named_by_their_type() -> None:
    found = full_layout(digits_cnn())
    assert {name: info.layer for name, info in found.items() if name.endswith("weight")} == {
        "1.weight": "Conv2d", "3.weight": "Conv2d", "6.weight": "Linear", "8.weight": "Linear"
    }  # fmt: skip


def kernel(*axes: int) -> ParamInfo:
    return ParamInfo("kernel", axes)


def dense(*axes: int) -> dict[str, ParamInfo]:
    return {"weight": kernel(*axes), "bias": BIAS}


def recurrent(*suffixes: str) -> dict[str, ParamInfo]:
    hidden = ParamInfo("recurrent_kernel", (1,))
    infos = {"weight_ih": kernel(1), "weight_hh": hidden, "bias_ih": BIAS, "bias_hh": BIAS}
    return {f"{name}{suffix}": info for suffix in suffixes for name, info in infos.items()}


LAYERS: list[tuple[nn.Module, dict[str, ParamInfo]]] = [
    (nn.Linear(3, 2), dense(1)),
    (nn.Linear(3, 2, bias=False), {"weight": kernel(1)}),
    (nn.Bilinear(3, 4, 2), dense(1, 2)),
    (nn.Conv1d(3, 2, 5), dense(1, 2)),
    (nn.Conv2d(4, 6, 3, groups=2), dense(1, 2, 3)),
    (nn.Conv3d(3, 2, 5), dense(1, 2, 3, 4)),
    (nn.ConvTranspose1d(3, 2, 5), dense(0, 2)),
    (nn.ConvTranspose3d(3, 2, 5), dense(0, 2, 3, 4)),
    (nn.GRU(3, 2, num_layers=2), recurrent("_l0", "_l1")),
    (nn.GRU(3, 2, bidirectional=True), recurrent("_l0", "_l0_reverse")),
    (nn.LSTM(3, 2), recurrent("_l0")),
    (nn.RNN(3, 2), recurrent("_l0")),
    (nn.GRUCell(3, 2), recurrent("")),
    (nn.LSTMCell(3, 2), recurrent("")),
    (nn.RNNCell(3, 2), recurrent("")),
    (nn.Embedding(9, 4), TABLE),
    (nn.EmbeddingBag(9, 4), TABLE),
    (nn.LayerNorm((4, 5)), NORM),
    (nn.RMSNorm(4), {"weight": NORM["weight"]}),
    (nn.GroupNorm(2, 4), NORM),
    (nn.InstanceNorm2d(4, affine=True), NORM),
    (nn.InstanceNorm1d(4), {}),
    (nn.PReLU(3), {"weight": NORM["weight"]}),
    (
        nn.MultiheadAttention(4, 2),
        {"in_proj_weight": kernel(1), "in_proj_bias": BIAS, "out_proj.weight": kernel(1),
         "out_proj.bias": BIAS},
    ),
    (
        nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True, bias=False),
        {"q_proj_weight": kernel(1), "k_proj_weight": kernel(1), "v_proj_weight": kernel(1),
         "bias_k": BIAS, "bias_v": BIAS, "out_proj.weight": kernel(1)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("module", "expected"), LAYERS, ids=lambda v: type(v).__name__)
def test_layers(module: nn.Module, expected: dict[str, ParamInfo]) -> None:
    assert layout_of(module) == expected


@pytest.mark.parametrize(
    ("module", "shape", "pixel"),
    [
        (nn.Linear(3, 4, bias=False), (1, 3), ()),
        (nn.Conv2d(3, 4, (2, 3), bias=False), (1, 3, 6, 6), (2, 2)),
        (nn.Conv2d(4, 8, 3, groups=4, bias=False), (1, 4, 6, 6), (2, 2)),
        (nn.ConvTranspose1d(3, 4, 3, bias=False), (1, 3, 9), (5,)),
        (nn.ConvTranspose2d(3, 4, (3, 2), bias=False), (1, 3, 9, 9), (5, 5)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_input_axes_are_those_that_a_unit_sums_over(
    module: nn.Module, shape: tuple[int, ...], pixel: tuple[int, ...]
) -> None:
    """A unit that reads only ones answers the sum of its weights over its input axes."""
    module = module.double()
    axes = layout_of(module)["weight"].input_axes
    with torch.no_grad():
        answer = module(torch.ones(shape, dtype=torch.float64))[0, :, *pixel]
    torch.testing.assert_close(module.weight.detach().sum(axes), answer, rtol=0, atol=1e-12)


class Scaled(nn.Module):
    """A module type of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2, 3))
        self.inner = nn.Linear(3, 2)


def test_named_axes() -> None:
    assert layout_of(Scaled(), {"gain": (1,)}) == {
        "gain": kernel(1), "inner.weight": kernel(1), "inner.bias": BIAS
    }  # fmt: skip
    assert layout_of(Scaled(), {"gain": -1})["gain"] == kernel(1)
    assert layout_of(Scaled(), {"gain": ()})["gain"] == BIAS
    assert layout_of(Scaled())["gain"] == ParamInfo("unknown", ())


def test_patterns_of_axes() -> None:
    """A name takes precedence over a pattern, and a pattern over a later one."""
    blocks = nn.Sequential(*(Scaled() for _ in range(3)))
    given = {"*.gain": (0,), "1.gain": (1,), "2.*": (), "*.inner.weight": (0,)}
    found = {n: i.input_axes for n, i in layout_of(blocks, given).items() if "bias" not in n}
    assert found == {
        "0.gain": (0,), "0.inner.weight": (0,), "1.gain": (1,), "1.inner.weight": (0,),
        "2.gain": (0,), "2.inner.weight": (),
    }  # fmt: skip


@pytest.mark.parametrize("axes", [(2,), (-3,), (0, 0), (0, -2), (0.5,)])
def test_impossible_axes_are_rejected(axes: tuple[Any, ...]) -> None:
    with pytest.raises(InputError, match=re.escape(f"{axes} of parameter 'gain'")):
        layout_of(Scaled(), {"gain": axes})


@pytest.mark.parametrize("name", ["gian", "inner", "inner.weights", "*.gain", "out*"])
def test_unknown_names_are_rejected(name: str) -> None:
    with pytest.raises(InputError, match=re.escape(repr(name))):
        layout_of(Scaled(), {"gain": (), name: (1,)})


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    assert layout_of(model) == {"1.weight": kernel(1)}
    with pytest.raises(InputError, match=r"'0.weight'"):
        layout_of(model, {"0.weight": ()})


def test_tied_weights_that_agree_appear_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    assert set(layout_of(model)) == {"0.weight", "0.bias", "2.bias"}
    layer = nn.Linear(3, 3)
    assert set(layout_of(nn.Sequential(layer, layer))) == {"0.weight", "0.bias"}


def test_tied_weights_that_differ_have_the_axes_of_the_first() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    assert full_layout(model)["0.weight"] == ParamInfo("embedding", (0,), "Embedding+Linear")
    for name in ("0.weight", "2.weight"):
        assert full_layout(model, {name: (1,)})["0.weight"] == kernel(1)
    outer = Scaled()
    outer.inner.weight = outer.gain  # known to one of its two modules
    assert layout_of(outer)["gain"] == kernel(1)


class Attention(nn.Module):
    """A vision transformer's parameters, as people write them, and LoRA's."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = nn.Parameter(torch.zeros(1, 17, 8))
        self.table = nn.Embedding(17, 8)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.fused = nn.MultiheadAttention(8, 2)
        self.separate = nn.MultiheadAttention(8, 2, kdim=6, vdim=6)
        self.qkv = nn.Linear(8, 24)
        self.qkv.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
        self.qkv.lora_B = nn.ModuleDict({"default": nn.Linear(2, 24, bias=False)})
        self.patches.lora_A = nn.Conv2d(3, 2, 4, 4, bias=False)
        self.patches.lora_B = nn.Conv2d(2, 8, 1, bias=False)
        self.table.lora_embedding_A = nn.ParameterDict({"default": torch.zeros(2, 17)})
        self.table.lora_embedding_B = nn.ParameterDict({"default": torch.zeros(8, 2)})


DECISIONS = {
    "patches.weight": (1, 2, 3), "class_token": None, "positions": None, "table.weight": (0,),
    "scale": None, "fused.in_proj_weight": (1,), "fused.out_proj.weight": (1,),
    "separate.q_proj_weight": (1,), "separate.k_proj_weight": (1,), "separate.v_proj_weight": (1,),
    "separate.out_proj.weight": (1,), "qkv.weight": (1,), "qkv.lora_A.default.weight": (1,),
    "qkv.lora_B.default.weight": (), "patches.lora_A.weight": (1, 2, 3),
    "patches.lora_B.weight": (), "table.lora_embedding_A.default": (1,),
    "table.lora_embedding_B.default": (),
}  # fmt: skip
"""Input axes; None for parameters that are not projected, with a warning."""


def test_attention_and_adapters() -> None:
    found = {
        name: None if info.role == "unknown" else info.input_axes
        for name, info in layout_of(Attention()).items()
        if "bias" not in name
    }
    assert found == DECISIONS


def test_unknown_axes_are_reported_once_and_only_by_a_rule_that_projects() -> None:
    layout.warn_once.cache_clear()
    model = nn.Sequential(Attention(), nn.Sequential(Scaled(), Scaled()))
    found = full_layout(model)
    SGD(0.1).for_layout(found)
    ZeroMean(SGD(0.1), project="none").for_layout(found)
    names = [
        r"0\.class_token \(Attention\)",
        r"0\.positions",
        r"0\.scale",
        r"1\.\*\.gain \(Scaled\)",
    ]
    with pytest.warns(UserWarning, match=", ".join(f"{n}.*" for n in names)) as warned:
        rule = ZeroMean(SGD(0.1)).for_layout(found)
    ZeroMean(SGD(0.1)).for_layout(found)
    assert (len(warned), warned[0].filename) == (1, __file__)
    assert rule.axes is not None
    assert rule.axes["0.class_token"] == ()
