"""FedAvg and FedZMG against ordinary mutable training loops.

Only the addresses of randomness are shared with the library: who is sampled and in which order a
client sees its examples. Model, gradients, optimiser, projection and averaging are done here with
``torch.optim.SGD`` on modules that are changed in place.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedzmg
from fedzmg import algorithms
from fedzmg.data.plan import Batching, local_stream, sample_cohort
from golden_problems import models

COUNTS = [7, 1, 12, 4, 9, 3]
CLASSES = 4
ROUNDS = 2


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(49, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def convolutions() -> nn.Module:
    first, second = nn.Conv2d(1, 3, 3, stride=2), nn.Conv2d(3, 4, 2)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES))


NETWORKS = {"mlp": perceptron, "cnn": convolutions}


class Federation:
    """Ragged clients in mixed order, as a user's arrays hold them."""

    def __init__(self, network: str) -> None:
        generator = torch.Generator().manual_seed(21)
        total = sum(COUNTS)
        self.x = torch.rand(total, 1, 7, 7, generator=generator)
        self.y = torch.randint(0, CLASSES, (total,), generator=generator)
        mixed = torch.randperm(total, generator=generator).numpy()
        self.owners = np.repeat(np.arange(len(COUNTS)), COUNTS)[mixed]
        self.module = NETWORKS[network]()
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))

    def task(self, **protocol: Any) -> fedzmg.Task:
        test = (self.x[:6], self.y[:6])
        return fedzmg.Task.from_arrays(
            self.module, self.x, self.y, self.owners, test=test, init="given", **protocol
        )


def centre_in_place(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, nn.Linear):
            child.weight.grad.sub_(child.weight.grad.mean(dim=1, keepdim=True))
        if isinstance(child, nn.Conv2d):
            for unit in child.weight.grad:
                unit.sub_(unit.mean())


class Settings(NamedTuple):
    """Hyper-parameters and protocol of the loop below."""

    lr: float = 0.1
    momentum: float = 0.9
    decay: float = 5e-3
    centred: bool = True
    server_lr: float = 1.0
    uniform: bool = False
    seed: int = 0
    cohort: int = 4
    replacement: bool = False
    batching: Batching = Batching(3, 2)


def train_by_hand(federation: Federation, settings: Settings) -> list[dict[str, Tensor]]:
    lr, momentum, decay, centred, server_lr, uniform, seed, cohort, replacement, batching = settings
    order = np.argsort(federation.owners, kind="stable")
    x, y = federation.x[order].double(), federation.y[order]
    borders = [0, *np.cumsum(COUNTS).tolist()]
    server = copy.deepcopy(federation.module).double()
    found = []
    for round_ in range(1, ROUNDS + 1):
        sampled = sample_cohort(seed, round_, len(COUNTS), cohort, replacement=replacement).tolist()
        drawn: Counter[int] = Counter()
        replies: list[tuple[float, nn.Module]] = []
        for client in sampled:
            plan = local_stream(
                batching, seed, round_, client, drawn[client], borders[client], COUNTS[client]
            )
            drawn[client] += 1
            if len(plan) == 0:
                continue
            local = copy.deepcopy(server)
            optimiser = torch.optim.SGD(local.parameters(), lr=lr, momentum=momentum)
            for row, real in zip(plan.indices, plan.counts, strict=True):
                batch = torch.from_numpy(row[:real])
                optimiser.zero_grad()
                F.cross_entropy(local(x[batch]), y[batch]).backward()
                if centred:
                    centre_in_place(local)
                with torch.no_grad():
                    for parameter in local.parameters():
                        parameter.mul_(1 - lr * decay)
                optimiser.step()
            replies.append((1.0 if uniform else float(COUNTS[client]), local))
        total = sum(weight for weight, _ in replies)
        with torch.no_grad():
            for name, parameter in server.named_parameters():
                mean = sum(w / total * dict(m.named_parameters())[name] for w, m in replies)
                if replies:
                    parameter.mul_(1 - server_lr).add_(server_lr * mean)
        found.append({n: p.detach().clone() for n, p in server.named_parameters()})
    return found


PLAIN = Settings(lr=0.15, momentum=0.0, decay=0.0, seed=5)
PAPER = Settings(lr=0.15, seed=5)
CASES = {
    "fedavg": (PLAIN._replace(centred=False), "mlp"),
    "fedavg, momentum and decay": (PAPER._replace(centred=False), "cnn"),
    "fedzmg, server learning rate": (PLAIN._replace(server_lr=0.5), "cnn"),
    "fedzmg": (PAPER, "mlp"),
    "fedzmg, convolutions": (PAPER, "cnn"),
    "batches across epochs": (Settings(seed=2, batching=Batching(4, 3, True, True)), "mlp"),
    "clients drawn twice": (
        Settings(seed=2, cohort=8, replacement=True, batching=Batching(4, 3, True, False)),
        "mlp",
    ),
    "clients without a batch, equal weights": (
        Settings(
            seed=2, cohort=8, replacement=True, uniform=True, batching=Batching(4, 3, False, False)
        ),
        "mlp",
    ),
}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("case", CASES)
def test_training_equals_a_mutable_loop(case: str, engine: str) -> None:
    settings, network = CASES[case]
    federation, batching = Federation(network), settings.batching
    algorithm = algorithms.get("fedzmg" if settings.centred else "fedavg").with_options(
        {
            "client.lr": settings.lr,
            "client.momentum": settings.momentum or None,
            "client.decay": settings.decay or None,
            "server.lr": settings.server_lr,
            "weights": "uniform" if settings.uniform else "examples",
        }
    )
    batches = vars(batching) | {"batch_size": batching.size}
    del batches["size"]
    task = federation.task(cohort=settings.cohort, replacement=settings.replacement, **batches)
    found = models(task, algorithm, engine=engine, rounds=ROUNDS, seed=settings.seed)
    for left, right in zip(found, train_by_hand(federation, settings), strict=True):
        assert set(left) == set(right)
        for parameter in right:
            torch.testing.assert_close(left[parameter], right[parameter], rtol=0, atol=1e-9)
