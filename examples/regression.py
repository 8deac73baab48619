"""Regression with your own loss and metric, a frozen layer and a pretrained start."""

import numpy as np
import torch
from torch import Tensor, nn

import fedzmg

rng = np.random.default_rng(1)
x = rng.normal(size=(2000, 8)).astype(np.float32)
clients = rng.integers(0, 20, 2000)
shift = rng.normal(size=20)
y = (np.sin(x[:, 0]) + x[:, 1] + 0.3 * shift[clients]).astype(np.float32)

model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
model[0].requires_grad_(False)  # frozen: random features


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return one value per example, not their mean."""
    return (outputs.squeeze(-1) - targets) ** 2


task = fedzmg.Task.from_arrays(
    model, x[:1600], y[:1600], clients[:1600], test=(x[1600:], y[1600:]),
    loss=squared_error, metric=fedzmg.Metric("mse", squared_error, higher_is_better=False),
    init="given", name="sine", cohort=5, batch_size=16, rounds=30, threshold=0.3,
)  # fmt: skip

[history] = fedzmg.simulate(task, [fedzmg.Trial.of("fedavg", client_lr=0.05)])
print("mse by round:", [round(v, 3) for v in history.metrics[::5]])
trained = history.model()
assert torch.equal(trained[0].weight, model[0].weight)
