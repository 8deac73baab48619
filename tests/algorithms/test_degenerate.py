"""Degenerate cases: pairs of algorithms that train the same models, also inside wrappers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from known_answers import close, named, simulation
from torch import nn

import fedzmg
from fedzmg.algorithms import SGD, Average, Prox
from fedzmg.algorithms.feddc import Drift
from fedzmg.algorithms.fedgbo import FedGBOServer, FrozenSteps
from fedzmg.algorithms.options import configure
from fedzmg.contract import Algorithm, ServerRule
from fedzmg.messages import Cohort
from fedzmg.tree import Tree, row
from golden_problems import P2, dense_task, models, quadratic_task, random_task


def classes(outputs: int = 3, dropout: float = 0.0, **settings: Any) -> fedzmg.Task:
    """Three clients; a hidden layer, the features, and a layer of scores."""
    hidden = [nn.Tanh(), nn.Dropout(dropout)] if dropout else [nn.Tanh()]
    net = nn.Sequential(nn.Linear(5, 4), *hidden, nn.Linear(4, outputs))
    protocol = {"cohort": 3, "batch_size": 4, "epochs": 2} | settings
    return random_task(net, [9, 5, 7], inputs=5, classes=outputs, seed=3, **protocol)


def every_class_equally() -> fedzmg.Task:
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(4))
    y, owners = torch.arange(12) % 3, [i // 6 for i in range(12)]
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return fedzmg.Task.from_arrays(net, x, y, owners, test=(x, y), cohort=2, batch_size=4)


@dataclass(frozen=True)
class NoDrift(ServerRule):
    """FedDC's server without the drift that it adds."""

    pairing = "feddc"

    def init(self, params: Tree) -> Drift:
        return Drift(params.zeros(), params.zeros())

    def share(self, state: Drift) -> Tree:
        return state.state

    def update(self, params: Tree, state: Drift, cohort: Cohort) -> tuple[Tree, Drift]:
        total = state.state + cohort.total / cohort.population
        return params - cohort.delta, Drift(state.drift, total)


class Pair(NamedTuple):
    """Two algorithms on a task, or each on its own; ``unfit``: wrappers that part them."""

    left: Algorithm
    right: Algorithm
    task: fedzmg.Task
    other: fedzmg.Task | None = None
    rounds: int = 3
    exact: bool = False
    unfit: tuple[str, ...] = ()


