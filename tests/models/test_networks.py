"""The library's networks: sizes, initial weights, oracles, and equal training by both engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from federations import assert_engines_agree, federation, ids, normal
from torch import nn

from fedzmg import Task, models
from fedzmg.engine.choose import can_compile
from fedzmg.errors import InputError
from fedzmg.models import CharGRU, CharTransformer, FunctionalModel, layout_of, mlp
from fedzmg.models.initial import initial_params
from fedzmg.models.layers import KeyedDropout
from fedzmg.models.networks import _Attention
from fedzmg.models.recurrent import scan


def on_meta(make: Callable[..., nn.Module], *sizes: int) -> nn.Module:
    with torch.device("meta"):
        return make(*sizes)


@pytest.mark.parametrize(
    ("make", "sizes", "parts", "total"),
    [
        (models.emnist_cnn, (), [832, 51_264, 1_606_144, 31_806], 1_690_046),
        (models.emnist_cnn, (10,), [832, 51_264, 1_606_144, 5_130], 1_663_370),
        (
            models.cifar100_cnn, (), [896, 9_248, 18_496, 36_928, 2_097_664, 51_300],
            2_214_532,
        ),
        (models.shakespeare_gru, (), [16_896, 3_938_304, 67_650], 4_022_850),
        # Published for the CIFAR form; group norm has as many parameters as batch norm.
        (models.resnet18_gn, (10,), None, 11_173_962),
        (models.resnet18_gn, (100,), None, 11_220_132),
        (models.resnet18_gn, (10, 1), None, 11_172_810),
        (CharTransformer, (9, 8, 2, 3, 6), None, 2_833),
    ],
    ids=["emnist62", "emnist10", "cifar100", "shakespeare", "resnet", "resnet100", "resnet-grey",
         "transformer"],
)  # fmt: skip
def test_parameters(
    make: Callable[..., nn.Module], sizes: tuple[int, ...], parts: list[int] | None, total: int
) -> None:
    module = on_meta(make, *sizes)
    found = [sum(p.numel() for p in layer.parameters(recurse=False)) for layer in module.modules()]
    assert parts is None or [count for count in found if count] == parts
    assert sum(found) == total
    assert not list(module.buffers())
    assert len(layout_of(module)) == len(list(module.parameters()))


def test_dropout_is_keyed_with_the_papers_rates() -> None:
    model = FunctionalModel(on_meta(models.cifar100_cnn))
    layers = [layer for layer in model.module if isinstance(layer, KeyedDropout)]  # type: ignore[union-attr]
    assert [(layer.p, layer.layer) for layer in layers] == [(0.25, 0), (0.25, 1), (0.5, 2)]


def test_the_recurrent_kernel_is_orthogonal_as_one_matrix() -> None:
    """Keras draws its (units, 3 units) kernel at once: rows are orthonormal, no gate's are."""
    units = 64
    model = FunctionalModel(CharGRU(5, 2, units))
    kernels = torch.stack(
        [initial_params(model, "keras", seed)["gru.weight_hh_l0"].T for seed in range(6)]
    ).double()
    one = torch.eye(units, dtype=torch.float64)
    torch.testing.assert_close(kernels @ kernels.mT, one.expand(6, -1, -1), rtol=0, atol=1e-5)
    for gate in kernels.chunk(3, 2):
        # A third of the columns: each gate holds about a third of every row's length.
        assert float(gate.square().sum(2).mean()) == pytest.approx(1 / 3, abs=0.05)
        assert float((gate @ gate.mT - one).abs().amax((1, 2)).min()) > 0.3
    # Uniform over such matrices: signs without preference, which a bare QR does not give.
    positive = kernels.diagonal(dim1=1, dim2=2) > 0
    assert float(positive.double().mean()) == pytest.approx(0.5, abs=2.5 / math.sqrt(6 * units))
    assert abs(float(kernels.mean())) < 5 / math.sqrt(3 * units * kernels.numel())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("batch", "time", "units"), [(1, 1, 1), (3, 7, 5), (2, 40, 8)])
