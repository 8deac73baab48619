"""Clipping and schedules: torch's own answers, properties, order, both engines, keys."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given as hypotheses
from hypothesis import strategies as st
from torch import nn

from fedzmg import Task, Trial, algorithms, simulate
from fedzmg.algorithms import SGD, Average, ZeroMean
from fedzmg.algorithms.options import configure, wrapper_options
from fedzmg.contract import Algorithm, ClientRule, Number, ParamInfo, chain, number
from fedzmg.errors import InputError
from fedzmg.messages import ClientContext, FullPass
from fedzmg.simulation import Simulation
from fedzmg.tree import Tree
from fedzmg.wrappers.clip import ClipNorm, ClipValue, clip_norm, clip_value
from fedzmg.wrappers.schedule import ClientSchedule, Schedule, ServerSchedule
from fedzmg.wrappers.wrapper import ServerDecay
from golden_problems import P2, make_context, models, quadratic_task, random_task


def tree(*values: list[float], dtype: torch.dtype = torch.float64) -> Tree:
    return Tree({f"w{i}": torch.tensor(v, dtype=dtype) for i, v in enumerate(values)})


def norm(grad: Tree) -> float:
    """Written out with Python's own hypotenuse, which does not overflow."""
    return math.hypot(*(float(v) for leaf in grad.values() for v in leaf.flatten()))


def step(rule: ClientRule, grad: Tree, round_: int = 1) -> Tree:
    """The step from the origin, so that its negative over the rate is what the rule saw."""
    context = make_context(grad.zeros())._replace(round=torch.tensor(round_))
    return rule.step(context, context.params, rule.begin(context, ()), grad)[0]


entries = st.floats(-1e6, 1e6).map(lambda v: 0.0 if abs(v) < 1e-9 else v)
gradients = st.tuples(
    st.lists(entries, min_size=1, max_size=5), st.lists(entries, min_size=1, max_size=3)
).map(lambda pair: tree(*pair))
bounds = st.floats(1e-3, 1e3)


# Clipping.


@hypotheses(gradients, bounds)
def test_clipping_against_torch(grad: Tree, bound: float) -> None:
    """``clip_grad_norm_`` divides by the norm and 1e-6, which is taken back here."""

    def clipped_by(function: Any) -> tuple[Any, list[Any]]:
        weights = [nn.Parameter(torch.zeros_like(leaf)) for leaf in grad.values()]
        for weight, leaf in zip(weights, grad.values(), strict=True):
            weight.grad = leaf.clone()
        return function(weights, bound), [weight.grad for weight in weights]

    long, theirs = clipped_by(nn.utils.clip_grad_norm_)
    assert float(long) == pytest.approx(norm(grad), rel=1e-12)
    ours = min(1.0, bound / long) if long > 0 else 1.0
    for leaf, other in zip(clip_norm(grad, bound).values(), theirs, strict=True):
        expected = other * (ours / min(1.0, bound / (long + 1e-6)))
        torch.testing.assert_close(leaf, expected, rtol=1e-9, atol=0)
    for leaf, other in zip(grad.values(), clipped_by(nn.utils.clip_grad_value_)[1], strict=True):
        assert torch.equal(clip_value(leaf, bound), other)
        assert torch.equal(clip_value(leaf, torch.tensor(bound, dtype=leaf.dtype)), other)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 3e37])
def test_squares_neither_overflow_nor_vanish(scale: float) -> None:
    """In single precision 1e20 squared is infinite and 1e-30 squared is zero."""
    grad = tree([3 * scale], [-4 * scale], dtype=torch.float32)
    clipped = clip_norm(grad, 0.5 * scale)
    assert clipped["w0"].item() == pytest.approx(0.3 * scale, rel=1e-5)
    assert clipped["w1"].item() == pytest.approx(-0.4 * scale, rel=1e-5)


