"""Initial weights: a function of seed and layer, with the spread each scheme promises."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedzmg.errors import InputError
from fedzmg.models import GRU, FunctionalModel, mlp
from fedzmg.models.initial import initial_params
from fedzmg.tree import Tree


def start(module: nn.Module, scheme: object, seed: int = 0, **more: object) -> Tree:
    return initial_params(FunctionalModel(module, **more), scheme, seed)  # type: ignore[arg-type]


def fills(values: Tensor, low: float, high: float) -> None:
    """Inside a range and reaching near both of its ends, as many uniform draws do."""
    assert float(values.min()) >= low - 1e-6  # the bound itself, rounded to float32
    assert float(values.max()) <= high + 1e-6
    margin = (high - low) * 0.05
    assert float(values.min()) < low + margin
    assert float(values.max()) > high - margin
    assert float(values.mean()) == pytest.approx(
        (low + high) / 2, abs=6 * (high - low) / math.sqrt(12 * values.numel())
    )


@pytest.mark.parametrize("scheme", ["torch", "keras"])
def test_a_seed_is_an_address(scheme: str) -> None:
    first = start(mlp(20, 10, outputs=5), scheme, seed=3)
    torch.manual_seed(12345)
    again = start(mlp(20, 10, outputs=5), scheme, seed=3)
    other = start(mlp(20, 10, outputs=5), scheme, seed=4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[n], other[n]) for n in first if n.endswith("weight"))


@pytest.mark.parametrize(
    ("module", "fan_in"),
    [
        (nn.Linear(25, 400), 25),
        (nn.Conv1d(5, 300, 5), 25),
        (nn.Conv2d(4, 200, (5, 5)), 100),
        (nn.Conv2d(8, 400, 5, groups=2), 100),
        (nn.ConvTranspose2d(400, 4, 5), 100),
        (nn.Bilinear(16, 36, 20), 16),
    ],
    ids=["linear", "conv1d", "conv2d", "grouped", "transposed", "bilinear"],
)
def test_torch_scheme_is_uniform_in_the_fan(module: nn.Module, fan_in: int) -> None:
    bound = 1 / math.sqrt(fan_in)
    found = start(module, "torch")
    fills(found["weight"], -bound, bound)
    assert float(found["bias"].abs().max()) <= bound
    # PyTorch's own start has the same range.
    fills(module.weight.detach(), -bound, bound)


@pytest.mark.parametrize("kind", [GRU, nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_torch_scheme_for_recurrent_layers(kind: type[nn.Module]) -> None:
    found = start(kind(50, 64), "torch")
    for values in found.values():
        assert float(values.abs().max()) <= 1 / 8
        assert float(values.abs().max()) > 0.1
    fills(found[next(iter(found))], -1 / 8, 1 / 8)


def test_torch_scheme_for_embeddings() -> None:
    table = start(nn.Embedding(300, 40), "torch")["weight"]
    assert float(table.mean()) == pytest.approx(0, abs=6 / math.sqrt(table.numel()))
    assert float(table.std()) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(
    ("module", "fans"),
    [
        (nn.Linear(100, 200), 300),
        (nn.Conv2d(10, 30, 5), 25 * 40),
        (nn.ConvTranspose2d(10, 30, 5), 25 * 40),
    ],
    ids=["linear", "conv", "transposed"],
)
def test_keras_scheme_is_glorot_with_zero_biases(module: nn.Module, fans: int) -> None:
    found = start(module, "keras")
    bound = math.sqrt(6 / fans)
    fills(found["weight"], -bound, bound)
    assert float(found["bias"].abs().max()) == 0


@pytest.mark.parametrize("kind", [GRU, nn.GRUCell])
def test_keras_scheme_for_recurrent_layers(kind: type[nn.Module]) -> None:
    found = start(kind(40, 20), "keras")
    suffix = "_l0" if kind is GRU else ""
    bound = math.sqrt(6 / (40 + 60))
    fills(found[f"weight_ih{suffix}"], -bound, bound)
    recurrent = found[f"weight_hh{suffix}"].double()
    torch.testing.assert_close(
        recurrent.T @ recurrent, torch.eye(20, dtype=torch.float64), rtol=0, atol=1e-5
    )
    for name in ("bias_ih", "bias_hh"):
        assert float(found[f"{name}{suffix}"].abs().max()) == 0


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
    # Keras's other biases are zero, and it has one bias vector where PyTorch adds two.
    assert float((found["bias_ih"] + found["bias_hh"]).sum()) == units
    assert float(found["bias_hh"].abs().max()) == 0
    bare = start(nn.LSTMCell(3, units, bias=False), "keras")
    assert set(bare) == {"weight_ih", "weight_hh"}


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
    if "1.bias" in found:
        assert found["1.bias"].tolist() == [0.0] * 4


def test_given_keeps_the_modules_weights_for_every_seed() -> None:
    module = mlp(6, 4, outputs=2)
    for seed in (0, 1):
        found = start(module, "given", seed)
        for name, parameter in module.named_parameters():
            assert torch.equal(found[name], parameter.detach())


def test_a_function_fills_module_by_module() -> None:
    seen = []

    def fill(module: nn.Module, generator: torch.Generator) -> None:
        seen.append(type(module).__name__)
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.01, generator=generator)

    first, again, other = (start(mlp(50, 40, outputs=3), fill, seed) for seed in (1, 1, 2))
    assert seen == ["Linear", "Linear"] * 3
    assert float(first["1.weight"].std()) == pytest.approx(0.01, rel=0.1)
    assert torch.equal(first["1.weight"], again["1.weight"])
    assert not torch.equal(first["1.weight"], other["1.weight"])


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0]))


@pytest.mark.parametrize(
    ("scheme", "module"),
    [("keras", nn.MultiheadAttention(4, 2)), ("torch", Own()), ("keras", Own())],
)
def test_a_layer_a_scheme_cannot_start_is_rejected(scheme: str, module: nn.Module) -> None:
    axes = {"0.w": ()} if isinstance(module, Own) else None
    with pytest.raises(InputError, match=f"'0' is a {type(module).__name__}.*'{scheme}'.*init="):
        start(nn.Sequential(module), scheme, axes=axes)


@pytest.mark.parametrize("more", [{}, {"kdim": 24, "vdim": 40, "add_bias_kv": True}])
def test_torch_scheme_for_attention_is_as_torch_starts_it(more: dict[str, Any]) -> None:
    module = nn.MultiheadAttention(32, 4, **more)
    first, other = start(module, "torch", 0), start(module, "torch", 1)
    for name, theirs in module.named_parameters():
        ours, reference = first[name], theirs.detach()
        if float(reference.abs().max()) == 0:
            assert float(ours.abs().max()) == 0
            continue
        assert not torch.equal(ours, other[name])
        assert float(ours.std()) == pytest.approx(float(reference.std()), rel=0.5)
        if "bias" not in name:
            assert float(ours.abs().max()) == pytest.approx(float(reference.abs().max()), rel=0.05)


def test_keras_scheme_for_embeddings() -> None:
    fills(start(nn.Embedding(66, 40), "keras")["weight"], -0.05, 0.05)
