"""Augmentation by address: known moves, fair chances, the same however a client is trained."""

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
from fedzmg.models.keyed import KeyedDropout, KeyedLayer
from fedzmg.seeds import step_keys

KEYS = torch.from_numpy(step_keys(0, "dropout", 5, steps=50))


def images(n: int, *shape: int) -> Tensor:
    return torch.arange(1, n * math.prod(shape) + 1, dtype=torch.float32).view(n, *shape)


def apply(layer: KeyedLayer, x: Tensor, key: Tensor = KEYS[0]) -> Tensor:
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


def test_about_half_is_flipped_independently() -> None:
    x = images(200, 1, 2)
    flips = torch.stack([apply(RandomFlip(), x, key)[:, 0, 0] != x[:, 0, 0] for key in KEYS])
    flips = flips.double()
    limit = 5 * 0.5 / math.sqrt(flips.numel())
    assert abs(float(flips.mean()) - 0.5) < limit
    centred = flips - 0.5
    for left, right in ((centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1])):
        assert abs(float((left * right).mean())) < limit / 2


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


def test_shift_is_a_random_crop_of_a_padded_image() -> None:
    x = images(30, 3, 6, 6)
    padded = nn.functional.pad(x, (2, 2, 2, 2))
    out = apply(RandomShift(2), x)
    for i in range(30):
        crops = [padded[i, :, a : a + 6, b : b + 6] for a in range(5) for b in range(5)]
        assert any(torch.equal(out[i], crop) for crop in crops)


def test_moves_longer_than_the_image() -> None:
    x = images(50, 2, 2)
    out = apply(RandomShift(5), x)
    assert bool((out == 0).all(-1).all(-1).any())
    edges = apply(RandomShift(5, edge=True), x)
    assert set(edges.unique().tolist()) <= set(x.unique().tolist())


LAYERS = [RandomFlip, lambda: RandomShift(2), lambda: RandomShift(1, edge=True)]


@pytest.mark.parametrize("make", LAYERS)
def test_evaluation_is_the_identity(make: Any) -> None:
    x = images(5, 3, 4)
    assert torch.equal(apply(make().eval(), x), x)
    assert torch.equal(apply(RandomShift(0), x), x)


@pytest.mark.parametrize("make", LAYERS)
def test_a_key_fixes_everything_and_every_key_differs(make: Any) -> None:
    x = images(30, 3, 4)
    assert torch.equal(apply(make(), x), apply(make(), x))
    assert not torch.equal(apply(make(), x), apply(make(), x, KEYS[1]))
    layer, other = make(), make().numbered(1)
    assert not torch.equal(apply(layer, x), apply(other, x))


@given(st.integers(0, 2**63 - 1), st.integers(1, 5), st.integers(0, 4), st.integers(0, 2))
@settings(max_examples=40)
def test_padding_a_batch_moves_nothing(key: int, rows: int, more: int, which: int) -> None:
    layer, x = LAYERS[which](), images(rows + more, 2, 3, 4)
    alone = apply(layer, x[:rows], torch.tensor(key))
    assert torch.equal(apply(layer, x, torch.tensor(key))[:rows], alone)


def test_mapped_as_alone() -> None:
    model = FunctionalModel(
        nn.Sequential(RandomShift(2), RandomFlip(), nn.Flatten(), nn.Linear(12, 4))
    )
    x = images(7 * 5, 3, 4).view(7, 5, 3, 4) / 100
    mapped = torch.vmap(model.train, in_dims=(None, 0, 0))(model.params(), x, KEYS[:7])
    for i in range(7):
        torch.testing.assert_close(mapped[i], model.train(model.params(), x[i], KEYS[i]))
        assert not torch.allclose(mapped[i], model.evaluate(model.params(), x[i]))


def test_precision_and_gradient() -> None:
    x = images(6, 3, 4).double().requires_grad_()
    out = apply(RandomShift(1), x)
    assert out.dtype == torch.float64
    out.sum().backward()
    assert x.grad is not None
    # A pixel counts as often as it is seen, once if it has not left the picture.
    assert set(x.grad.unique().tolist()) == {0.0, 1.0}
    bytes_ = apply(RandomFlip(), images(6, 3, 4).to(torch.uint8))
    assert bytes_.dtype == torch.uint8


def test_keyed_layers_are_numbered_together() -> None:
    shared = RandomFlip()
    module = nn.Sequential(
        RandomShift(1),
        shared,
        nn.Flatten(),
        nn.Linear(4, 4),
        nn.Dropout(0.5),
        nn.ModuleList([shared]),
    )
    model = FunctionalModel(module)
    assert model.layer_keys == ("0.key", "1.key", "4.key", "5.0.key")
    assert model.needs_key
    numbers = [m.layer for m in model.module.modules() if isinstance(m, KeyedLayer)]
    assert numbers == [0, 1, 2, 3]
    assert [m.layer for m in module.modules() if isinstance(m, KeyedLayer)] == [0, 0]


def test_dropout_is_numbered_as_ever_without_augmentation() -> None:
    """Numbers enter the masks: another number would change results that are already kept."""
    block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1))
    model = FunctionalModel(nn.Sequential(block, nn.Dropout(0.2), nn.Sequential(nn.Dropout(0.3))))
    found = {m.p: m.layer for m in model.module.modules() if isinstance(m, KeyedDropout)}
    assert found == {0.2: 0, 0.1: 1, 0.3: 2}


def test_keys_are_no_part_of_a_saved_model() -> None:
    assert dict(nn.Sequential(RandomFlip(), RandomShift(3)).state_dict()) == {}


@pytest.mark.parametrize("pixels", [-1, 1.5, True, "2"])
def test_impossible_moves_are_refused(pixels: Any) -> None:
    with pytest.raises(InputError) as caught:
        RandomShift(pixels)
    assert str(caught.value) == f"pixels = {pixels!r}: expected a whole number of at least 0"