def test_gru_equals_torchs(
    batch: int, time: int, units: int, dtype: torch.dtype, limit: float
) -> None:
    torch.manual_seed(0)
    theirs = nn.GRU(4, units, batch_first=True).to(dtype)
    x = torch.randn(batch, time, 4, dtype=dtype, requires_grad=True)
    weights = list(theirs.parameters())
    got, expected = scan("GRU", x, None, weights)[0], theirs(x)[0]
    signal = torch.randn_like(expected)
    signal /= signal.norm()
    mine, yours = (torch.autograd.grad(out, [x, *weights], signal) for out in (got, expected))
    for left, right in zip((got, *mine), (expected, *yours), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=limit)


def tokens(batch: int, time: int) -> torch.Tensor:
    return torch.randint(0, 9, (batch, time), generator=torch.Generator().manual_seed(time))


def test_attention_equals_torchs() -> None:
    layer = _Attention(12, 3).double()
    x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    query, key, value = (
        part(x).view(2, 7, 3, 4).permute(0, 2, 1, 3)
        for part in (layer.query, layer.key, layer.value)
    )
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    expected = layer.out(mixed.permute(0, 2, 1, 3).reshape(2, 7, 12))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def test_a_position_depends_on_the_past_and_on_its_place() -> None:
    module = CharTransformer(9, 8, 2, 2, length=6)
    x = tokens(3, 6)
    changed = x.clone()
    changed[:, 4:] = (x[:, 4:] + 1) % 9
    before, after = module(x), module(changed)
    assert before.shape == (3, 6, 9)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4], after[:, 4])
    torch.testing.assert_close(module(x[:, :3]), before[:, :3])
    same = module(torch.zeros(1, 2, dtype=torch.int64))
    assert not torch.allclose(same[0, 0], same[0, 1])


def test_impossible_sizes_are_rejected() -> None:
    with pytest.raises(InputError, match="groups = 3"):
        models.resnet18_gn(10, width=4, groups=3)
    with pytest.raises(InputError, match="heads = 3"):
        CharTransformer(9, 8, 3, 1, 6)
    model = FunctionalModel(CharTransformer(9, 8, 2, 1, 6))
    with pytest.raises(InputError, match=r"7 .* 6"):
        model.evaluate(model.params(), tokens(2, 7))


def test_a_model_prints_what_its_results_depend_on() -> None:
    """Runs are told apart by what a model prints."""
    prints = {
        repr(module)
        for module in (
            CharTransformer(9, 8, 2, 1, 6),
            CharTransformer(9, 8, 4, 1, 6),
            CharTransformer(9, 8, 2, 1, 7),
            CharTransformer(9, 8, 2, 1, 6, dropout=0.1),
            models.RandomShift(2),
            models.RandomShift(3),
            models.RandomShift(2, edge=True),
        )
    }
    assert len(prints) == 7


TEXT = ids(7, 5)
NEXT = np.roll(TEXT, -1, 1)

NETWORKS: dict[str, Callable[[], Task]] = {
    "mlp": lambda: federation(mlp(12, 6, 5, outputs=3), normal(3, 4)),
    "digits-cnn": lambda: federation(models.digits_cnn(3), normal(28, 28)),
    "gru": lambda: federation(CharGRU(7, 3, 4), TEXT, NEXT, init="keras"),
    "transformer": lambda: federation(CharTransformer(7, 8, 2, 2, 5), TEXT, NEXT),
    "transformer-dropout": lambda: federation(CharTransformer(7, 4, 1, 1, 6, 0.3), TEXT, NEXT),
    "resnet": lambda: federation(models.resnet18_gn(3, width=2), normal(3, 4, 4), init="keras"),
    "augmented": lambda: federation(
        nn.Sequential(
            models.RandomShift(2), models.RandomFlip(), mlp(48, 5, outputs=3), nn.Dropout(0.2),
            nn.Linear(3, 3),
        ),
        normal(3, 4, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_engines_agree(name: str) -> None:
    assert_engines_agree(NETWORKS[name](), torch.float64)


def test_engines_agree_in_float32() -> None:
    assert_engines_agree(NETWORKS["digits-cnn"](), torch.float32)


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["augmented", "transformer-dropout"])
def test_compiled_agrees(name: str) -> None:
    task = NETWORKS[name]()
    # One step per client, so that there is one width to compile.
    task = replace(task, protocol=replace(task.protocol, batch_size=5))
    assert_engines_agree(task, torch.float64, ("vectorized", "compiled"))
