"""Compare FedZMG and FedAvg on your own model and data, and keep the trained model."""

import numpy as np
from torch import nn

import fedzmg

rng = np.random.default_rng(0)
centres = rng.normal(size=(5, 20)) * 0.6
y = rng.integers(0, 5, 3000)
x = centres[y] + rng.normal(size=(3000, 20)) + 1.0
clients = y * 6 + rng.integers(0, 6, 3000)  # 30 clients, each with a single label

task = fedzmg.Task.from_arrays(
    nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)),
    x[:2000], y[:2000], clients[:2000],
    tune=(x[2000:2500], y[2000:2500]), test=(x[2500:], y[2500:]),
    name="blobs", cohort=6, batch_size=10, rounds=12, threshold=0.7,
)  # fmt: skip

algorithms = ["fedzmg", "fedavg"]
tuned = fedzmg.tune(task, algorithms, {"client.lr": [0.03, 0.1, 0.3, 1.0]}, rounds=6)
print(tuned)
result = fedzmg.compare(task, algorithms, seeds=3, settings=tuned.settings)
print(result)

model = result.histories["fedzmg"][0].model()  # an ordinary nn.Module
print(model)
