"""Initial weights: a function of seed and layer, with the distribution of each scheme."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedzmg.models import FunctionalModel, mlp
from fedzmg.models.initial import initial_params
from fedzmg.models.layout import warn_once
from fedzmg.tree import Tree


def start(module: nn.Module, scheme: object, seed: int = 0, **more: object) -> Tree:
    return initial_params(FunctionalModel(module, **more), scheme, seed)  # type: ignore[arg-type]


def fills(values: Tensor, bound: float) -> None:
    """Inside ``-bound`` to ``bound`` and near both ends, as many uniform draws are."""
    assert float(values.abs().max()) <= bound + 1e-6  # the bound itself, rounded to float32
    assert float(values.min()) < -0.9 * bound
    assert float(values.max()) > 0.9 * bound
    assert abs(float(values.mean())) < 12 * bound / math.sqrt(12 * values.numel())


def fill(module: nn.Module, generator: torch.Generator) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.01, generator=generator)


@pytest.mark.parametrize("scheme", ["torch", "keras", fill])
def test_weights_are_a_function_of_the_seed(scheme: object) -> None:
    first = start(mlp(50, 40, outputs=5), scheme, seed=3)
    torch.manual_seed(12345)
    again = start(mlp(50, 40, outputs=5), scheme, seed=3)
    other = start(mlp(50, 40, outputs=5), scheme, seed=4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[n], other[n]) for n in first if n.endswith("weight"))
    if scheme is fill:
        assert float(first["1.weight"].std()) == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize(
    ("module", "fan_in", "fans"),
    [
        (nn.Linear(25, 400), 25, 425),
        (nn.Conv1d(5, 300, 5), 25, 5 * 305),
        (nn.Conv2d(4, 200, (5, 5)), 100, 25 * 204),
        (nn.Conv2d(8, 400, 5, groups=2), 100, 25 * 404),
        (nn.ConvTranspose2d(400, 4, 5), 100, 25 * 404),
        (nn.Bilinear(16, 36, 20), 16, None),
    ],
    ids=["linear", "conv1d", "conv2d", "grouped", "transposed", "bilinear"],
)
def test_dense_layers_are_uniform_in_their_fans(
    module: nn.Module, fan_in: int, fans: int | None
) -> None:
    bound = 1 / math.sqrt(fan_in)
    found = start(module, "torch")
    fills(found["weight"], bound)
    fills(module.weight.detach(), bound)  # PyTorch's own start has the same range
    assert float(found["bias"].abs().max()) <= bound
    if fans is not None:
        glorot = start(module, "keras")
        fills(glorot["weight"], math.sqrt(6 / fans))
        assert not glorot["bias"].any()


@pytest.mark.parametrize("kind", [nn.GRU, nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_recurrent_layers(kind: type[nn.Module]) -> None:
    found = start(kind(50, 64), "torch")
    for values in found.values():
        assert 0.1 < float(values.abs().max()) <= 1 / 8
    kernel, recurrent, *biases = start(kind(40, 20), "keras").values()
    fills(kernel, math.sqrt(6 / sum(kernel.shape)))
    torch.testing.assert_close(recurrent.T @ recurrent, torch.eye(20), rtol=0, atol=1e-5)
    assert not biases[1].any()
    assert bool(biases[0].any()) == (kind is nn.LSTMCell)


def test_keras_scheme_opens_the_forget_gates_of_an_lstm() -> None:
    """Without input and output before it, a cell keeps sigmoid(1) of its state in every step."""
    units = 4
    found = start(nn.LSTMCell(3, units), "keras")
    cell = nn.LSTMCell(3, units)
    cell.load_state_dict(found)
    state = torch.linspace(-1.5, 2.0, units)[None]
    with torch.no_grad():
        _, after = cell(torch.zeros(1, 3), (torch.zeros(1, units), state))
    torch.testing.assert_close(after, state / (1 + math.exp(-1)))
    assert float(found["bias_ih"].sum()) == units
    bare = start(nn.LSTMCell(3, units, bias=False), "keras")
    assert set(bare) == {"weight_ih", "weight_hh"}


def test_embeddings() -> None:
    table = start(nn.Embedding(300, 40), "torch")["weight"]
    assert float(table.mean()) == pytest.approx(0, abs=6 / math.sqrt(table.numel()))
    assert float(table.std()) == pytest.approx(1, abs=0.03)
    fills(start(nn.Embedding(66, 40), "keras")["weight"], 0.05)
    assert not start(nn.Embedding(9, 4, padding_idx=-1), "torch")["weight"][8].any()


@pytest.mark.parametrize("scheme", ["torch", "keras"])
@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True)]
)
def test_norms_start_as_the_identity(scheme: str, norm: nn.Module) -> None:
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.fill_(9.0)
    found = start(nn.Sequential(nn.Linear(4, 4), norm), scheme)
    assert found["1.weight"].tolist() == [1.0] * 4
    assert "1.bias" not in found or not found["1.bias"].any()


def test_given_keeps_the_modules_weights_for_every_seed() -> None:
    module = mlp(6, 4, outputs=2)
    for seed in (0, 1):
        found = start(module, "given", seed)
        assert all(torch.equal(found[name], p.detach()) for name, p in module.named_parameters())


def test_a_trained_model_that_is_drawn_anew_is_warned_of() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    nn.init.normal_(module[1].bias)
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="init='given'"):
        start(module, "torch")
    start(module, "given")


class Own(nn.Module):
    def __init__(self, *values: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values))


@pytest.mark.parametrize("scheme", ["torch", "keras"])
def test_unknown_parameters_start_as_given(scheme: str) -> None:
    """Values that look random are named, for all seeds share them."""
    module = nn.Sequential(Own(3.0, 3.0), Own(1.0, 2.0), Own(4.0, 2.0), nn.Linear(2, 2))
    module = nn.ModuleDict({"blocks": module})
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=rf"{scheme}.*: blocks\.\*\.w \(Own\);") as warned:
        found = start(module, scheme)
    assert len(warned) == 1
    assert [found[f"blocks.{i}.w"].tolist() for i in range(3)] == [[3, 3], [1, 2], [4, 2]]
    assert not torch.equal(found["blocks.3.weight"], module["blocks"][3].weight)
    assert start(nn.Sequential(Own(3.0)), scheme)["0.w"].tolist() == [3.0]


@pytest.mark.parametrize("more", [{}, {"kdim": 24, "vdim": 40, "add_bias_kv": True}])
def test_torch_scheme_for_attention_equals_torchs(more: dict[str, Any]) -> None:
    module = nn.MultiheadAttention(32, 4, **more)
    first, other = start(module, "torch", 0), start(module, "torch", 1)
    for name, theirs in module.named_parameters():
        ours, reference = first[name], theirs.detach()
        assert bool(ours.any()) == bool(reference.any())
        if reference.any():
            assert not torch.equal(ours, other[name])
            assert float(ours.std()) == pytest.approx(float(reference.std()), rel=0.5)
        if "bias" not in name:
            assert float(ours.abs().max()) == pytest.approx(float(reference.abs().max()), rel=0.05)
