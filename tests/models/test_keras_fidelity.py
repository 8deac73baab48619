"""Training in PyTorch's layout is training in Keras's layout, transposed.

Each problem is written twice: with the NumPy layers of ``oracles.keras_layout`` and as a module of
this library. Weights go over by :data:`TO_TORCH`; gradients, projection and FedZMG steps must
come out the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.fedzmg import ZeroMean
from fedzmg.messages import ClientContext
from fedzmg.models import CharGRU, FunctionalModel, layout_of
from fedzmg.tree import Tree
from oracles import keras_layout as keras
from oracles.keras_layout import Array, Weights

LR, MOMENTUM, DECAY = 0.3, 0.9, 5e-4
RNG = np.random.default_rng(7)


def gates(values: Array) -> Array:
    """Keras keeps update, reset, new along the last axis; PyTorch reset, update, new."""
    update, reset, new = np.split(values, 3, -1)
    return np.concatenate([reset, update, new], -1)


TO_TORCH: dict[str, Callable[[Array], Array]] = {
    "dense.kernel": lambda w: w.T,
    "conv.kernel": lambda w: w.transpose(3, 2, 0, 1),
    "gru.kernel": lambda w: gates(w).T,
    "gru.recurrent_kernel": lambda w: gates(w).T,
    "gru.bias_input": lambda b: gates(b[0]),
    "gru.bias_recurrent": lambda b: gates(b[1]),
    "embedding.embeddings": lambda w: w,
    "bias": lambda b: b,
}


class Problem(NamedTuple):
    """The same network and batch in both layouts."""

    weights: Weights
    loss: keras.Loss
    module: nn.Module
    x: Tensor
    y: Tensor
    names: dict[str, tuple[str, str]]
    """PyTorch's name: Keras's name, and the key of TO_TORCH."""
    rows: Array | None = None
    """For the dense kernel behind a flattened image: Keras's row of every PyTorch column."""

    def to_torch(self, weights: Weights) -> Tree:
        out = {}
        for name, (source, rule) in self.names.items():
            values = weights[source]
            if self.rows is not None and rule == "dense.kernel":
                values = values[self.rows]
            out[name] = torch.from_numpy(np.ascontiguousarray(TO_TORCH[rule](values)))
        return Tree(out)


def normal(*shape: int) -> Array:
    return RNG.normal(size=shape) * 0.5


def dense_problem() -> Problem:
    x, y = normal(6, 4), RNG.integers(0, 3, 6)
    weights = {"dense.kernel": normal(4, 3), "dense.bias": normal(3)}

    def loss(w: Weights) -> Any:
        return keras.cross_entropy(keras.dense(x, w["dense.kernel"], w["dense.bias"]), y)

    names = {"weight": ("dense.kernel", "dense.kernel"), "bias": ("dense.bias", "bias")}
    return Problem(weights, loss, nn.Linear(4, 3), torch.from_numpy(x), torch.from_numpy(y), names)


def image_problem() -> Problem:
    """A small one of the paper's image networks: same padding, pooling, flattening, dense."""
    n, size, channels, filters, outputs = 3, 4, 2, 3, 3
    x, y = normal(n, size, size, channels), RNG.integers(0, outputs, n)
    half = size // 2
    weights = {
        "conv.kernel": normal(3, 3, channels, filters),
        "conv.bias": normal(filters),
        "dense.kernel": normal(half * half * filters, outputs),
        "dense.bias": normal(outputs),
    }

    def loss(w: Weights) -> Any:
        hidden = keras.relu(keras.conv2d_same(x, w["conv.kernel"], w["conv.bias"]))
        flat = keras.max_pool_2x2(hidden).reshape(n, -1)
        return keras.cross_entropy(keras.dense(flat, w["dense.kernel"], w["dense.bias"]), y)

    module = nn.Sequential(
        nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(half * half * filters, outputs),
    )  # fmt: skip
    names = {
        "0.weight": ("conv.kernel", "conv.kernel"),
        "0.bias": ("conv.bias", "bias"),
        "4.weight": ("dense.kernel", "dense.kernel"),
        "4.bias": ("dense.bias", "bias"),
    }
    rows = np.arange(half * half * filters).reshape(half, half, filters).transpose(2, 0, 1)
    images = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
    return Problem(weights, loss, module, images, torch.from_numpy(y), names, rows.reshape(-1))