ALL, SOME, FULL = classes(), classes(cohort=2), classes(cohort=2, batch_size=9)
LONG, LONGEST = (classes(cohort=2, batch_size=9, epochs=epochs) for epochs in (4, 6))
SQUARE, DROPPED = quadratic_task(P2), classes(cohort=2, dropout=0.2)
UNIFORM, NOBODY = {"weights": "uniform"}, {"parts_personal": ()}
FEDAVG, AVERAGE = named("fedavg"), named("fedavg", **UNIFORM)
FEDDYN, HALF = named("feddyn", client_alpha=0.5), {"client_lam": 2.0}
LAST = {"server_output": "last"}
NOVA = {"client_momentum": 0.9, "client_mu": 0.5, "client_tau": "norm"}
PULLED = Algorithm("pulled", Prox(SGD(0.1, momentum=0.9), mu=0.5), Average())
REPTILE = {"client_lam": 10.0, "client_personal_lr": 0.1, "client_inner_steps": 1}
FIXED = {"client_alpha": 0.0, "client_adapt": "never"}
DRIFTLESS = replace(named("feddc", client_alpha=0.0), server=NoDrift())
STILL = {"client_factor": 1.0, "client_patience": 1e9}
BARE = Algorithm("bare", FrozenSteps(0.1), FedGBOServer(), weights="uniform")
SPEED = named("fedspeed", client_alpha=None, **HALF)
PAIRS: dict[str, Pair] = {
    "adabest, mu and beta 0": Pair(
        named("adabest", client_mu=0.0, server_beta=0.0), AVERAGE, SOME
    ),
    "afl, fixed mixture": Pair(named("afl", server_mixture_lr=0.0), AVERAGE, SOME),
    "afl, fixed mixture, factors": Pair(
        named("afl", server_mixture_lr=0.0, server_rule="exponential"), AVERAGE, SOME
    ),
    "afl, all present": Pair(named("afl", server_sampled="unbiased"), named("afl"), ALL),
    "apfl, common model": Pair(named("apfl"), FEDAVG, SOME, exact=True),
    "ditto, common model": Pair(named("ditto"), FEDAVG, SOME, exact=True),
    "fedacg, no momentum": Pair(
        named("fedacg", server_beta=0.0, client_mu=0.5),
        named("fedprox", **UNIFORM, client_mu=0.5),
        SOME,
    ),
    "fedacg, neither": Pair(named("fedacg", server_beta=0.0, client_mu=0.0), AVERAGE, SOME),
    "fedadap, never bad": Pair(named("fedadap", **STILL), FEDAVG, DROPPED, exact=True),
    "fedala, fixed weights": Pair(named("fedala", client_weight_lr=0.0), FEDAVG, FULL),
    "fedala, first round": Pair(named("fedala"), FEDAVG, FULL, rounds=1),
    "fedams, large eps": Pair(
        named("fedams", server_eps=1e6, server_lr=1e3),
        named("fedavgm", **UNIFORM, server_beta=0.9, server_lr=0.1),
        SQUARE,
        rounds=4,
    ),
    "fedams, rising moment": Pair(
        named("fedams:amsgrad"),
        named("fedadam:reddi", **UNIFORM, server_tau=1e-3, server_v0=0.0),
        SQUARE,
        rounds=4,
        unfit=("client.clip_norm", "client.schedule"),
    ),
    "fedbabu, nothing frozen": Pair(named("fedbabu", parts_frozen=()), FEDAVG, SOME, exact=True),
    "fedcm, alpha 1": Pair(named("fedcm", client_alpha=1.0), AVERAGE, SOME),
    "feddc, first round": Pair(
        named("feddc", client_alpha=0.0), named("fedavg", **UNIFORM, server_lr=2.0), ALL, rounds=1
    ),
    "feddc, states": Pair(named("feddc"), named("feddc", client_state="last"), SOME, rounds=2),
    "feddc, no drift": Pair(DRIFTLESS, named("scaffold"), SOME),
    "fedexp, large eps": Pair(named("fedexp", **LAST, server_eps=1e9), AVERAGE, SOME),
    "fedexp, bounded": Pair(named("fedexp", **LAST, server_highest=1.0), AVERAGE, SOME),
    "fedexp, one client": Pair(named("fedexp", **LAST), AVERAGE, classes(cohort=1)),
    "fedgbo, beta 0": Pair(named("fedgbo", server_beta1=0.0), AVERAGE, DROPPED, exact=True),
    "fedgbo, no moments": Pair(BARE, AVERAGE, DROPPED, exact=True),
    "fedlc, tau 0": Pair(named("fedlc", client_tau=0.0, client_absent="counted"), FEDAVG, SOME),
    "fedlc, equal counts": Pair(named("fedlc", client_tau=0.7), FEDAVG, every_class_equally()),
    "fedmuon, first round": Pair(
        named("fedmuon", client_alpha=0.0), named("fedmuon:local"), SOME, rounds=1, exact=True
    ),
    "fednova, equal steps": Pair(named("fednova", **NOVA), PULLED, FULL),
    "fednova, zeros": Pair(
        named("fednova", client_momentum=0.0, client_mu=0.0, server_beta=0.0), FEDAVG, FULL
    ),
    "fedntd, beta 0": Pair(named("fedntd", client_beta=0.0), FEDAVG, SOME),
    "fedntd, two classes": Pair(named("fedntd"), FEDAVG, classes(2)),
    "fedntd, one step": Pair(named("fedntd"), FEDAVG, classes(batch_size=9, epochs=1)),
    "fedper, nothing personal": Pair(named("fedper", **NOBODY), FEDAVG, SOME, exact=True),
    "lg-fedavg, nothing personal": Pair(named("lg-fedavg", **NOBODY), AVERAGE, SOME, exact=True),
    "fedprox, mu 0": Pair(named("fedprox", client_mu=0.0), FEDAVG, SOME, exact=True),
    "fedprox:adaptive, change 0": Pair(
        named("fedprox:adaptive", server_start=0.5, server_change=0.0),
        named("fedprox", client_mu=0.5), SOME,
    ),
    "fedrep, no head epochs": Pair(
        named("fedrep", client_head_epochs=0), named("fedbabu"), SOME, exact=True,
        unfit=("client.clip_norm",),
    ),
    "fedsam, rho 0": Pair(named("fedsam", client_rho=0.0), FEDAVG, SOME, exact=True),
    "fedspeed, no alpha": Pair(SPEED, FEDDYN, ALL),
    "fedspeed, alpha 0": Pair(named("fedspeed", client_alpha=0.0, **HALF), FEDDYN, ALL),
    "fedspeed, rho 0": Pair(named("fedspeed", client_rho=0.0, **HALF), FEDDYN, ALL),
    "fedspeed, all present": Pair(named("fedspeed"), named("fedspeed:all"), ALL),
    "fedspeed, some present": Pair(
        named("fedspeed:all", client_alpha=None, **HALF), FEDDYN, SOME
    ),
    "gc-fed, one layer": Pair(
        named("gc-fed"), named("global-gc"), dense_task(), exact=True, unfit=("client.zero_mean",)
    ),
    "mfl, gamma 0": Pair(named("mfl", client_momentum=0.0), FEDAVG, DROPPED, exact=True),
    "mfl:averaging, beta 0": Pair(
        named("mfl:averaging", client_momentum=0.0), AVERAGE, DROPPED, exact=True
    ),
    "mimelite, beta 0": Pair(named("mimelite", server_beta=0.0), AVERAGE, SOME),
    "mimelite, first round": Pair(
        named("mimelite", server_beta=0.75), named("fedavg", **UNIFORM, client_lr=0.025), SOME,
        rounds=1,
    ),
    "mofedsam, rho 0": Pair(named("mofedsam", client_rho=0.0), named("fedcm"), SOME),
    "mofedsam, alpha 1": Pair(
        named("mofedsam", client_alpha=1.0), named("fedsam", **UNIFORM), SOME
    ),
    "mofedsam, cold start": Pair(
        named("mofedsam:cold-start"), named("fedsam", **UNIFORM), SOME, rounds=1
    ),
    "moon, mu 0": Pair(named("moon", client_mu=0.0), FEDAVG, SOME),
    "moon, first round": Pair(named("moon"), FEDAVG, SOME, rounds=1),
    "perfedavg, alpha 0": Pair(named("perfedavg", client_alpha=0.0), AVERAGE, LONG, FULL),
    "perfedavg:hf, alpha 0": Pair(named("perfedavg:hf", client_alpha=0.0), AVERAGE, LONGEST, FULL),
    "pfedme, one step": Pair(
        named("pfedme", **REPTILE), FEDAVG, SOME, unfit=("client.schedule",)
    ),
    "qfedavg, q 0": Pair(named("qfedavg", client_q=0.0), AVERAGE, SOME),
    "qfedavg, q 0 by examples": Pair(
        named("qfedavg", client_q=0.0, client_shares="examples"), FEDAVG, SOME
    ),
    "scaffold, first round": Pair(named("scaffold"), AVERAGE, SOME, rounds=1),
    "scaffold:option-1, first round": Pair(named("scaffold:option-1"), AVERAGE, SOME, rounds=1),
}  # fmt: skip
WRAPPED = {
    "client.zero_mean": True,
    "client.clip_norm": 0.05,
    "client.schedule": "exponential",
    "client.gamma": 0.5,
}


