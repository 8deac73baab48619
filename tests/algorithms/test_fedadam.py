"""The two servers called FedAdam: known answers, an oracle of plain floats, degenerate cases."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known_answers import ENGINES, drive

from fedzmg.algorithms import SGD, Adam, ReddiAdam
from fedzmg.contract import Algorithm, ServerRule
from golden_problems import P2, models, quadratic_task


def oracle(
    start: list[float],
    deltas: list[list[float]],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    small: float,
    second: float,
    corrected: bool,
) -> list[list[float]]:
    """Adam on pseudo-gradients, one coordinate at a time, in place."""
    w, m, v = list(start), [0.0] * len(start), [second] * len(start)
    found = []
    for t, delta in enumerate(deltas, 1):
        for i, g in enumerate(delta):
            m[i] *= beta1
            m[i] += (1 - beta1) * g
            v[i] *= beta2
            v[i] += (1 - beta2) * g * g
            rate = lr
            if corrected:
                rate *= math.sqrt(1 - beta2**t) / (1 - beta1**t)
            if m[i] != 0:
                w[i] -= rate * m[i] / (math.sqrt(v[i]) + small)
        found.append(list(w))
    return found


deltas_of_three = st.lists(
    st.lists(st.floats(-4, 4).map(lambda v: 0.0 if abs(v) < 1e-6 else v), min_size=3, max_size=3),
    min_size=1,
    max_size=5,
)
rates = st.floats(1e-3, 1)
betas = st.one_of(st.just(0.0), st.floats(0.01, 0.999))
smalls = st.floats(1e-5, 0.1)


@given(deltas_of_three, rates, betas, betas, smalls, st.booleans())
@settings(max_examples=60)
def test_bias_corrected_server_against_plain_floats(
    deltas: list[list[float]], lr: float, beta1: float, beta2: float, eps: float, bound: bool
) -> None:
    start = [1.0, -2.0, 0.25]
    found = drive(Adam(lr, beta1, beta2, eps), start, deltas, bound=bound)
    expected = oracle(
        start, deltas, lr=lr, beta1=beta1, beta2=beta2, small=eps, second=0.0, corrected=True
    )
    for left, right in zip(found, expected, strict=True):
        assert left == pytest.approx(right, rel=1e-9, abs=1e-9)


@given(
    deltas_of_three,
    rates,
    betas,
    betas,
    smalls,
    st.one_of(st.none(), st.floats(0, 1)),
    st.booleans(),
)
@settings(max_examples=60)
def test_published_server_against_plain_floats(
    deltas: list[list[float]],
    lr: float,
    beta1: float,
    beta2: float,
    tau: float,
    v0: float | None,
    bound: bool,
) -> None:
    start = [1.0, -2.0, 0.25]
    found = drive(ReddiAdam(lr, beta1, beta2, tau, v0), start, deltas, bound=bound)
    second = tau**2 if v0 is None else v0
    expected = oracle(
        start, deltas, lr=lr, beta1=beta1, beta2=beta2, small=tau, second=second, corrected=False
    )
    for left, right in zip(found, expected, strict=True):
        assert left == pytest.approx(right, rel=1e-9, abs=1e-9)


def test_epsilon_is_outside_the_corrected_root() -> None:
    """Not torch.optim.Adam: a gradient of 1e-2 is as large as the effective epsilon at t = 1."""
    [[after]] = drive(Adam(lr=1.0), [0.0], [[1e-2]])
    assert after == pytest.approx(-0.5, abs=1e-12)
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    weight.grad = torch.tensor(1e-2, dtype=torch.float64)
    torch.optim.Adam([weight], lr=1.0, betas=(0.9, 0.99), eps=1e-3).step()
    assert weight.item() == pytest.approx(-1 / 1.1, abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_variants_agree_in_the_first_round_and_differ_in_the_second(engine: str) -> None:
    task = quadratic_task(P2)
    published = Algorithm("published", SGD(0.1), ReddiAdam(v0=0.0))
    corrected = Algorithm("corrected", SGD(0.1), Adam())
    one = [m["weight"] for m in models(task, published, engine=engine)]
    two = [m["weight"] for m in models(task, corrected, engine=engine)]
    torch.testing.assert_close(one[0], two[0], rtol=0, atol=1e-12)
    assert float((one[1] - two[1]).abs().min()) > 0.03
    # The second correction is sqrt(1 - 0.99^2) / (1 - 0.9^2) = 0.742...
    ratio = (two[1] - two[0]) / (one[1] - one[0])
    expected = torch.full_like(ratio, math.sqrt(1 - 0.99**2) / (1 - 0.9**2))
    torch.testing.assert_close(ratio, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", [Adam(eps=0.0), ReddiAdam(tau=0.0, v0=0.0)], ids=["tff", "reddi"])
def test_a_coordinate_without_history_stays_put(rule: ServerRule) -> None:
    """With memory as well: it moves only once it has had a delta, and goes on coasting after."""
    found = drive(rule, [7.0], [[0.0], [0.0], [1.0], [0.0]])
    assert found[0] == found[1] == [7.0]
    assert found[2][0] < 7.0
    assert found[3][0] < found[2][0]
    assert math.isfinite(found[3][0])
