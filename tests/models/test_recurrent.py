"""The GRU of matrix products against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedzmg.models import GRU, CharGRU, FunctionalModel

LIMIT = {torch.float32: 1e-6, torch.float64: 1e-12}


def pair(inputs: int, units: int, dtype: torch.dtype) -> tuple[GRU, nn.GRU]:
    """Both layers with the same weights, by name."""
    theirs = nn.GRU(inputs, units, batch_first=True).to(dtype)
    ours = GRU(inputs, units).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def sequences(batch: int, time: int, inputs: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(batch * 100 + time)
    return torch.randn(batch, time, inputs, generator=generator, dtype=dtype)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(
    ("batch", "time", "inputs", "units"), [(1, 1, 1, 1), (3, 7, 4, 5), (2, 40, 3, 8)]
)
def test_forward_and_backward(
    batch: int, time: int, inputs: int, units: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    ours, theirs = pair(inputs, units, dtype)
    x = sequences(batch, time, inputs, dtype)
    mine, yours = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, (expected, last) = ours(mine), theirs(yours)
    assert got.shape == (batch, time, units)
    torch.testing.assert_close(got, expected, rtol=0, atol=LIMIT[dtype])
    torch.testing.assert_close(got[:, -1], last[0], rtol=0, atol=LIMIT[dtype])
    signal = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    signal /= signal.norm()
    got.backward(signal)
    expected.backward(signal)
    torch.testing.assert_close(mine.grad, yours.grad, rtol=0, atol=LIMIT[dtype])
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            ours.get_parameter(name).grad, parameter.grad, rtol=0, atol=LIMIT[dtype]
        )


def test_parameters_have_the_names_shapes_and_range_of_torch() -> None:
    ours, theirs = GRU(3, 16), nn.GRU(3, 16)
    assert {n: p.shape for n, p in ours.named_parameters()} == {
        n: p.shape for n, p in theirs.named_parameters()
    }
    assert all(p.detach().abs().max().item() <= 0.25 for p in ours.parameters())


def test_two_steps_by_hand() -> None:
    """One unit, unit weights, no bias: r = z = sigma(x + h), n = tanh(x + r h)."""
    layer = GRU(1, 1).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.fill_(1.0 if name.startswith("weight") else 0.0)
        out = layer(torch.tensor([[[1.0], [-0.5]]], dtype=torch.float64))
    z1 = 1 / (1 + torch.exp(torch.tensor(-1.0, dtype=torch.float64)))
    h1 = (1 - z1) * torch.tanh(torch.tensor(1.0, dtype=torch.float64))
    gate = torch.sigmoid(-0.5 + h1)
    h2 = (1 - gate) * torch.tanh(-0.5 + gate * h1) + gate * h1
    torch.testing.assert_close(out.flatten(), torch.stack([h1, h2]), rtol=0, atol=1e-14)


def test_a_state_depends_on_the_past_only() -> None:
    layer = GRU(2, 3)
    x = sequences(2, 6, 2, torch.float32)
    changed = x.clone()
    changed[:, 4:] += 1
    before, after = layer(x), layer(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_runs_under_vmap_over_weights_and_sequences() -> None:
    ours, _ = pair(3, 4, torch.float64)
    stacked = {
        n: torch.stack([p.detach() * s for s in (1, 0.5, -1)]) for n, p in ours.named_parameters()
    }
    x = torch.stack([sequences(2, 5, 3, torch.float64) + i for i in range(3)])

    def outputs(weights: dict[str, Tensor], rows: Tensor) -> Tensor:
        return functional_call(ours, weights, (rows,))

    mapped = torch.vmap(outputs)(stacked, x)
    gradients = torch.vmap(torch.func.grad(lambda w, r: outputs(w, r).square().sum()))(stacked, x)
    for i in range(3):
        layer = nn.GRU(3, 4, batch_first=True).double()
        layer.load_state_dict({n: w[i] for n, w in stacked.items()})
        expected, _ = layer(x[i])
        torch.testing.assert_close(mapped[i], expected.detach(), rtol=0, atol=1e-12)
        expected.square().sum().backward()
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(gradients[name][i], parameter.grad, rtol=0, atol=1e-11)


def test_character_model_gives_logits_for_every_position() -> None:
    module = CharGRU(9, 3, 4)
    model = FunctionalModel(module)
    tokens = torch.tensor([[0, 8, 3], [1, 1, 1]])
    out = model.evaluate(model.params(), tokens)
    assert out.shape == (2, 3, 9)
    states = module.gru(module.embedding.weight[tokens])
    torch.testing.assert_close(out, module.dense(states).detach())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("batch", "time", "units"), [(8, 20, 64), (3, 100, 256)])
def test_character_model_on_a_gpu_equals_the_fused_layer(batch: int, time: int, units: int) -> None:
    """Forward and backward against cuDNN's GRU, both in full float32."""
    torch.manual_seed(0)
    ours = CharGRU(66, 32, units).cuda()
    fused = nn.GRU(32, units, batch_first=True).cuda()
    fused.load_state_dict(ours.gru.state_dict())
    tokens = torch.randint(0, 66, (batch, time + 1)).cuda()

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        got = ours(tokens[:, :-1])
        mine = torch.autograd.grad(loss(got), list(ours.parameters()))
        expected = ours.dense(fused(ours.embedding(tokens[:, :-1]))[0])
        weights = [ours.embedding.weight, *fused.parameters(), *ours.dense.parameters()]
        yours = torch.autograd.grad(loss(expected), weights)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    for left, right in zip(mine, yours, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5)