def test_gradient_is_clipped_before_it_is_projected() -> None:
    """(3, 4) has norm 5: clipped to 1 and centred it is (-0.1, 0.1); centred first, (-0.5, 0.5)."""
    layout = {"w0": ParamInfo("kernel", (0,))}
    rule = ClipNorm(ZeroMean(SGD(1.0)), 1.0).for_layout(layout)
    assert (-step(rule, tree([3.0, 4.0]))["w0"]).tolist() == pytest.approx([-0.1, 0.1])


@pytest.mark.parametrize(
    ("wrap", "expected"), [(ClipNorm, [0.6, 0.8]), (ClipValue, [1.0, 1.0])], ids=["norm", "value"]
)
def test_gradient_of_a_full_pass_is_clipped_too(wrap: Any, expected: list[float]) -> None:
    @dataclass(frozen=True)
    class Keeps(ClientRule):
        def begin(self, context: ClientContext, full_pass: Any) -> Any:
            return full_pass.grad

        def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
            return params, scratch

    seen = wrap(Keeps(), 1.0).begin(
        make_context(tree([0.0, 0.0])), FullPass(torch.tensor(9.0), tree([3.0, 4.0]))
    )
    assert seen["w0"].tolist() == pytest.approx(expected)


# Schedules against torch.


