"""Texts that ``fedzmg new algorithm`` writes: an algorithm and its test."""

_ALGORITHM = '''\
"""@NAME@: SGD that is pulled to the global model; server momentum.

::

    client:  w_k <- w_k - lr (g + mu (w_k - w))
    server:  m   <- beta m + sum_k p_k (w - w_k) ;   w <- w - lr m

Travels down: the model. Travels up: the model difference. Server state: m.
Degenerate cases: ``mu = 0`` and ``beta = 0`` is FedAvg.
"""
# ruff: noqa: RUF009 (number returns a dataclass field)

from dataclasses import dataclass

from fedzmg.contract import (
    Algorithm,
    AlgorithmInfo,
    ClientRule,
    Number,
    ServerRule,
    number,
)


@dataclass(frozen=True)
class @CLASS@Client(ClientRule):
    """Local training; fields are hyper-parameters, methods are pure functions."""

    lr: Number = number(0.1, above=0, doc="client learning rate")
    mu: Number = number(0.01, low=0, doc="strength of the pull")

    def step(self, context, params, scratch, grad):
        """Take one step. Trees of tensors are added and scaled like numbers."""
        pull = self.mu * (params - context.params)
        # The state of this local training is unused here: begin() may make one.
        return params - self.lr * (grad + pull), scratch


@dataclass(frozen=True)
class @CLASS@Server(ServerRule):
    """Server step on the mean of the clients' differences ``w - w_k``."""

    lr: Number = number(1.0, above=0, doc="server learning rate")
    beta: Number = number(0.9, low=0, below=1, doc="momentum")

    def init(self, params):
        """Return the state before the first round."""
        return params.zeros()

    def update(self, params, state, cohort):
        """Return the next model and the next state."""
        momentum = self.beta * state + cohort.delta
        return params - self.lr * momentum, momentum


ALGORITHMS = (
    AlgorithmInfo(
        Algorithm("@NAME@", @CLASS@Client(), @CLASS@Server()),
        summary="SGD with a pull to the global model; server momentum",
        source="who, when",
        # Traffic and state in multiples of the model; "fedzmg check" counts them.
        down=1,
        up=1,
        client_keeps=0,
        server_keeps=1,
    ),
)
'''

_TEST = '''\
"""Tests of @MODULE@: the conformance suite, and two rounds computed by hand."""

import numpy as np
import pytest
import torch
from fedzmg import Task, Trial, simulate
from fedzmg.testing import check
from torch import nn

import @MODULE@


@pytest.mark.parametrize("info", @MODULE@.ALGORITHMS)
def test_algorithm_keeps_the_contract(info):
    """Engines agree, trials can be packed and resumed, bytes are as declared."""
    result = check(info)
    assert result.ok, str(result)


def half_square(outputs, targets):
    """Return a loss with the gradient ``outputs - targets``."""
    return 0.5 * ((outputs - targets) ** 2).sum(1)


def test_two_rounds_agree_with_numpy():
    """Two clients with 1 and 3 examples, full batches, two local steps."""
    rng = np.random.default_rng(0)
    x, y, owner = rng.normal(size=(4, 3)), rng.normal(size=(4, 1)), [0, 1, 1, 1]
    task = Task.from_arrays(
        nn.Linear(3, 1, bias=False).double(),
        x,
        y,
        owner,
        test=(x, y),
        loss=half_square,
        init="given",
        cohort=2,
        batch_size=4,
        epochs=2,
    )
    algorithm = @MODULE@.ALGORITHMS[0].algorithm
    [history] = simulate(task, Trial(algorithm), rounds=2, dtype=torch.float64)

    lr, mu = algorithm.client.lr, algorithm.client.mu
    server_lr, beta = algorithm.server.lr, algorithm.server.beta
    start = task.model.params()["weight"].numpy()
    model, momentum = start.astype(float), np.zeros_like(start, float)
    for _ in range(2):
        delta = 0
        for rows, share in ((slice(0, 1), 0.25), (slice(1, 4), 0.75)):
            local = model
            for _ in range(2):
                error = x[rows] @ local.T - y[rows]
                grad = error.T @ x[rows] / len(error)
                local = local - lr * (grad + mu * (local - model))
            delta = delta + share * (model - local)
        momentum = beta * momentum + delta
        model = model - server_lr * momentum
    np.testing.assert_allclose(history.params["weight"].numpy(), model, atol=1e-9)
'''


def algorithm_file(name: str) -> str:
    """Return a file that defines an algorithm of this name."""
    words = "".join(word.capitalize() for word in name.split("_"))
    return _ALGORITHM.replace("@NAME@", name).replace("@CLASS@", words)


def pytest_file(module: str) -> str:
    """Return the test of a module that defines an algorithm."""
    return _TEST.replace("@MODULE@", module)
