"""Properties of the zero-mean projection: sums, norms, layouts, and its limit."""

from __future__ import annotations

import itertools

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given as hypotheses
from hypothesis import settings
from hypothesis import strategies as st
from known_answers import COUNTS, TASKS, made
from torch import Tensor, nn

import fedzmg
from fedzmg.algorithms import zero_mean
from fedzmg.models.initial import initial_params
from fedzmg.tree import Tree
from golden_problems import GOLDEN, P3, models, quadratic_task

EPS = {torch.float32: 1e-6, torch.float64: 1e-14}


@st.composite
def gradients(draw: st.DrawFn, dtype: torch.dtype | None = None) -> tuple[Tensor, tuple[int, ...]]:
    """A tensor of rank 1 to 4 and some of its axes, at least one."""
    kind = draw(st.sampled_from([torch.float32, torch.float64])) if dtype is None else dtype
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5))
    axes = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    size = st.floats(2.0**-10, 2.0**10, width=32)
    element = st.one_of(st.just(0.0), size, size.map(lambda v: -v))
    values = draw(hnp.arrays(np.float64, shape, elements=element))
    return torch.from_numpy(values).to(kind), tuple(sorted(axes))


def columns(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """One row per output unit, one column per input, gathered element by element."""
    rest = [a for a in range(tensor.ndim) if a not in axes]
    inputs = list(itertools.product(*(range(tensor.shape[a]) for a in axes)))
    outputs = list(itertools.product(*(range(tensor.shape[a]) for a in rest)))
    out = torch.empty(len(outputs), len(inputs), dtype=tensor.dtype)
    for i, unit in enumerate(outputs):
        for j, place in enumerate(inputs):
            where = dict(zip(rest, unit, strict=True)) | dict(zip(axes, place, strict=True))
            out[i, j] = tensor[tuple(where[a] for a in range(tensor.ndim))]
    return out


# (i), (iv), (v): properties of the projection itself.


@hypotheses(gradients(), st.floats(-8, 8))
def test_projection_is_the_matrix(case: tuple[Tensor, tuple[int, ...]], shift: float) -> None:
    """Each column is multiplied by ``I - 1 1^T / d``: linear, idempotent, blind to a shift."""
    grad, axes = case
    before = columns(grad.double(), axes)
    d = before.shape[1]
    matrix = torch.eye(d, dtype=torch.float64) - torch.ones(d, d, dtype=torch.float64) / d
    after = zero_mean(grad, axes)
    limit = 4 * EPS[grad.dtype] * max(float(before.abs().max()), abs(shift), 1.0)
    for same in (after, zero_mean(after, axes), zero_mean(grad + shift, axes)):
        got = columns(same.double(), axes)
        torch.testing.assert_close(got, before @ matrix, rtol=0, atol=limit)
    torch.testing.assert_close(zero_mean(-2 * grad, axes), -2 * after, rtol=0, atol=limit)
    assert after.norm() <= grad.norm() * (1 + EPS[grad.dtype])
    assert torch.equal(zero_mean(grad, ()), grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_takes_the_mean_in_float32(dtype: torch.dtype) -> None:
    # 1024 ones cannot be counted in eight bits of mantissa, and 8 x 60000 exceeds float16's range.
    many = torch.ones(1, 1024, dtype=dtype)
    many[0, 0] = 1025.0 if dtype == torch.float16 else 1024.0
    mean = float(many.double().mean().to(torch.float32).to(dtype))
    expected = (many.double() - mean).to(dtype)
    after = zero_mean(many, (1,))
    assert after.dtype == dtype
    assert torch.equal(after, expected)
    large = torch.full((1, 8), 60000.0, dtype=dtype)
    assert torch.equal(zero_mean(large, (1,)), torch.zeros(1, 8, dtype=dtype))


# (vii), (viii): what the projection means in a layer.


@hypotheses(st.integers(1, 6), st.integers(1, 7), st.integers(1, 4), st.integers(0, 2**31))
@settings(max_examples=40)
def test_dense_identity(batch: int, inputs: int, outputs: int, seed: int) -> None:
    """(vii) The projected gradient is the gradient of a layer that reads row-centred inputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, inputs, generator=generator, dtype=torch.float64) + 3
    weight = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    signal = torch.randn(batch, outputs, generator=generator, dtype=torch.float64)

    def gradient(rows: Tensor) -> Tensor:
        leaf = weight.clone().requires_grad_()
        ((rows @ leaf.T) * signal).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    expected = gradient(x - x.mean(1, keepdim=True))
    torch.testing.assert_close(zero_mean(gradient(x), (1,)), expected, rtol=0, atol=1e-11)


def test_convolution_identity() -> None:
    """The same for a convolution: every patch is centred before it meets the signal."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, 6, 6, generator=generator, dtype=torch.float64) + 1
    layer = nn.Conv2d(3, 4, (2, 3), bias=False).double()
    out = layer(x)
    signal = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    out.backward(signal)
    assert layer.weight.grad is not None
    patches = nn.functional.unfold(x, (2, 3))  # (batch, inputs of a unit, places)
    centred = patches - patches.mean(1, keepdim=True)
    expected = torch.einsum("bop,bip->oi", signal.flatten(2), centred).reshape(4, 3, 2, 3)
    axes = fedzmg.models.layout_of(layer)["weight"].input_axes
    torch.testing.assert_close(zero_mean(layer.weight.grad, axes), expected, rtol=0, atol=1e-11)


# (ii), (iii), (vi): whole trainings.


def column_sums(task: fedzmg.Task, params: Tree) -> dict[str, Tensor]:
    layout = task.model.layout
    return {
        name: columns(leaf.double(), layout[name].input_axes).sum(1)
        for name, leaf in params.items()
        if layout[name].input_axes
    }


@pytest.mark.parametrize("kind", TASKS)
@hypotheses(
    lr=st.floats(0.01, 0.3),
    momentum=st.one_of(st.none(), st.floats(0, 0.95)),
    decay=st.one_of(st.none(), st.floats(1e-4, 0.5)),
    server=st.floats(0.1, 1.5),
    engine=st.sampled_from(["sequential", "vectorized"]),
)
@settings(max_examples=8)
def test_column_sums_change_by_decay_alone(
    kind: str, lr: float, momentum: float | None, decay: float | None, server: float, engine: str
) -> None:
    """(ii), (iii): ``1 - decay lr`` per step of a client, averaged by examples."""
    task = TASKS[kind]()
    options = {"client_momentum": momentum, "client_decay": decay, "server_lr": server}
    start = initial_params(task.model, task.init, 0)
    before = column_sums(task, start)
    assert len(before) == 4  # convolutions and dense; or embedding, both GRU kernels and dense
    steps = {9: 2 * 3, 4: 2 * 1, 6: 2 * 2}  # two epochs of batches of four
    averaged = sum(n / sum(COUNTS) * (1 - (decay or 0) * lr) ** steps[n] for n in COUNTS)
    factor = 1 - server * (1 - averaged)
    algorithm = made("fedzmg", client_lr=lr, **options)
    for round_, after in enumerate(models(task, algorithm, engine=engine, rounds=2), 1):
        for name, sums in column_sums(task, after).items():
            torch.testing.assert_close(sums, before[name] * factor**round_, rtol=0, atol=1e-10)
            assert not torch.allclose(after[name], start[name].double(), atol=1e-5)


def test_one_local_step_finds_the_constrained_optimum() -> None:
    """P3: the projection keeps the column sum, so it ends at the best model with that sum."""
    limits = GOLDEN["p3"]["limits"]
    task = quadratic_task(P3, epochs=1)
    bare = made("fedzmg", client_lr=0.2, client_momentum=None, client_decay=None)
    last = models(task, bare, rounds=80)[-1]["weight"]
    expected = torch.tensor([limits["constrained_optimum"]], dtype=torch.float64)
    torch.testing.assert_close(last, expected, rtol=0, atol=1e-9)
    assert float(last.sum()) == pytest.approx(sum(P3["w0"]), abs=1e-12)

    def objective(w: list[float]) -> float:
        return sum(
            share
            * 0.5
            * sum(h * (v - c) ** 2 for h, v, c in zip(P3["H"][k], w, P3["c"][k], strict=True))
            for k, share in {"A": 0.25, "B": 0.75}.items()
        )

    assert objective(last[0].tolist()) == pytest.approx(limits["F_constrained"], abs=1e-9)
    free = models(task, made("fedavg", client_lr=0.2), rounds=80)[-1]["weight"]
    best = torch.tensor([limits["unconstrained_optimum"]], dtype=torch.float64)
    torch.testing.assert_close(free, best, rtol=0, atol=1e-9)
    gap = objective(last[0].tolist()) - objective(free[0].tolist())
    assert gap == pytest.approx(limits["gap_formula"], abs=1e-9)