def text_problem() -> Problem:
    """A small one of the paper's text network: embedding, GRU over the whole sequence, dense."""
    vocabulary, dim, units = 7, 3, 4
    tokens = np.array([[0, 2, 2, 5], [5, 0, 1, 2]])  # 3, 4 and 6 are never seen
    y = RNG.integers(0, vocabulary, tokens.shape)
    weights = {
        "embedding.embeddings": normal(vocabulary, dim),
        "gru.kernel": normal(dim, 3 * units),
        "gru.recurrent_kernel": normal(units, 3 * units),
        "gru.bias": normal(2, 3 * units),
        "dense.kernel": normal(units, vocabulary),
        "dense.bias": normal(vocabulary),
    }

    def loss(w: Weights) -> Any:
        states = keras.gru(
            keras.embedding(tokens, w["embedding.embeddings"]),
            w["gru.kernel"], w["gru.recurrent_kernel"], w["gru.bias"],
        )  # fmt: skip
        return keras.cross_entropy(keras.dense(states, w["dense.kernel"], w["dense.bias"]), y)

    names = {
        "embedding.weight": ("embedding.embeddings", "embedding.embeddings"),
        "gru.weight_ih_l0": ("gru.kernel", "gru.kernel"),
        "gru.weight_hh_l0": ("gru.recurrent_kernel", "gru.recurrent_kernel"),
        "gru.bias_ih_l0": ("gru.bias", "gru.bias_input"),
        "gru.bias_hh_l0": ("gru.bias", "gru.bias_recurrent"),
        "dense.weight": ("dense.kernel", "dense.kernel"),
        "dense.bias": ("dense.bias", "bias"),
    }
    module = CharGRU(vocabulary, dim, units)
    return Problem(weights, loss, module, torch.from_numpy(tokens), torch.from_numpy(y), names)


PROBLEMS = {"dense": dense_problem(), "image": image_problem(), "text": text_problem()}


def torch_gradient(problem: Problem, params: Tree) -> Tree:
    model = FunctionalModel(problem.module.double())
    tracked = params.map(lambda leaf: leaf.clone().requires_grad_())
    logits = model.train(tracked, problem.x)
    loss = nn.functional.cross_entropy(logits.flatten(0, -2), problem.y.flatten())
    slopes = torch.autograd.grad(loss, list(tracked.values()))
    return Tree(dict(zip(tracked, slopes, strict=True)))


def torch_steps(problem: Problem, steps: int) -> Tree:
    rule = ZeroMean(SGD(lr=LR, momentum=MOMENTUM, decay=DECAY))
    rule = rule.for_layout(layout_of(problem.module))
    params = problem.to_torch(problem.weights)
    context = ClientContext(params, (), (), torch.tensor(1), torch.tensor(len(problem.x)))
    scratch = rule.begin(context, ())
    for _ in range(steps):
        params, scratch = rule.step(context, params, scratch, torch_gradient(problem, params))
    return params


def assert_same(found: Tree, expected: Tree) -> None:
    assert set(found) == set(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_are_transposes(name: str) -> None:
    problem = PROBLEMS[name]
    expected = problem.to_torch(keras.gradient(problem.loss, problem.weights))
    assert_same(torch_gradient(problem, problem.to_torch(problem.weights)), expected)
    assert all(float(leaf.abs().max()) > 1e-4 for leaf in expected.values())


@pytest.mark.parametrize("name", PROBLEMS)
def test_fedzmg_steps_are_transposes(name: str) -> None:
    problem = PROBLEMS[name]
    expected = keras.fedzmg_steps(
        problem.loss, problem.weights, lr=LR, momentum=MOMENTUM, decay=DECAY, steps=2
    )
    assert_same(torch_steps(problem, 2), problem.to_torch(expected))
