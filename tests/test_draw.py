"""Random numbers of rules, as functions of a key."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedzmg import draw
from fedzmg.kernels import layers


def test_the_largest_draw_stays_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(key: Tensor, _layer: int, _call: int, places: int, _below: None) -> Tensor:
        return key.new_full((places,), layers.RANGE - 1)

    monkeypatch.setattr(draw, "draws", largest)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = draw.uniform(torch.tensor(1), torch.zeros(3, dtype=dtype))
        assert found.dtype == dtype
        assert bool((found < 1).all())
        assert bool((found > 0.99).all())
