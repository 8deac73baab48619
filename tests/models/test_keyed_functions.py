"""Random functions by key: fair chances, no trace in torch's generators; attention as torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedzmg.models.keyed import KeyedFunctions
from fedzmg.seeds import key, step_keys

KEYS = torch.from_numpy(step_keys(np.array([key(0, "dropout", 5)]), 4)[0])
ROWS, COLUMNS = 200, 50


def run(function: Callable[..., Any], *args: Any, key: Tensor = KEYS[0]) -> Any:
    with KeyedFunctions(2).begin(key):
        return function(*args)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape or (ROWS, COLUMNS), dtype=torch.float64)


# Function of nothing that differs by row, mean, variance.
DRAWS: dict[str, tuple[Callable[[int], Tensor], float, float]] = {
    "rand": (lambda n: torch.rand(n, COLUMNS), 0.5, 1 / 12),
    "rand-size": (lambda n: torch.rand(size=(n, COLUMNS), dtype=torch.float64), 0.5, 1 / 12),
    "rand-like": (lambda n: torch.rand_like(zeros(n, COLUMNS)), 0.5, 1 / 12),
    "uniform": (lambda n: torch.empty(n, COLUMNS).uniform_(-1, 3), 1.0, 16 / 12),
    "randn": (lambda n: torch.randn((n, COLUMNS)), 0.0, 1.0),
    "randn-like": (lambda n: torch.randn_like(zeros(n, COLUMNS)), 0.0, 1.0),
    "normal": (lambda n: zeros(n, COLUMNS).normal_(mean=2, std=3), 2.0, 9.0),
    "exponential": (lambda n: zeros(n, COLUMNS).exponential_(2), 0.5, 0.25),
    "bernoulli": (lambda n: torch.bernoulli(zeros(n, COLUMNS) + 0.3), 0.3, 0.21),
    "bernoulli-p": (lambda n: zeros(n, COLUMNS).bernoulli(p=0.3), 0.3, 0.21),
    "bernoulli-in-place": (lambda n: torch.empty(n, COLUMNS).bernoulli_(0.3), 0.3, 0.21),
    "randint": (lambda n: torch.randint(5, (n, COLUMNS)).double(), 2.0, 2.0),
    "randint-range": (lambda n: torch.randint(3, 8, size=(n, COLUMNS)).double(), 5.0, 2.0),
    "dropout": (lambda n: F.dropout(zeros(n, COLUMNS) + 1, 0.25), 1.0, 1 / 3),
    "in-place": (lambda n: F.dropout(zeros(n, COLUMNS) + 1, 0.25, inplace=True), 1.0, 1 / 3),
    "dropout-of-torch": (
        lambda n: torch.dropout(zeros(n, COLUMNS) + 1, 0.25, train=True), 1.0, 1 / 3
    ),
    "dropout1d": (lambda n: F.dropout1d(zeros(n, COLUMNS, 3) + 1, 0.25), 1.0, 1 / 3),
    "dropout2d": (lambda n: F.dropout2d(zeros(n, COLUMNS, 1, 2) + 1, 0.25), 1.0, 1 / 3),
    "dropout3d": (lambda n: F.dropout3d(zeros(n, COLUMNS, 1, 1, 1) + 1, 0.25), 1.0, 1 / 3),
    # Inputs of mean 0 and variance 1 keep them.
    "alpha-dropout": (lambda n: F.alpha_dropout(torch.randn(n, COLUMNS), 0.2, True), 0.0, 1.0),
    "feature-alpha": (
        lambda n: F.feature_alpha_dropout(torch.randn(n, COLUMNS, 2), 0.2, True), 0.0, 1.0
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_moments_keys_and_padding(name: str) -> None:
    function, mean, variance = DRAWS[name]
    before = torch.get_rng_state()
    out = run(function, ROWS)
    assert torch.equal(torch.get_rng_state(), before)
    assert out.isfinite().all()
    spread = 6 * math.sqrt(variance / (ROWS * COLUMNS))
    assert float(out.double().mean()) == pytest.approx(mean, abs=spread)
    assert float(out.double().var()) == pytest.approx(variance, rel=0.12)
    assert torch.equal(out, run(function, ROWS))
    assert not torch.equal(out, run(function, ROWS, key=KEYS[1]))
    torch.testing.assert_close(out[:7], run(function, 7), rtol=1e-6, atol=1e-6)
    twice = run(lambda: (function(ROWS), function(ROWS)))
    assert not torch.equal(*twice)
    assert (out.flatten(1).std(1) > 0).all()


def test_whole_channels_are_dropped_and_dropout_can_be_off() -> None:
    x = zeros(20, 10, 4, 4) + 1
    zeroed = (run(F.dropout2d, x, 0.5) == 0).flatten(2)
    assert torch.equal(zeroed.all(2), zeroed.any(2))
    assert 50 < int(zeroed.all(2).sum()) < 150
    for function in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout):
        flat = x.flatten(2) if function is F.dropout1d else x
        assert torch.equal(run(function, flat, 0.5, False), flat)
        assert torch.equal(run(function, flat, 0.0, True), flat)
    with pytest.raises(ValueError, match=r"1\.5"):
        run(F.dropout, x, 1.5)


def heads(seed: int, count: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(2, count, *shape)))


ALLOWED = torch.from_numpy(np.random.default_rng(9).random((5, 6)) < 0.6)
ALLOWED[2] = False  # a position that may read nothing
ATTENTION: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "plain": ((4, 4), {}),
    "scale": ((4, 4), {"scale": 0.2}),
    "causal": ((4, 4), {"is_causal": True}),
    "mask": ((4, 4), {"attn_mask": ALLOWED}),
    "bias": ((4, 4), {"attn_mask": torch.linspace(-2, 1, 30, dtype=torch.float64).view(5, 6)}),
    "groups": ((4, 2), {"enable_gqa": True}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_mapped_as_torchs_own(name: str, dtype: torch.dtype) -> None:
    (many, few), options = ATTENTION[name]
    parts = heads(0, many, 5, 8), heads(1, few, 6, 8), heads(2, few, 6, 8)
    options = {
        key: v.to(dtype) if isinstance(v, Tensor) and v.dtype != torch.bool else v
        for key, v in options.items()
    }

    def total(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        out = F.scaled_dot_product_attention(*qkv, **options)
        return out.square().sum(), out

    clients = [torch.stack([part, part.flip(-1)]).to(dtype) for part in parts]
    gradient = torch.func.grad(total, argnums=(0, 1, 2), has_aux=True)
    grads, out = run(torch.vmap(gradient), *clients)
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    for i in range(2):
        tracked = [part[i].clone().requires_grad_() for part in clients]
        loss, expected = total(*tracked)
        loss.backward()
        torch.testing.assert_close(out[i], expected, rtol=0, atol=close)
        for grad, part in zip(grads, tracked, strict=True):
            assert part.grad is not None
            torch.testing.assert_close(grad[i], part.grad, rtol=0, atol=10 * close)


def test_dropout_of_attention_keeps_its_mean() -> None:
    query, value = zeros(300, 2, 4, 3), zeros(300, 2, 4, 3) + 1
    attend = F.scaled_dot_product_attention
    out = run(lambda: attend(query, query, value, dropout_p=0.5))
    assert float(out.mean()) == pytest.approx(1, abs=0.05)
    assert 0.2 < float(out.var()) < 0.3  # a quarter of each kept weight's 1
