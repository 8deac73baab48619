"""Replacements of torch's layers: same outputs, same gradients, and they map."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedzmg.errors import InputError
from fedzmg.models.layers import SWAPS, swap_layers


def real(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


def attention(**more: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(8, 2, batch_first=True, **more)


FUTURE = torch.ones(5, 5, dtype=torch.bool).triu(1)

Use = Callable[[nn.Module], Any]
CASES: dict[str, tuple[Callable[[], nn.Module], Use]] = {
    "bilinear": (lambda: nn.Bilinear(3, 4, 5), lambda m: m(real(6, 3), real(6, 4))),
    "bilinear-no-bias": (
        lambda: nn.Bilinear(3, 4, 5, bias=False), lambda m: m(real(2, 6, 3), real(2, 6, 4))
    ),
    "linear": (lambda: nn.Linear(3, 4), lambda m: m(real(6, 3))),
    "linear-no-bias": (lambda: nn.Linear(3, 4, bias=False), lambda m: m(real(2, 6, 3))),
    "convolution": (
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), lambda m: m(real(2, 4, 7, 6))
    ),
    "convolution-reflected": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect", bias=False),
        lambda m: m(real(2, 2, 5, 6)),
    ),
    "bag-mean": (lambda: nn.EmbeddingBag(7, 3), lambda m: m(whole(7, 5, 4))),
    "bag-sum": (lambda: nn.EmbeddingBag(7, 3, mode="sum"), lambda m: m(whole(7, 5, 4))),
    "bag-max": (lambda: nn.EmbeddingBag(7, 3, mode="max"), lambda m: m(whole(7, 5, 4))),
    "bag-weighted": (
        lambda: nn.EmbeddingBag(7, 3, mode="sum"),
        lambda m: m(whole(7, 5, 4), per_sample_weights=real(5, 4)),
    ),
    "gru-cell": (lambda: nn.GRUCell(3, 4), lambda m: m(real(6, 3), m(real(6, 3) + 1))),
    "gru-cell-no-bias": (lambda: nn.GRUCell(3, 4, bias=False), lambda m: m(real(6, 3))),
    "lstm-cell": (lambda: nn.LSTMCell(3, 4), lambda m: m(real(6, 3), m(real(6, 3) + 1))),
    "lstm-cell-one-row": (lambda: nn.LSTMCell(3, 4, bias=False), lambda m: m(real(3))),
    "rnn-cell": (lambda: nn.RNNCell(3, 4), lambda m: m(real(6, 3), m(real(6, 3) + 1))),
    "rnn-cell-relu": (
        lambda: nn.RNNCell(3, 4, nonlinearity="relu"), lambda m: m(real(6, 3), m(real(6, 3) + 1))
    ),
    "attention": (attention, lambda m: m(real(2, 5, 8), real(2, 5, 8) + 1, real(2, 5, 8))),
    "attention-causal": (
        attention,
        lambda m: m(
            *[real(2, 5, 8)] * 3, need_weights=False, attn_mask=FUTURE, is_causal=True
        ),
    ),
    "attention-padded": (
        lambda: attention(kdim=3, vdim=4, add_bias_kv=True),
        lambda m: m(real(2, 5, 8), real(2, 6, 3), real(2, 6, 4), whole(2, 2, 6).bool(), False),
    ),
    "attention-per-head": (
        attention, lambda m: m(*[real(2, 5, 8)] * 3, average_attn_weights=False)
    ),
}  # fmt: skip


def tensors(out: Any) -> list[Tensor]:
    return [part for part in out if part is not None] if isinstance(out, tuple) else [out]


@pytest.mark.parametrize("name", CASES)
def test_same_outputs_and_gradients(name: str) -> None:
    make, use = CASES[name]
    torch.manual_seed(0)
    theirs = make().double()
    ours = copy.deepcopy(theirs)
    assert swap_layers(ours) == ()
    assert type(ours) is SWAPS[type(theirs)]
    assert repr(ours) == repr(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    got, expected = use(ours), use(theirs)
    assert len(got) == len(expected)
    for left, right in zip(tensors(got), tensors(expected), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)
    signals = [real(*part.shape) for part in tensors(expected)]
    for module, out in ((ours, got), (theirs, expected)):
        torch.autograd.backward(tensors(out), signals)
        assert all(p.grad is not None for p in module.parameters())
    for (key, left), (_, right) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        torch.testing.assert_close(left.grad, right.grad, rtol=0, atol=1e-12, msg=key)


def test_every_replaced_layer_is_tested() -> None:
    assert {type(make()) for make, _ in CASES.values()} == set(SWAPS)


def test_a_layer_of_ones_own_keeps_its_forward_pass() -> None:
    class Doubled(nn.Bilinear):
        def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
            return 2 * super().forward(input1, input2)

    module = nn.Sequential(Doubled(2, 2, 2))
    swap_layers(module)
    assert type(module[0]) is Doubled


def test_bags_without_rows_are_rejected() -> None:
    module = nn.EmbeddingBag(7, 3)
    swap_layers(module)
    with pytest.raises(InputError, match=r"ids of shape \(6,\)"):
        module(whole(7, 6), torch.tensor([0, 3]))
