"""The small decoder: causal, equal to torch's attention, refused beyond its length."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedzmg import models
from fedzmg.errors import InputError
from fedzmg.models import CharTransformer, FunctionalModel, layout_of
from fedzmg.models.transformer import _Attention


def tokens(batch: int, time: int) -> torch.Tensor:
    return torch.randint(0, 9, (batch, time), generator=torch.Generator().manual_seed(time))


def test_attention_is_torchs() -> None:
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


def test_nothing_but_parameters() -> None:
    module = CharTransformer(9, 8, 2, 3, length=6)
    assert not list(module.buffers())
    dense = 4 * (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8) + 4 * 8
    assert sum(p.numel() for p in module.parameters()) == 9 * 8 + 6 * 8 + 3 * dense + 16 + 9 * 8 + 9
    layout = layout_of(module)
    assert [n for n, info in layout.items() if info.role == "embedding"] == [
        "tokens.weight",
        "places.weight",
    ]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="heads = 3: expected a divisor of dim = 8"):
        CharTransformer(9, 8, 3, 1, 6)
    model = FunctionalModel(CharTransformer(9, 8, 2, 1, 6))
    with pytest.raises(InputError) as caught:
        model.evaluate(model.params(), tokens(2, 7))
    assert str(caught.value) == (
        "a sequence of 7 characters for a model of length 6: "
        "cut the sequences or make the model longer"
    )


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
