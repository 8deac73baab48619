"""Replacements of torch's layers: same outputs, same gradients, and they map."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_flatten

from fedzmg import Task, Trial, simulate
from fedzmg.models.layers import SWAPS, swap_layers
from golden_problems import Net

KIND = [torch.float64]
"""Type of the inputs, the last one in force."""


def real(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(sum(shape)).normal(size=shape)).to(KIND[-1])


def whole(high: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(high).integers(0, high, shape))


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
    "embedding": (lambda: nn.Embedding(7, 3), lambda m: m(whole(7, 5, 4))),
    "embedding-padded": (lambda: nn.Embedding(7, 3, padding_idx=2), lambda m: m(whole(7, 5, 4))),
    "lstm": (lambda: nn.LSTM(3, 4), lambda m: m(real(5, 2, 3))),
    "lstm-all": (
        lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True, proj_size=2),
        lambda m: m(real(2, 5, 3), (real(4, 2, 2), real(4, 2, 4))),
    ),
    "lstm-one-sequence": (
        lambda: nn.LSTM(3, 4, 2, bias=False, proj_size=2), lambda m: m(real(5, 3))
    ),
    "gru": (
        lambda: nn.GRU(3, 4, 2, bidirectional=True), lambda m: m(real(5, 2, 3), real(4, 2, 4))
    ),
    "gru-batch-first": (lambda: nn.GRU(3, 4, batch_first=True), lambda m: m(real(2, 5, 3))),
    "gru-one-sequence": (
        lambda: nn.GRU(3, 4, bias=False), lambda m: m(real(5, 3), real(1, 4))
    ),
    "rnn": (lambda: nn.RNN(3, 4, 3), lambda m: m(real(5, 2, 3))),
    "rnn-relu": (
        lambda: nn.RNN(3, 4, nonlinearity="relu", bias=False, bidirectional=True),
        lambda m: m(real(5, 2, 3), real(2, 2, 4)),
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
    return [part for part in tree_flatten(out)[0] if part is not None]


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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_mapped_as_torchs_own(name: str, dtype: torch.dtype) -> None:
    """Two clients with other weights, mapped: outputs and gradients of torch's layer for each."""
    make, use = CASES[name]
    torch.manual_seed(1)
    theirs = [make().double() for _ in range(2)]
    ours = Net(lambda m, _: tensors(use(m.layer)), layer=copy.deepcopy(theirs[0])).to(dtype)
    swap_layers(ours)
    own = [dict(module.named_parameters(prefix="layer")) for module in theirs]
    many = {key: torch.stack([p[key].detach().to(dtype) for p in own]) for key in own[0]}

    def total(params: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        outputs = torch.func.functional_call(ours, params, (None,))
        return torch.stack([(o * real(*o.shape)).sum() for o in outputs]).sum(), outputs

    KIND.append(dtype)
    grads, got = torch.vmap(torch.func.grad(total, has_aux=True))(many)
    KIND.pop()
    close = {torch.float64: 1e-12, torch.float32: 1e-6}[dtype]
    for client, module in enumerate(theirs):
        expected = tensors(use(module))
        torch.autograd.backward(expected, [real(*part.shape) for part in expected])
        for left, right in zip(got, expected, strict=True):
            torch.testing.assert_close(left[client].double(), right, rtol=0, atol=close)
        for key, parameter in module.named_parameters(prefix="layer"):
            torch.testing.assert_close(
                grads[key][client].double(), parameter.grad, rtol=0, atol=10 * close, msg=key
            )


def test_every_replaced_layer_is_tested() -> None:
    tested = {type(make()) for make, _ in CASES.values()}
    assert tested | {parametrizations._SpectralNorm} == set(SWAPS)


@pytest.mark.parametrize("kind", [nn.Linear, lambda *size: nn.Conv1d(*size, 3)])
def test_spectral_norm_is_that_of_the_exact_value(kind: Any) -> None:
    torch.manual_seed(2)
    module = parametrizations.spectral_norm(kind(5, 4).double())
    plain = module.parametrizations.weight.original.detach()
    swap_layers(module)
    for _ in range(2):  # no memory
        exact = torch.linalg.matrix_norm(plain.flatten(1), 2)
        torch.testing.assert_close(module.weight, plain / exact, rtol=1e-4, atol=0)


def test_a_trained_spectral_norm_is_evaluated_by_torch_as_it_was_by_us() -> None:
    def norm(layer: nn.Module, power: int) -> nn.Module:
        return parametrizations.spectral_norm(layer, n_power_iterations=power)

    net = nn.Sequential(norm(parametrizations.weight_norm(nn.Linear(4, 6)), 1), nn.Tanh())
    net.append(norm(nn.Linear(6, 3), 2))
    x, y = real(20, 4).float(), whole(3, 20)
    task = Task.from_arrays(net, x, y, np.arange(20) % 4, test=(x, y), cohort=4, init="given")
    [history] = simulate(task, Trial.of("fedavg", client_lr=2.0), rounds=5)
    loss = F.cross_entropy(history.model()(x), y)
    assert float(loss.detach()) == pytest.approx(history.records[-1].loss, rel=1e-5)


def test_a_layer_of_ones_own_keeps_its_forward_pass() -> None:
    class Doubled(nn.Bilinear):
        def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
            return 2 * super().forward(input1, input2)

    module = nn.Sequential(Doubled(2, 2, 2))
    swap_layers(module)
    assert type(module[0]) is Doubled
