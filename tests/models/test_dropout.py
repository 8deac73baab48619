"""Masks by address: the right rate, no pattern, and the same however a client is trained."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedzmg.models import FunctionalModel
from fedzmg.models.kernels.draws import BLOCK, RANGE, draws, hash32, random_bits
from fedzmg.models.keyed import KeyedDropout
from fedzmg.seeds import step_keys

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


@pytest.mark.parametrize("p", [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99])
def test_keep_rate(p: float) -> None:
    kept = torch.stack([mask(key, (50, 100), p=p) for key in KEYS])
    sigma = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(float(kept.double().mean()) - (1 - p)) < 5 * sigma


def test_keep_rate_of_every_element_and_every_row() -> None:
    keys = torch.from_numpy(step_keys(3, "dropout", 0, steps=4000))
    bits = torch.vmap(lambda key: random_bits(key, 0, torch.Size((4, 8)), key.device))(keys)
    kept = (bits >= int(0.3 * RANGE)).double()
    limit = 5.5 * math.sqrt(0.21 / 4000)
    assert float((kept.mean(0) - 0.7).abs().max()) < limit
    # The number kept in a mask is binomial: its variance shows dependence between elements.
    counts = kept.flatten(1).sum(1)
    assert float(counts.var()) == pytest.approx(32 * 0.21, rel=0.12)


def test_no_dependence_between_neighbours() -> None:
    kept = torch.stack([mask(key, (40, 64)) for key in KEYS])
    limit = 5 / math.sqrt(kept.numel() / 2)
    for shift in (1, 2, 3, 4, 8, 16, 32):
        assert abs(correlation(kept[:, :, shift:], kept[:, :, :-shift])) < limit
        assert abs(correlation(kept[:, shift:], kept[:, :-shift])) < limit


def test_no_dependence_between_steps() -> None:
    kept = torch.stack([mask(key, (40, 64)) for key in KEYS])
    limit = 5 / math.sqrt(kept[0].numel())
    for i in range(1, len(KEYS)):
        assert abs(correlation(kept[0], kept[i])) < limit
        assert abs(correlation(kept[i - 1], kept[i])) < limit


@pytest.mark.parametrize("key", [*KEYS[:4], 0, 1, 2**62])
def test_no_dependence_between_layers(key: int) -> None:
    kept = [mask(key, (100, 64), layer=layer) for layer in range(6)]
    limit = 5 / math.sqrt(kept[0].numel())
    for i in range(6):
        for j in range(i):
            assert abs(correlation(kept[i], kept[j])) < limit


@given(st.integers(0, 2**63 - 1), st.integers(0, 62))
@settings(max_examples=60)
def test_every_bit_of_a_key_counts(key: int, bit: int) -> None:
    """Keys that differ anywhere give other masks, half of whose elements agree by chance."""
    left, right = mask(key, (32, 64)), mask(key ^ (1 << bit), (32, 64))
    agree = float((left == right).double().mean())
    assert abs(agree - 0.5) < 6 / (2 * math.sqrt(2048))


@given(
    st.integers(0, 2**63 - 1),
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(1, 9),
    st.integers(0, 3),
)
@settings(max_examples=60)
def test_padding_a_batch_does_not_move_masks(
    key: int, rows: int, more: int, width: int, layer: int
) -> None:
    short = mask(key, (rows, width, 2), layer=layer)
    assert torch.equal(mask(key, (rows + more, width, 2), layer=layer)[:rows], short)


def test_a_layer_called_twice_in_one_pass_draws_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.drop(x), self.drop(x), self.drop(x)], 1)

    model = FunctionalModel(Twice())
    x = torch.ones(100, 64)
    for key in KEYS[:3]:
        kept = model.train(model.params(), x, torch.tensor(key)) != 0
        assert torch.equal(kept, model.train(model.params(), x, torch.tensor(key)) != 0)
        assert torch.equal(kept[:, 0], mask(key, (100, 64)))
        for i, j in ((0, 1), (0, 2), (1, 2)):
            assert abs(correlation(kept[:, i], kept[:, j])) < 5 / math.sqrt(x.numel())


def test_same_under_vmap_as_alone() -> None:
    x = torch.ones(len(KEYS), 6, 10)
    model = FunctionalModel(nn.Sequential(nn.Linear(10, 10, bias=False), nn.Dropout(0.4)))
    params = model.params()
    keys = torch.tensor(KEYS)
    mapped = torch.vmap(model.train, in_dims=(None, 0, 0))(params, x, keys)
    for i, key in enumerate(keys):
        alone = model.train(params, x[i], key)
        assert torch.equal(mapped[i] == 0, alone == 0)
        torch.testing.assert_close(mapped[i], alone)


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


def test_gradient_flows_through_kept_elements_only() -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = layer_with(KEYS[2])(x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(out != 0, 2.0, 0.0))


def test_infinite_inputs_are_dropped_clean() -> None:
    """A dropped element is zero whatever it held; infinity times zero would be NaN."""
    out = layer_with(KEYS[3])(torch.full((8, 8), math.inf))
    assert set(out.unique().tolist()) == {0.0, math.inf}


def test_evaluation_is_the_identity() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer_with(KEYS[0]).eval()(x), x)


def test_extremes() -> None:
    x = torch.ones(20, 20)
    assert torch.equal(layer_with(KEYS[0], p=0.0)(x), x)
    assert torch.equal(layer_with(KEYS[0], p=1.0)(x), torch.zeros(20, 20))


def test_key_is_no_part_of_a_saved_model() -> None:
    assert dict(KeyedDropout(0.5, 0).state_dict()) == {}


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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("below", [None, 0, RANGE // 4, RANGE // 2, RANGE - 1])
def test_draws_on_a_gpu_are_those_of_a_processor(below: int | None) -> None:
    keys = torch.tensor([*KEYS, -1, -(2**63), 2**63 - 1])
    for layer, call, places in ((0, 0, 70_000), (5, 2, 33)):
        here = torch.vmap(lambda key: draws(key, layer, call, places, below))  # noqa: B023
        assert torch.equal(here(keys), here(keys.cuda()).cpu())
