"""The two servers called FedAdam: known answers, an oracle of plain floats, degenerate cases."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_answers import drive

from fedzmg.algorithms import Adam, ReddiAdam


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
