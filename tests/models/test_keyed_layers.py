"""Dropout and augmentation by address: fair chances, and the same however a client is trained."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedzmg.errors import InputError
from fedzmg.models import FunctionalModel, RandomFlip, RandomShift
from fedzmg.models.kernels.draws import BLOCK, RANGE, draws, hash32, random_bits
from fedzmg.models.keyed import KeyedDropout, KeyedLayer
from fedzmg.seeds import step_keys
from golden_problems import Net

KEYS = [int(k) for k in step_keys(0, "dropout", 1, 2, 0, steps=40)]


def mask(key: int, shape: tuple[int, ...], *, layer: int = 0, p: float = 0.5) -> Tensor:
    return layer_with(key, p, layer)(torch.ones(shape)) != 0


def correlation(left: Tensor, right: Tensor) -> float:
    return float(
        torch.corrcoef(torch.stack([left.flatten().double(), right.flatten().double()]))[0, 1]
    )


def layer_with(key: int, p: float = 0.5, layer: int = 0) -> KeyedDropout:
    module = KeyedDropout(p, layer)
    module.key = torch.tensor(key)
    return module


def test_keep_rate_of_every_element_and_every_row() -> None:
    keys = torch.from_numpy(step_keys(3, "dropout", 0, steps=4000))
    bits = torch.vmap(lambda key: random_bits(key, 0, torch.Size((4, 8)), key.device))(keys)
    kept = (bits >= int(0.3 * RANGE)).double()
    limit = 5.5 * math.sqrt(0.21 / 4000)
    assert float((kept.mean(0) - 0.7).abs().max()) < limit
    # The number kept in a mask is binomial: its variance shows dependence between elements.
    counts = kept.flatten(1).sum(1)
    assert float(counts.var()) == pytest.approx(32 * 0.21, rel=0.12)


@given(st.integers(0, 2**63 - 1), st.integers(0, 62))
@settings(max_examples=60)
def test_every_bit_of_a_key_counts(key: int, bit: int) -> None:
    """Keys that differ anywhere give other masks, half of whose elements agree by chance."""
    left, right = mask(key, (32, 64)), mask(key ^ (1 << bit), (32, 64))
    agree = float((left == right).double().mean())
    assert abs(agree - 0.5) < 6 / (2 * math.sqrt(2048))


def test_a_layer_called_twice_in_one_pass_draws_twice() -> None:
    layers = {"layer": nn.Linear(1, 1), "drop": nn.Dropout(0.5)}
    net = Net(lambda m, x: torch.stack([m.drop(x), m.drop(x), m.drop(x)], 1), **layers)
    model = FunctionalModel(net)
    x = torch.ones(100, 64)
    for key in KEYS[:3]:
        kept = model.train(model.params(), x, torch.tensor(key)) != 0
        assert torch.equal(kept, model.train(model.params(), x, torch.tensor(key)) != 0)
        assert torch.equal(kept[:, 0], mask(key, (100, 64)))
        for i, j in ((0, 1), (0, 2), (1, 2)):
            assert abs(correlation(kept[:, i], kept[:, j])) < 5 / math.sqrt(x.numel())


def test_same_in_every_precision() -> None:
    x = torch.ones(7, 9)
    wide, half = (layer_with(KEYS[0])(x.to(dtype)) for dtype in (torch.float64, torch.bfloat16))
    assert wide.dtype == torch.float64
    assert half.dtype == torch.bfloat16
    assert torch.equal(wide != 0, mask(KEYS[0], (7, 9)))
    assert torch.equal(half != 0, mask(KEYS[0], (7, 9)))


def test_kept_elements_are_rescaled_so_that_the_mean_is_kept() -> None:
    x = torch.full((200, 200), 3.0)
    out = layer_with(KEYS[1], p=0.25)(x)
    values = out.unique().tolist()
    assert values == [0.0, 4.0]
    assert float(out.mean()) == pytest.approx(3.0, abs=5 * 4 * math.sqrt(0.1875 / x.numel()))


def test_extremes() -> None:
    x = torch.ones(20, 20)
    assert torch.equal(layer_with(KEYS[0], p=0.0)(x), x)
    assert torch.equal(layer_with(KEYS[0], p=1.0)(x), torch.zeros(20, 20))


def test_hash_is_one_to_one_and_mixes() -> None:
    values = torch.cat([torch.arange(2**16), 2**32 - 1 - torch.arange(2**16)])
    scrambled = hash32(values)
    assert int(scrambled.min()) >= 0
    assert int(scrambled.max()) < 2**32
    assert len(scrambled.unique()) == len(values)
    assert [hash32(int(value)) for value in values[::9999]] == scrambled[::9999].tolist()
    # Flipping one bit of the input flips each bit of the output about half of the time.
    probe = hash32(torch.arange(1, 4097) * 1_048_573 % 2**32)
    for bit in range(32):
        other = hash32((torch.arange(1, 4097) * 1_048_573 % 2**32) ^ (1 << bit))
        for place in range(32):
            rate = float((((probe ^ other) >> place) & 1).double().mean())
            assert 0.4 < rate < 0.6


def test_masks_are_frozen() -> None:
    """Changing how masks are addressed changes every result with dropout: never in silence."""
    bits = mask(1234567890123456789, (4, 16), layer=2, p=0.5).int().tolist()
    assert ["".join(map(str, row)) for row in bits] == [
        "0101001101101001",
        "0011001011011011",
        "1101111011001000",
        "1101000101001100",
    ]


KEYS64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(KEYS64, min_size=1, max_size=3),
    layer=st.integers(0, 50),
    call=st.integers(0, 3),
    places=st.sampled_from([1, 7, BLOCK - 1, BLOCK, BLOCK + 3]),
    below=st.none() | st.integers(0, RANGE - 1),
)
def test_operator_draws_what_the_definition_says(
    keys: list[int], layer: int, call: int, places: int, below: int | None
) -> None:
    of = torch.tensor(keys)
    got = torch.vmap(lambda key: draws(key, layer, call, places, below))(of)
    bits = random_bits(of[:, None], layer, torch.Size((places,)), of.device, call)
    assert torch.equal(got, bits if below is None else bits < below)
    assert torch.equal(draws(of[0], layer, call, places, below), got[0])


def test_operator_is_fit_for_the_compiler() -> None:
    for below in (None, RANGE // 3):
        torch.library.opcheck(draws, (torch.tensor(KEYS[0]), 2, 1, 100, below))


@pytest.mark.gpu
@pytest.mark.parametrize("below", [None, 0, RANGE // 4, RANGE // 2, RANGE - 1])
def test_draws_on_a_gpu_equal_those_on_a_cpu(below: int | None) -> None:
    keys = torch.tensor([*KEYS, -1, -(2**63), 2**63 - 1])
    for layer, call, places in ((0, 0, 70_000), (5, 2, 33)):
        here = torch.vmap(lambda key: draws(key, layer, call, places, below))  # noqa: B023
        assert torch.equal(here(keys), here(keys.cuda()).cpu())


STEP_KEYS = torch.from_numpy(step_keys(0, "dropout", 5, steps=50))


def images(n: int, *shape: int) -> Tensor:
    return torch.arange(1, n * math.prod(shape) + 1, dtype=torch.float32).view(n, *shape)


def apply(layer: KeyedLayer, x: Tensor, key: Tensor = STEP_KEYS[0]) -> Tensor:
    layer.key, layer.calls = key, 0
    return layer(x)  # type: ignore[no-any-return]


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
    total = torch.stack([apply(RandomShift(3), centre, key).sum(0) for key in STEP_KEYS]).sum(0)
    expected = 500 * len(STEP_KEYS) / 49
    assert float(total.sum()) == 500 * len(STEP_KEYS)
    chi2 = float(((total - expected) ** 2 / expected).sum())
    assert 20 < chi2 < 95  # 48 degrees of freedom: one in 20,000 lies outside


LAYERS = [
    RandomFlip, lambda: RandomShift(2), lambda: RandomShift(1, edge=True),
    lambda: KeyedDropout(0.4, 0),
]  # fmt: skip


@pytest.mark.parametrize("make", LAYERS)
def test_evaluation_is_the_identity(make: Any) -> None:
    x = images(5, 3, 4)
    assert torch.equal(apply(make().eval(), x), x)
    assert torch.equal(apply(RandomShift(0), x), x)


@pytest.mark.parametrize("make", LAYERS)
def test_a_key_fixes_everything_and_every_key_differs(make: Any) -> None:
    x = images(30, 3, 4)
    assert torch.equal(apply(make(), x), apply(make(), x))
    assert not torch.equal(apply(make(), x), apply(make(), x, STEP_KEYS[1]))
    layer, other = make(), make().numbered(1)
    assert not torch.equal(apply(layer, x), apply(other, x))


@given(st.integers(0, 2**63 - 1), st.integers(1, 5), st.integers(0, 4), st.integers(0, 3))
@settings(max_examples=40)
def test_padding_a_batch_moves_nothing(key: int, rows: int, more: int, which: int) -> None:
    layer, x = LAYERS[which](), images(rows + more, 2, 3, 4)
    alone = apply(layer, x[:rows], torch.tensor(key))
    assert torch.equal(apply(layer, x, torch.tensor(key))[:rows], alone)


def test_mapped_as_alone() -> None:
    model = FunctionalModel(
        nn.Sequential(RandomShift(2), RandomFlip(), nn.Flatten(), nn.Linear(12, 4), nn.Dropout(0.4))
    )
    x = images(7 * 5, 3, 4).view(7, 5, 3, 4) / 100
    mapped = torch.vmap(model.train, in_dims=(None, 0, 0))(model.params(), x, STEP_KEYS[:7])
    for i in range(7):
        torch.testing.assert_close(mapped[i], model.train(model.params(), x[i], STEP_KEYS[i]))
        assert not torch.allclose(mapped[i], model.evaluate(model.params(), x[i]))


def test_dropout_is_numbered_as_ever_without_augmentation() -> None:
    """Numbers enter the masks: another number would change results that are already kept."""
    block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1))
    model = FunctionalModel(nn.Sequential(block, nn.Dropout(0.2), nn.Sequential(nn.Dropout(0.3))))
    found = {m.p: m.layer for m in model.module.modules() if isinstance(m, KeyedDropout)}
    assert found == {0.2: 0, 0.1: 1, 0.3: 2}


@pytest.mark.parametrize("pixels", [-1, 1.5, True, "2"])
def test_impossible_moves_are_rejected(pixels: Any) -> None:
    with pytest.raises(InputError, match=f"pixels = {pixels!r}"):
        RandomShift(pixels)