def torchs(make: Any, rounds: int, lr: float = 0.3) -> list[float]:
    """The rates of a scheduler of torch, one step per round, over the first of them."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer)
    found = []
    for _ in range(rounds):
        found.append(optimizer.param_groups[0]["lr"] / lr)
        optimizer.step()
        scheduler.step()
    return found


def factors(schedule: Schedule, rounds: int, dtype: torch.dtype = torch.float64) -> list[float]:
    return [schedule.factor(torch.tensor(r), dtype).item() for r in range(1, rounds + 1)]


gammas = st.floats(0.1, 1.2)
ROUNDS = 25


@hypotheses(gammas, st.integers(1, 9))
def test_step_and_exponential_against_torch(gamma: float, every: int) -> None:
    rates = torch.optim.lr_scheduler
    for schedule, make in (
        (Schedule("step", every=every, gamma=gamma), lambda o: rates.StepLR(o, every, gamma)),
        (Schedule("exponential", gamma=gamma), lambda o: rates.ExponentialLR(o, gamma)),
    ):
        found = factors(schedule, ROUNDS)
        assert found == pytest.approx(torchs(make, ROUNDS), rel=1e-12)
        assert found[0] == 1.0


@hypotheses(st.integers(ROUNDS - 1, 60), st.one_of(st.none(), st.floats(0, 1)))
def test_cosine_against_torch(horizon: int, floor: float | None) -> None:
    lr = 0.3
    expected = torchs(
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, horizon, lr * (floor or 0.0)),
        ROUNDS,
        lr,
    )
    found = factors(Schedule("cosine", horizon=horizon, floor=floor), ROUNDS)
    # After the horizon torch's learning rate is zero, ours is not.
    compared = horizon if floor is None else ROUNDS
    assert found[:compared] == pytest.approx(expected[:compared], rel=1e-9, abs=1e-12)
    assert found[0] == 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("horizon", [1, 2, 3, 10, 1000])
def test_cosine_without_a_floor_falls_and_never_ends(horizon: int, dtype: torch.dtype) -> None:
    found = factors(Schedule("cosine", horizon=horizon), horizon + 2, dtype)
    assert found == sorted(found, reverse=True)
    assert found[horizon - 1] == found[-1] > 0


@pytest.mark.parametrize("name", ["scaffold", "fedgbo", "fedgbo:adam"])
def test_rules_that_divide_by_their_rate_outlast_a_cosine(name: str) -> None:
    options = {"client.schedule": "cosine", "client.horizon": 2}
    found = models(quadratic_task(P2), configure(algorithms.get(name), options), rounds=5)
    weights = [model["weight"] for model in found]
    assert all(bool(weight.isfinite().all()) for weight in weights)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(weights))


@pytest.mark.parametrize("schedule", [
    Schedule("step", every=1, gamma=0.5, floor=0.2),
    Schedule("exponential", gamma=0.5, floor=0.2),
])  # fmt: skip
def test_no_schedule_falls_below_its_floor(schedule: Schedule) -> None:
    assert factors(schedule, 5) == pytest.approx([1, 0.5, 0.25, 0.2, 0.2])


def test_steps_fall_on_whole_rounds_in_single_precision() -> None:
    """A quotient such as 3 / 3 must not come out below one."""
    for every in range(1, 40):
        found = factors(Schedule("step", every=every, gamma=0.5), 120, torch.float32)
        assert found == [0.5 ** (t // every) for t in range(120)]


# Schedules around rules.


@dataclass(frozen=True)
class Rateless(ClientRule):
    pace: Number = number(0.1, above=0, doc="not called lr")

    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        return params - self.pace * grad, scratch


@pytest.mark.parametrize(
    ("inner", "fields", "named"),
    [
        (Rateless(), {"schedule": "constant"}, "lr, which Rateless"),
        (ZeroMean(Rateless()), {"schedule": "exponential", "gamma": 0.5}, "lr, which Rateless"),
        (SGD(), {"schedule": "cosin", "horizon": 3}, "'cosin'.*'cosine'"),
        (SGD(), {"schedule": "step", "gamma": 0.5}, "needs every and gamma"),
        (SGD(), {"schedule": "cosine"}, "needs horizon"),
        (SGD(), {"schedule": "cosine", "gamma": 0.5, "horizon": 9}, "gamma = 0.5"),
        (SGD(), {"schedule": "constant", "floor": 0.5}, "floor = 0.5"),
        (SGD(), {"schedule": "step", "every": 2.5, "gamma": 0.5}, "every = 2.5"),
        (SGD(), {"schedule": "cosine", "horizon": 9.5}, "horizon = 9.5"),
        (SGD(), {"schedule": "step", "every": 0, "gamma": 0.5}, "every = 0"),
        (SGD(), {"schedule": "cosine", "horizon": 9, "floor": 1.5}, "floor = 1.5"),
    ],
)
def test_invalid_schedules_are_rejected(
    inner: ClientRule, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        ClientSchedule(inner, **fields)


# Whole federations.


@cache
def task() -> Task:
    return random_task(
        nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 4)), [3, 9, 5, 14, 6],
        inputs=6, classes=4, seed=5, shift=0.5, batch_size=4, epochs=2, cohort=3, rounds=4,
    )  # fmt: skip


def run(trials: list[Trial], engine: Any, **kwargs: Any) -> list[Tree]:
    histories = simulate(task(), trials, engine=engine, dtype=torch.float64, **kwargs)
    return [h.params for h in histories]


def simulation(trials: list[Trial], engine: Any = "sequential", **kwargs: Any) -> Simulation:
    return Simulation(
        task(), trials, rounds=4, device=torch.device("cpu"), dtype=torch.float64, engine=engine,
        **kwargs,
    )  # fmt: skip


def distance(a: Tree, b: Tree) -> float:
    return max(float((a[n] - b[n]).abs().max()) for n in a)


WRAPPED = {
    "client.clip_norm": 0.3,
    "client.clip_value": 0.1,
    "client.schedule": "step",
    "client.every": 2,
    "client.gamma": 0.25,
    "server.decay": 0.05,
    "server.schedule": "cosine",
    "server.horizon": 5,
    "server.floor": 0.1,
}


def test_scheduled_server_equals_learning_rates_set_by_hand() -> None:
    """Every round resumes from the last checkpoint with the learning rate of its round."""
    options = {"server.lr": 1.0, "server.schedule": "exponential", "server.gamma": 0.5}
    whole, kept = simulation([Trial(configure(algorithms.get("fedadam"), options))]), None
    for round_ in range(4):
        whole.run_round()
        plain = algorithms.get("fedadam").with_options({"server.lr": 0.5**round_})
        part = simulation([Trial(plain)], restored=kept)
        part.run_round()
        kept = [part.checkpoint(0)]
        assert distance(whole.snapshot.params, part.snapshot.params) < 1e-12


FAMILIES = (
    "adabest", "afl", "apfl", "ditto", "fedacg", "fedadap", "fedala", "fedbabu", "fedcada", "fedcm",
    "feddc", "feddyn", "fedexp", "fedgbo", "fedlc", "fedlion", "fedmuon", "fedmuon:local",
    "fednova", "fedntd", "fedper", "fedprox:adaptive", "fedrep", "fedsam", "fedspeed",
    "fedspeed:all", "fedzmg", "mfl", "mimelite", "mofedsam:cold-start", "moon", "perfedavg",
    "perfedavg:hf", "pfedme", "qfedavg", "scaffold",
)  # fmt: skip
"""An algorithm for every client rule."""
SOME_FAMILIES = [
    pytest.param(name, marks=[pytest.mark.slow] * (i % 4 > 0)) for i, name in enumerate(FAMILIES)
]
NEUTRAL = {
    "client.clip_norm": 1e6,
    "client.clip_value": 1e6,
    "client.schedule": "constant",
    "server.decay": 0.0,
    "server.schedule": "constant",
}


@pytest.mark.parametrize("name", SOME_FAMILIES)
def test_neutral_wrappers_change_nothing_or_are_refused_in_one_line(name: str) -> None:
    plain = algorithms.get(name)
    fitting = {key: NEUTRAL[key] for key in wrapper_options(plain) if key in NEUTRAL}
    for key in NEUTRAL.keys() - fitting.keys():
        with pytest.raises(InputError, match=name) as caught:
            configure(plain, {key: NEUTRAL[key]})
        assert "\n" not in str(caught.value)
    refused = any("clip" in rule.incompatible for rule in chain(plain.client))
    assert ("client.clip_norm" in fitting) is not refused
    [bare] = run([Trial(plain)], "vectorized", rounds=2)
    [inside] = run([Trial(configure(plain, fitting))], "vectorized", rounds=2)
    assert all(torch.equal(bare[n], inside[n]) for n in bare)


@pytest.mark.parametrize("name", SOME_FAMILIES)
def test_every_client_with_a_rate_can_be_scheduled(name: str) -> None:
    """Client schedules of every algorithm, two rounds: halving equals half the rate from then."""
    plain = algorithms.get(name)
    lr = plain.options()["client.lr"]
    rule = ClientSchedule(plain.client, "exponential", gamma=0.5)
    [loop] = run([Trial(replace(plain, client=rule))], "sequential", rounds=2)
    first = simulation([Trial(plain)])
    first.run_round()
    slower = Trial(plain.with_options({"client.lr": lr / 2}))
    second = simulation([slower], restored=[first.checkpoint(0)])
    second.run_round()
    assert distance(loop, second.checkpoint(0).params()) < 1e-12


# Keys.


def test_keys_wrap_in_the_right_order() -> None:
    found = configure(algorithms.get("fedzmg"), {"client.lr": 0.5, "weights": "uniform"} | WRAPPED)
    client = ClientSchedule(ZeroMean(SGD(0.5, 0.9, 5e-4)), "step", every=2, gamma=0.25)
    server = ServerSchedule(ServerDecay(Average(), 0.05), "cosine", horizon=5, floor=0.1)
    client = ClipValue(ClipNorm(client, 0.3), 0.1)  # type: ignore[assignment]
    assert found == Algorithm("fedzmg", client, server, weights="uniform")
    assert configure(algorithms.get("fedzmg"), found.options()) == found
    assert configure(found, {}) == found
    assert configure(found, {"client.clip_norm": 3.0}).options()["client.clip_norm"] == 3.0


def test_trials_take_the_keys() -> None:
    trial = Trial.of("fedavg", client_lr=0.2, client_clip_norm=1.0, server_schedule="constant")
    assert trial.algorithm.client == ClipNorm(SGD(0.2), 1.0)
    assert trial.algorithm.server == ServerSchedule(Average(), "constant")
    advised = replace(task(), options={"fedavg": {"client.lr": 0.3, "client.clip_norm": 9.0}})
    assert Trial.of("fedavg", task=advised).algorithm.client == ClipNorm(SGD(0.3), 9.0)
    mine = Trial.of("fedavg", task=advised, client_clip_norm=1.0)
    assert mine.algorithm.client == ClipNorm(SGD(0.3), 1.0)


def test_zero_mean_is_an_option_of_every_rule_that_can_be_projected() -> None:
    paper = {"client.momentum": 0.9, "client.decay": 5e-4}
    made = configure(algorithms.get("fedavg"), {"client.zero_mean": True} | paper)
    assert replace(made, name="fedzmg") == algorithms.get("fedzmg")
    assert configure(algorithms.get("fedavg"), made.options()) == made
    for engine in ("sequential", "vectorized"):
        [one], [other] = (
            run([Trial(a)], engine, rounds=2) for a in (made, algorithms.get("fedzmg"))
        )
        assert all(torch.equal(one[n], other[n]) for n in one)
    for name, info in algorithms.ALGORITHMS.items():
        plain, refused = info.algorithm, False
        for rule in chain(plain.client):
            refused |= "project" in rule.incompatible
        if refused:
            with pytest.raises(InputError, match="around"):
                configure(plain, {"client.zero_mean": True})
            assert "client.zero_mean" not in wrapper_options(plain)
            continue
        kinds = [type(rule) for rule in chain(configure(plain, {"client.zero_mean": True}).client)]
        assert kinds.count(ZeroMean) == 1, name
        if "client.project" not in plain.options():
            assert configure(plain, {"client.zero_mean": False}) == plain
            assert "client.zero_mean" in wrapper_options(plain)
    with pytest.raises(InputError, match=r"client\.project=none"):
        configure(algorithms.get("fedzmg"), {"client.zero_mean": False})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"client.zero_mean": "yes"}, "client.zero_mean = 'yes'"),
        ({"client.biases": "centred"}, "client.biases = 'centred'.*client.project=all"),
        ({"client.clipnorm": 1.0}, "'client.clipnorm'.*'client.clip_norm'"),
        ({"server.shedule": "step"}, "'server.shedule'.*'server.schedule'"),
        ({"client.lrr": 1.0}, "'client.lrr'.*'client.lr'"),
        ({"server.clip_norm": 1.0}, "'server.clip_norm' \\(known: "),
        ({"client.clip_norm": -1}, "clip_norm = -1"),
        ({"client.clip_value": "small"}, "clip_value = 'small'"),
        ({"server.decay": -1}, "decay = -1"),
        ({"client.horizon": 9}, "client.horizon = 9.*client.schedule=cosine"),
        ({"server.schedule": "cos"}, "'cos'.*'cosine'"),
        ({"server.schedule": 3}, "'3'"),
        ({"client.schedule": "exponential"}, "gamma"),
    ],
)
def test_wrong_keys_are_rejected_in_one_line(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named) as caught:
        configure(algorithms.get("fedavg"), options)
    assert "\n" not in str(caught.value)


@dataclass(frozen=True)
class Geared(SGD):
    """A rule with a number that a schedule has, too."""

    gamma: Number = number(0.5, low=0, below=1, doc="gear")


def test_a_key_never_means_two_things() -> None:
    geared = Algorithm("geared", Geared(), Average())
    assert configure(geared, {"client.gamma": 0.2}).client == Geared(gamma=0.2)
    with pytest.raises(InputError, match=r"client\.gamma"):
        configure(geared, {"client.schedule": "cosine", "client.horizon": 9})
