"""The two servers called FedAdam: known answers, an oracle of plain floats, degenerate cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known_answers import ENGINES, drive

from fedzmg import algorithms
from fedzmg.algorithms import SGD, Adam, ReddiAdam
from fedzmg.contract import Algorithm, ServerRule
from fedzmg.errors import InputError
from fedzmg.tree import Tree
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


def test_first_step_by_hand() -> None:
    """m = 0.1 g, v = 0.01 g^2: the published step from v0 = 0 is lr 0.1 g / (0.1 |g| + tau)."""
    for g in (2.0, -0.5, 1e-4):
        expected = [1 - 0.1 * 0.1 * g / (0.1 * abs(g) + 1e-3)]
        [published] = drive(ReddiAdam(v0=0.0), [1.0], [[g]])
        assert published == pytest.approx(expected, abs=1e-12)
        # With (0.9, 0.99) the correction of the first step is sqrt(0.01) / 0.1 = 1.
        [corrected] = drive(Adam(), [1.0], [[g]])
        assert corrected == pytest.approx(expected, abs=1e-12)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize(
    "rule",
    [
        ReddiAdam(lr=0.5, beta1=0.0, beta2=0.0, tau=0.0, v0=0.0),
        ReddiAdam(lr=0.5, beta1=0.0, beta2=0.0, tau=0.0),
        Adam(lr=0.5, beta1=0.0, beta2=0.0, eps=0.0),
    ],
    ids=["published", "published-tau", "corrected"],
)
def test_no_memory_and_no_epsilon_is_a_sign_step(
    rule: ServerRule, bound: bool, dtype: torch.dtype
) -> None:
    """Only the sign of a delta counts; a coordinate without one stays put and is no NaN."""
    deltas = [[3.0, -0.001, 0.0, 250.0], [-2.0, -7.0, 0.0, 0.0], [0.0, 5.0, 0.0, -1.0]]
    found = drive(rule, [0.0, 0.0, 4.0, 1.0], deltas, bound=bound, dtype=dtype)
    expected = [[-0.5, 0.5, 4.0, 0.5], [0.0, 1.0, 4.0, 0.5], [0.0, 0.5, 4.0, 1.0]]
    for left, right in zip(found, expected, strict=True):
        assert left == pytest.approx(right, abs=1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("rule", [Adam(eps=0.0), ReddiAdam(tau=0.0, v0=0.0)], ids=["tff", "reddi"])
def test_a_coordinate_without_history_stays_put(rule: ServerRule) -> None:
    """With memory as well: it moves only once it has had a delta, and goes on coasting after."""
    found = drive(rule, [7.0], [[0.0], [0.0], [1.0], [0.0]])
    assert found[0] == found[1] == [7.0]
    assert found[2][0] < 7.0
    assert found[3][0] < found[2][0]
    assert math.isfinite(found[3][0])


def test_a_whole_federation_takes_sign_steps() -> None:
    """One full-batch step of P2 from (1, -1): the averaged gradient is (4.5, -4.25)."""
    algorithm = Algorithm("sign", SGD(0.1), ReddiAdam(0.25, 0.0, 0.0, 0.0, 0.0))
    found = models(quadratic_task(P2, epochs=1), algorithm, rounds=1)
    expected = torch.tensor([[0.75, -0.75]], dtype=torch.float64)
    torch.testing.assert_close(found[0]["weight"], expected, rtol=0, atol=1e-12)


def test_constant_deltas_reach_the_rate() -> None:
    """A pseudo-gradient that never changes moves every coordinate by lr a round in the end."""
    found = drive(Adam(lr=0.1, eps=1e-12), [0.0, 0.0], [[5.0, -1e-3]] * 40)
    assert found[-1][0] - found[-2][0] == pytest.approx(-0.1, abs=1e-9)
    assert found[-1][1] - found[-2][1] == pytest.approx(0.1, abs=1e-9)


def test_state_starts_as_documented() -> None:
    params = Tree({"w": torch.ones(2), "b": torch.ones(3, 1)})
    corrected, published = Adam().init(params), ReddiAdam(tau=0.25).init(params)
    assert [float(corrected.second[n].max()) for n in params] == [0.0, 0.0]
    assert published.second["w"].tolist() == [0.0625, 0.0625]
    assert ReddiAdam(tau=0.25, v0=0.5).init(params).second["w"].tolist() == [0.5, 0.5]
    for state in (corrected, published):
        assert float(state.first["b"].abs().max()) == 0.0
        assert float(state.steps) == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedadam", {"client.lr": 0.1, "server.lr": 0.1, "server.eps": 1e-3}),
        (
            "fedadam:reddi",
            {"client.lr": 0.1, "server.lr": 0.1, "server.tau": 1e-3, "server.v0": None},
        ),
        ("fedzmg-adam", {"client.momentum": 0.9, "server.lr": 0.1, "server.eps": 1e-3}),
    ],
)
def test_defaults(name: str, options: dict[str, Any]) -> None:
    known = algorithms.get(name).options()
    wanted = options | {"server.beta1": 0.9, "server.beta2": 0.99, "weights": "examples"}
    assert {key: known[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adam(beta1=1.0), "beta1 = 1.0: expected a finite number >= 0 and < 1"),
        (lambda: Adam(beta2=-0.1), "beta2 = -0.1: expected a finite number >= 0 and < 1"),
        (lambda: Adam(lr=0.0), "lr = 0.0: expected a finite number > 0"),
        (lambda: ReddiAdam(tau=-1.0), "tau = -1.0: expected a finite number >= 0"),
        (lambda: ReddiAdam(v0=math.nan), "v0 = nan: expected a finite number >= 0"),
    ],
)
def test_ranges(make: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value) == message