def wrapped(pair: Pair) -> Pair:
    options = {k: v for k, v in WRAPPED.items() if k not in pair.unfit}
    if "client.schedule" in pair.unfit:
        del options["client.gamma"]
    return pair._replace(left=configure(pair.left, options), right=configure(pair.right, options))


@pytest.mark.parametrize("inside", ["alone", pytest.param("wrapped", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", PAIRS)
def test_degenerate_cases(case: str, inside: str) -> None:
    pair = PAIRS[case] if inside == "alone" else wrapped(PAIRS[case])
    sides = (pair.left, pair.task), (pair.right, pair.other or pair.task)
    found = [models(task, a, engine="vectorized", rounds=pair.rounds) for a, task in sides]
    for a, b in zip(*found, strict=True):
        for name, leaf in b.items():
            close(a[name], leaf, 0.0 if pair.exact else 1e-12)
    start = pair.task.model.params()
    assert max(float((found[0][-1][n] - leaf).abs().max()) for n, leaf in start.items()) > 1e-3


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_personal_models_in_the_limits(engine: str) -> None:
    """Ditto without a pull and APFL with its own model alone are local training."""
    local, own = (
        named("ditto", client_lam=0.0),
        named("apfl", client_alpha=1.0, client_adapt="never"),
    )
    found = {}
    for algorithm in (local, own, named("apfl", **FIXED)):
        sim = simulation(SOME, algorithm, engine=engine)
        for _ in range(3):
            sim.run_round()
        rule, params = algorithm.client, row(sim.snapshot.params, 0)
        memory = sim.memory.of_trial(0)
        found[algorithm] = params, {k: rule.personal_model(params, m) for k, m in memory.items()}
    common, mixed = found[named("apfl", **FIXED)]
    for client, model in found[local][1].items():
        close(model["0.weight"], found[own][1][client]["0.weight"], 1e-12)
        close(mixed[client]["0.weight"], common["0.weight"], 1e-12)
