"""Dropout and augmentation by key: fair chances, and the same however a client is trained."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedzmg.errors import InputError
from fedzmg.kernels.layers import BLOCK, RANGE, draws, hash32, random_bits
from fedzmg.models import FunctionalModel, RandomFlip, RandomShift
from fedzmg.models.layers import KeyedDropout, KeyedLayer
from fedzmg.seeds import key, step_keys
from golden_problems import Net

KEYS = torch.from_numpy(step_keys(np.array([key(0, "dropout", 5)]), 50)[0])


def apply(layer: KeyedLayer, x: Tensor, key: Tensor = KEYS[0]) -> Tensor:
    layer.key, layer.calls = key, 0
    return layer(x)  # type: ignore[no-any-return]


def mask(key: int | Tensor, shape: tuple[int, ...], layer: int = 0) -> Tensor:
    dropout = KeyedDropout(0.5)
    dropout.layer = layer
    return apply(dropout, torch.ones(shape), torch.as_tensor(key)) != 0


def correlation(left: Tensor, right: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([left.flatten(), right.flatten()]).double())[0, 1])


def test_keep_rate_of_every_element_and_every_row() -> None:
    keys = torch.from_numpy(step_keys(np.array([key(3, "dropout", 0)]), 4000)[0])
    bits = torch.vmap(lambda key: random_bits(key, 0, torch.Size((4, 8)), key.device))(keys)
    kept = (bits >= int(0.3 * RANGE)).double()
    assert float((kept.mean(0) - 0.7).abs().max()) < 5.5 * math.sqrt(0.21 / 4000)
    # The number kept in a mask is binomial: its variance shows dependence between elements.
    assert float(kept.flatten(1).sum(1).var()) == pytest.approx(32 * 0.21, rel=0.12)


@given(st.integers(0, 2**63 - 1), st.integers(0, 62))
@settings(max_examples=30)
def test_every_bit_of_a_key_counts(key: int, bit: int) -> None:
    """Keys that differ anywhere give other masks, half of whose elements agree by chance."""
    agree = float((mask(key, (32, 64)) == mask(key ^ (1 << bit), (32, 64))).double().mean())
    assert abs(agree - 0.5) < 6 / (2 * math.sqrt(2048))


def test_a_layer_called_twice_in_one_pass_draws_twice() -> None:
    layers = {"layer": nn.Linear(1, 1), "drop": nn.Dropout(0.5)}
    net = Net(lambda m, x: torch.stack([m.drop(x), m.drop(x), m.drop(x)], 1), **layers)
    model = FunctionalModel(net)
    x = torch.ones(100, 64)
    for own in KEYS[:3]:
        kept = model.train(model.params(), x, own) != 0
        assert torch.equal(kept, model.train(model.params(), x, own) != 0)
        assert torch.equal(kept[:, 0], mask(own, (100, 64)))
        for i, j in ((0, 1), (0, 2), (1, 2)):
            assert abs(correlation(kept[:, i], kept[:, j])) < 5 / math.sqrt(x.numel())


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_masks_of_layers_and_calls_do_not_correlate(share: float) -> None:
    places, below = 1 << 14, int(share * RANGE)
    numbers = [(layer, call) for layer in range(40) for call in range(4)]
    drawn = torch.stack([draws(KEYS[0], *each, places, below) for each in numbers])
    found = torch.corrcoef(drawn.double()) - torch.eye(len(numbers))
    assert float(found.abs().max()) < 5.5 / math.sqrt(places)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dropout_in_every_precision(dtype: torch.dtype) -> None:
    x = torch.full((200, 200), 3.0, dtype=dtype)
    out = apply(KeyedDropout(0.25), x)
    assert out.dtype == dtype
    assert out.unique().tolist() == [0.0, 4.0]
    assert torch.equal(out.float(), apply(KeyedDropout(0.25), x.float()))
    assert float(out.double().mean()) == pytest.approx(3, abs=20 * math.sqrt(0.1875 / x.numel()))
    assert torch.equal(apply(KeyedDropout(0.0), x), x)
    assert not apply(KeyedDropout(1.0), x).any()


def test_hash_is_one_to_one_and_mixes() -> None:
    values = torch.cat([torch.arange(2**16), 2**32 - 1 - torch.arange(2**16)])
    scrambled = hash32(values)
    assert int(scrambled.min()) >= 0
    assert int(scrambled.max()) < 2**32
    assert len(scrambled.unique()) == len(values)
    assert [hash32(int(value)) for value in values[::9999]] == scrambled[::9999].tolist()
    # Flipping one bit of the input flips each bit of the output about half of the time.
    inputs, bits = torch.arange(1, 4097) * 1_048_573 % 2**32, torch.arange(32)
    flipped = hash32(inputs) ^ hash32(inputs ^ (1 << bits[:, None]))
    rates = ((flipped[:, None] >> bits[:, None]) & 1).double().mean(-1)
    assert float((rates - 0.5).abs().max()) < 0.1


def test_masks_are_frozen() -> None:
    """Changing how masks are addressed changes every result with dropout: never in silence."""
    bits = mask(1234567890123456789, (4, 16), layer=2).int().tolist()
    assert ["".join(map(str, row)) for row in bits] == [
        "1101100011101010",
        "1110110000101101",
        "0001100100100010",
        "1100010100010011",
    ]


@settings(max_examples=40, deadline=None)
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3),
    layer=st.integers(0, 50),
    call=st.integers(0, 3),
    places=st.sampled_from([1, 7, BLOCK - 1, BLOCK, BLOCK + 3]),
    below=st.none() | st.integers(0, RANGE - 1),
)
def test_operator_draws_as_defined(
    keys: list[int], layer: int, call: int, places: int, below: int | None
) -> None:
    of = torch.tensor(keys)
    got = torch.vmap(lambda key: draws(key, layer, call, places, below))(of)
    bits = random_bits(of[:, None], layer, torch.Size((places,)), of.device, call)
    assert torch.equal(got, bits if below is None else bits < below)
    assert torch.equal(draws(of[0], layer, call, places, below), got[0])


def test_operator_is_fit_for_the_compiler() -> None:
    for below in (None, RANGE // 3):
        torch.library.opcheck(torch.ops.fedzmg.draws.default, (KEYS[0], 2, 1, 100, below))


@pytest.mark.gpu
@pytest.mark.parametrize("below", [None, 0, RANGE // 4, RANGE // 2, RANGE - 1])
def test_draws_on_a_gpu_equal_those_on_a_cpu(below: int | None) -> None:
    keys = torch.tensor([*KEYS.tolist(), -1, -(2**63), 2**63 - 1])
    for layer, call, places in ((0, 0, 70_000), (5, 2, 33)):
        here = torch.vmap(lambda key: draws(key, layer, call, places, below))  # noqa: B023
        assert torch.equal(here(keys), here(keys.cuda()).cpu())


def images(n: int, *shape: int) -> Tensor:
    return torch.arange(1, n * math.prod(shape) + 1, dtype=torch.float32).view(n, *shape)


def shifted(image: Tensor, down: int, across: int, *, edge: bool) -> Tensor:
    """Images (..., height, width) moved alike, pixel by pixel."""
    high, wide = image.shape[-2:]
    out = torch.zeros_like(image)
    for i in range(high):
        for j in range(wide):
            a, b = i + down, j + across
            if edge:
                a, b = min(max(a, 0), high - 1), min(max(b, 0), wide - 1)
            if 0 <= a < high and 0 <= b < wide:
                out[..., i, j] = image[..., a, b]
    return out


@pytest.mark.parametrize("shape", [(4, 5), (3, 4, 5), (2, 3, 4, 5)])
def test_flip_mirrors_or_leaves(shape: tuple[int, ...]) -> None:
    x = images(64, *shape)
    out = apply(RandomFlip(), x)
    mirrored = (out == x.flip(-1)).flatten(1).all(1)
    assert torch.equal(mirrored, ~(out == x).flatten(1).all(1))
    assert 10 < int(mirrored.sum()) < 54


@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize("shape", [(4, 5), (2, 5, 4)])
def test_shift_moves_every_image_by_whole_pixels(shape: tuple[int, ...], edge: bool) -> None:
    x = images(40, *shape)
    out = apply(RandomShift(2, edge=edge), x)
    moves = [(down, across) for down in range(-2, 3) for across in range(-2, 3)]
    same = torch.stack([(shifted(x, *move, edge=edge) == out).flatten(1).all(1) for move in moves])
    assert same.sum(0).tolist() == [1] * 40
    assert int(same.any(1).sum()) > 12


def test_every_move_is_as_likely() -> None:
    centre = torch.zeros(500, 7, 7)
    centre[:, 3, 3] = 1
    total = torch.stack([apply(RandomShift(3), centre, key).sum(0) for key in KEYS]).sum(0)
    expected = 500 * len(KEYS) / 49
    assert float(total.sum()) == 500 * len(KEYS)
    chi2 = float(((total - expected) ** 2 / expected).sum())
    assert 20 < chi2 < 95  # 48 degrees of freedom: one in 20,000 lies outside


LAYERS = [
    RandomFlip, lambda: RandomShift(2), lambda: RandomShift(1, edge=True),
    lambda: KeyedDropout(0.4),
]  # fmt: skip


@pytest.mark.parametrize("make", LAYERS)
def test_a_key_fixes_everything_and_every_key_differs(make: Any) -> None:
    x = images(30, 3, 4)
    out = apply(make(), x)
    assert torch.equal(out, apply(make(), x))
    assert not torch.equal(out, apply(make(), x, KEYS[1]))
    (second := make()).layer = 1
    assert not torch.equal(out, apply(second, x))
    assert torch.equal(apply(make().eval(), x), x)
    for more in range(4):
        assert torch.equal(apply(make(), images(5 + more, 3, 4))[:5], apply(make(), x[:5]))


def test_mapped_as_alone() -> None:
    model = FunctionalModel(
        nn.Sequential(RandomShift(2), RandomFlip(), nn.Flatten(), nn.Linear(12, 4), nn.Dropout(0.4))
    )
    x = images(7 * 5, 3, 4).view(7, 5, 3, 4) / 100
    mapped = torch.vmap(model.train, in_dims=(None, 0, 0))(model.params(), x, KEYS[:7])
    for i in range(7):
        torch.testing.assert_close(mapped[i], model.train(model.params(), x[i], KEYS[i]))
        assert not torch.allclose(mapped[i], model.evaluate(model.params(), x[i]))


def test_numbers_of_dropout_layers_are_frozen() -> None:
    """Numbers enter the masks: another number would change results that are already stored."""
    block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1))
    model = FunctionalModel(nn.Sequential(block, nn.Dropout(0.2), nn.Sequential(nn.Dropout(0.3))))
    found = {m.p: m.layer for m in model.module.modules() if isinstance(m, KeyedDropout)}
    assert found == {0.2: 0, 0.1: 1, 0.3: 2}


@pytest.mark.parametrize("pixels", [-1, 1.5, True, "2"])
def test_impossible_moves_are_rejected(pixels: Any) -> None:
    with pytest.raises(InputError, match=f"pixels = {pixels!r}"):
        RandomShift(pixels)
