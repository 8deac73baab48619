"""The paper's three networks: sizes to the last parameter, and Keras's initial weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedzmg.models import (
    CharGRU,
    FunctionalModel,
    cifar100_cnn,
    emnist_cnn,
    layout_of,
    shakespeare_gru,
)
from fedzmg.models.initial import initial_params
from fedzmg.models.keyed import KeyedDropout


def shapes_only(make: object, *args: int) -> nn.Module:
    with torch.device("meta"):
        return make(*args)  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize(
    ("module", "parts"),
    [
        (shapes_only(emnist_cnn), [832, 51_264, 1_606_144, 31_806]),
        (shapes_only(emnist_cnn, 10), [832, 51_264, 1_606_144, 5_130]),
        (shapes_only(cifar100_cnn), [896, 9_248, 18_496, 36_928, 2_097_664, 51_300]),
        (shapes_only(shakespeare_gru), [16_896, 3_938_304, 67_650]),
    ],
    ids=["emnist62", "emnist10", "cifar100", "shakespeare"],
)
def test_parameters_are_those_of_the_paper(module: nn.Module, parts: list[int]) -> None:
    found = [sum(p.numel() for p in layer.parameters(recurse=False)) for layer in module.modules()]
    assert [count for count in found if count] == parts
    totals = {4: (1_690_046, 1_663_370), 6: (2_214_532,), 3: (4_022_850,)}
    assert sum(parts) in totals[len(parts)]
    assert not list(module.buffers())
    layout_of(module)


@pytest.mark.parametrize(
    ("module", "x", "shape"),
    [
        (emnist_cnn(), torch.rand(2, 28, 28), (2, 62)),
        (cifar100_cnn(), torch.rand(2, 3, 32, 32), (2, 100)),
        (CharGRU(66, 8, 16), torch.randint(0, 66, (2, 9)), (2, 9, 66)),
    ],
    ids=["emnist", "cifar100", "shakespeare"],
)
def test_shapes(module: nn.Module, x: Tensor, shape: tuple[int, ...]) -> None:
    model = FunctionalModel(module)
    assert model.evaluate(model.params(), x).shape == shape


def test_dropout_is_keyed_with_the_papers_rates() -> None:
    model = FunctionalModel(shapes_only(cifar100_cnn))
    layers = [layer for layer in model.module if isinstance(layer, KeyedDropout)]  # type: ignore[union-attr]
    assert [(layer.p, layer.layer) for layer in layers] == [(0.25, 0), (0.25, 1), (0.5, 2)]


def test_convolutions_keep_the_size_of_an_image() -> None:
    for net, image in (
        (emnist_cnn(), torch.ones(1, 28, 28)),
        (cifar100_cnn(), torch.ones(1, 3, 32, 32)),
    ):
        sizes = []
        x = image
        for layer in net:
            x = layer(x)
            if isinstance(layer, nn.Conv2d):
                sizes.append(tuple(x.shape[-2:]))
        expected = [(28, 28), (14, 14)] if len(sizes) == 2 else [(32, 32)] * 2 + [(16, 16)] * 2
        assert sizes == expected


def is_uniform(values: Tensor, bound: float) -> None:
    """Bounds, ends, and the first four moments of a uniform law on ``[-bound, bound]``."""
    flat = values.double().flatten()
    n = flat.numel()
    assert float(flat.abs().max()) <= bound * (1 + 1e-6)
    assert float(flat.abs().max()) > bound * (1 - 20 / n)
    for power, moment, variance in (
        (1, 0, 1 / 3),
        (2, 1 / 3, 4 / 45),
        (3, 0, 1 / 7),
        (4, 1 / 5, 16 / 225),
    ):
        found = float(((flat / bound) ** power).mean())
        assert abs(found - moment) < 5 * math.sqrt(variance / n)


@pytest.mark.parametrize("make", [emnist_cnn, cifar100_cnn])
def test_convolutional_networks_start_as_keras_starts_them(make: object) -> None:
    module = make()  # type: ignore[operator]
    start = initial_params(FunctionalModel(module), "keras", 0)
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Conv2d):
            high, wide = layer.kernel_size
            is_uniform(
                start[f"{name}.weight"],
                math.sqrt(6 / (high * wide * (layer.in_channels + layer.out_channels))),
            )
        elif isinstance(layer, nn.Linear):
            is_uniform(
                start[f"{name}.weight"], math.sqrt(6 / (layer.in_features + layer.out_features))
            )
        else:
            continue
        assert float(start[f"{name}.bias"].abs().max()) == 0


def test_the_recurrent_network_starts_as_keras_starts_it() -> None:
    units = 128
    start = initial_params(FunctionalModel(CharGRU(66, 64, units)), "keras", 0)
    is_uniform(start["embedding.weight"], 0.05)
    is_uniform(start["gru.weight_ih_l0"], math.sqrt(6 / (64 + 3 * units)))
    is_uniform(start["dense.weight"], math.sqrt(6 / (66 + units)))
    for name in ("gru.bias_ih_l0", "gru.bias_hh_l0", "dense.bias"):
        assert float(start[name].abs().max()) == 0


def test_the_recurrent_kernel_is_orthogonal_as_one_matrix() -> None:
    """Keras draws its (units, 3 units) kernel at once: rows are orthonormal, no gate's are."""
    units = 64
    model = FunctionalModel(CharGRU(5, 2, units))
    kernels = [
        initial_params(model, "keras", seed)["gru.weight_hh_l0"].double().T for seed in range(6)
    ]
    one = torch.eye(units, dtype=torch.float64)
    for kernel in kernels:
        torch.testing.assert_close(kernel @ kernel.T, one, rtol=0, atol=1e-5)
        for gate in kernel.chunk(3, 1):
            # A third of the columns: each gate holds about a third of every row's length.
            shares = gate.square().sum(1)
            assert float(shares.mean()) == pytest.approx(1 / 3, abs=0.05)
            assert float((gate @ gate.T - one).abs().max()) > 0.3
    # Uniform over such matrices: mean 0, variance 1 / (3 units), and signs without preference,
    # which a bare QR decomposition does not give.
    entries = torch.stack(kernels)
    assert float(entries.mean()) == pytest.approx(0, abs=5 / math.sqrt(3 * units * entries.numel()))
    assert float(entries.var()) == pytest.approx(1 / (3 * units), rel=1e-2)
    positive = entries.diagonal(dim1=1, dim2=2) > 0
    assert float(positive.double().mean()) == pytest.approx(0.5, abs=2.5 / math.sqrt(6 * units))
