"""The paper's layers as Keras lays them out, in NumPy: forward passes, gradients, FedZMG steps.

Dense kernels are ``(in, out)``, convolutions ``(height, width, in, out)`` on channels-last images,
a GRU (``reset_after=True``) has a kernel ``(in, 3 units)``, a recurrent kernel ``(units, 3 units)``
and a bias ``(2, 3 units)`` with the gates in the order update, reset, new. Nothing is shared with
the library. Gradients are complex-step derivatives of the forward pass: exact to rounding, and
right if the forward pass is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Weights = dict[str, Array]
Loss = Callable[[Weights], Any]

STEP = 1e-30

MEAN_OVER: dict[str, tuple[int, ...]] = {
    "dense.kernel": (0,),
    "conv.kernel": (0, 1, 2),
    "gru.kernel": (0,),
    "gru.recurrent_kernel": (0,),
    "embedding.embeddings": (0,),
}
"""Axes that FedZMG averages over, by kind of layer and weight; biases are not projected."""


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def relu(x: Array) -> Array:
    return x * (x.real > 0)


def dense(x: Array, kernel: Array, bias: Array) -> Array:
    return x @ kernel + bias


def conv2d_same(x: Array, kernel: Array, bias: Array) -> Array:
    """Images ``(n, height, width, in)``; what a kernel reads outside of an image is zero."""
    high, wide = kernel.shape[:2]
    above, left = (high - 1) // 2, (wide - 1) // 2
    n, rows, columns, _ = x.shape
    padded = np.zeros((n, rows + high - 1, columns + wide - 1, x.shape[3]), dtype=x.dtype)
    padded[:, above : above + rows, left : left + columns] = x
    out = np.zeros((n, rows, columns, kernel.shape[3]), dtype=np.result_type(x, kernel, bias))
    for i in range(rows):
        for j in range(columns):
            patch = padded[:, i : i + high, j : j + wide]
            out[:, i, j] = np.tensordot(patch, kernel, 3) + bias
    return out


def max_pool_2x2(x: Array) -> Array:
    n, rows, columns, channels = x.shape
    blocks = x.reshape(n, rows // 2, 2, columns // 2, 2, channels).transpose(0, 1, 3, 5, 2, 4)
    flat = blocks.reshape(*blocks.shape[:4], 4)
    return np.take_along_axis(flat, flat.real.argmax(-1)[..., None], -1)[..., 0]


def gru(x: Array, kernel: Array, recurrent_kernel: Array, bias: Array) -> Array:
    """All states of sequences ``(n, time, in)``; the reset gate acts behind the product."""
    units = recurrent_kernel.shape[0]
    hidden = np.zeros((len(x), units))
    states = []
    for t in range(x.shape[1]):
        from_input = x[:, t] @ kernel + bias[0]
        from_hidden = hidden @ recurrent_kernel + bias[1]
        update = sigmoid(from_input[:, :units] + from_hidden[:, :units])
        reset = sigmoid(from_input[:, units : 2 * units] + from_hidden[:, units : 2 * units])
        new = np.tanh(from_input[:, 2 * units :] + reset * from_hidden[:, 2 * units :])
        hidden = update * hidden + (1 - update) * new
        states.append(hidden)
    return np.stack(states, 1)


def embedding(ids: Array, embeddings: Array) -> Array:
    return embeddings[ids]


def cross_entropy(logits: Array, labels: Array) -> Any:
    """Mean over all predictions."""
    flat, wanted = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    chosen = flat[np.arange(len(wanted)), wanted]
    return (np.log(np.exp(flat).sum(1)) - chosen).mean()


def gradient(loss: Loss, weights: Weights) -> Weights:
    """One derivative per number, from a step along the imaginary axis."""
    found: Weights = {}
    for name, values in weights.items():
        slope = np.zeros(values.shape)
        for place in np.ndindex(values.shape):
            moved = values.astype(complex)
            moved[place] += STEP * 1j
            slope[place] = loss(weights | {name: moved}).imag / STEP
        found[name] = slope
    return found


def axes_of(name: str) -> tuple[int, ...]:
    """``conv_2.kernel`` is looked up as ``conv.kernel``."""
    layer, own = name.split(".")
    return MEAN_OVER.get(f"{layer.split('_')[0]}.{own}", ())


def zero_mean(grads: Weights) -> Weights:
    return {
        name: g - g.mean(axis=axes_of(name), keepdims=True) if axes_of(name) else g
        for name, g in grads.items()
    }


def fedzmg_steps(
    loss: Loss, weights: Weights, *, lr: float, momentum: float, decay: float, steps: int
) -> Weights:
    """Local training on one batch: zero-mean gradient, momentum, decoupled decay of everything."""
    velocity = {name: np.zeros_like(values) for name, values in weights.items()}
    for _ in range(steps):
        centred = zero_mean(gradient(loss, weights))
        velocity = {name: momentum * velocity[name] + centred[name] for name in weights}
        weights = {
            name: values * (1 - decay * lr) - lr * velocity[name]
            for name, values in weights.items()
        }
    return weights
