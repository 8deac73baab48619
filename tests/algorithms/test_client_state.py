"""FedProx and the algorithms whose clients or servers remember: limits and invariants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from known_answers import ENGINES, close, named, simulation
from torch import Tensor

from fedzmg.algorithms import SGD, Average, ZeroMean, zero_mean
from fedzmg.algorithms.fedprox import AdaptiveMu, Prox
from fedzmg.algorithms.scaffold import Scaffold, ScaffoldServer
from fedzmg.contract import Algorithm
from fedzmg.messages import Cohort
from fedzmg.simulation import Simulation
from fedzmg.tree import Tree, row
from golden_problems import P2, P3, make_context, models, quadratic_task

CLIENTS = ["A", "B"]
VARIATES = ["path", "start"]


MANY: dict[str, Any] = {
    "H": {"A": [1.0, 2.0], "B": [3.0, 1.0], "C": [2.0, 2.5], "D": [0.5, 4.0], "E": [1.5, 1.0]},
    "c": {"A": [1.0, 3.0], "B": [-1.0, 2.0], "C": [0.0, -2.0], "D": [4.0, 1.0], "E": [2.0, 2.0]},
    "n": {"A": 10, "B": 30, "C": 40, "D": 70, "E": 5},
    "w0": [1.0, -1.0],
    "local_steps": 2,
}
"""Five clients; with batches of 30 they do 2, 2, 4, 6 and 2 steps a round."""


def rounds(sim: Simulation, count: int) -> Iterator[int]:
    for round_ in range(1, count + 1):
        sim.run_round()
        yield round_


def weight(sim: Simulation) -> Tensor:
    return sim.snapshot.params["weight"][0, 0]


def memory(sim: Simulation, client: int) -> Any:
    return row(sim.memory.read([(0, client)]), 0)


def tensors(values: dict[str, list[float]]) -> Tensor:
    """A golden problem's curvatures or centres, a row per client."""
    return torch.tensor(list(values.values()), dtype=torch.float64)


def optimum(problem: dict[str, Any]) -> Tensor:
    """Return the model at which the mean of the clients' gradients is zero."""
    curvature, centre = tensors(problem["H"]), tensors(problem["c"])
    return (curvature * centre).sum(0) / curvature.sum(0)


# FedProx


def test_prox_term_is_inside_the_momentum_buffer() -> None:
    rule = Prox(SGD(lr=0.1, momentum=0.9), mu=0.5)
    sent = Tree({"weight": torch.tensor([1.0, -1.0], dtype=torch.float64)})
    grad = Tree({"weight": torch.tensor([2.0, 3.0], dtype=torch.float64)})
    params, scratch = sent, rule.begin(make_context(sent), ())
    w, v = sent["weight"], torch.zeros(2, dtype=torch.float64)
    for _ in range(4):
        params, scratch = rule.step(make_context(sent), params, scratch, grad)
        v = 0.9 * v + grad["weight"] + 0.5 * (w - sent["weight"])
        w = w - 0.1 * v
        close(params["weight"], w, 1e-14)
        close(scratch["weight"], v, 1e-14)


@pytest.mark.parametrize("engine", ENGINES)
def test_projected_prox_pulls_column_sums_back(engine: str) -> None:
    """Decay shrinks the sum of a projected column; only a pull that is not projected resists."""
    algorithm = Algorithm("pulled", ZeroMean(Prox(SGD(0.1, decay=0.5), mu=2.0)), Average())
    total = sum(P3["w0"])
    for model in models(quadratic_task(P3), algorithm, engine=engine):
        centre = total
        for _ in range(P3["local_steps"]):
            total = total * (1 - 0.5 * 0.1) - 0.1 * 2.0 * (total - centre)
        close(model["weight"].sum(), total, 1e-12)
    with pytest.raises(ValueError, match="Prox around ZeroMean"):
        Algorithm("projected", Prox(ZeroMean(SGD(0.1)), mu=2.0), Average())


def pulls(losses: list[float], **fields: Any) -> list[float]:
    """The strengths that a server sends after each of these losses."""
    rule = AdaptiveMu(**fields)
    params = Tree({"weight": torch.zeros(2, dtype=torch.float64)})
    state, found = rule.init(params), []
    for i, loss in enumerate(losses):
        average = (torch.tensor(loss, dtype=torch.float64), ())
        one = torch.tensor(1)
        cohort = Cohort(params, average, (), one, one, torch.tensor(i + 1))
        _, state = rule.update(params, state, cohort)
        found.append(float(rule.share(state)[0]))
    return found


def test_adaptive_strength_follows_the_loss() -> None:
    # The first loss has nothing to be compared with; the second improvement in a row lowers.
    assert pulls([5, 4, 3, 2], patience=2.0) == pytest.approx([1.0, 1.0, 0.9, 0.8])
    # A rise raises and begins the count anew; a tie only begins it anew.
    assert pulls([5, 4, 6, 5, 4, 4, 3, 2], start=0.5, patience=2.0) == pytest.approx(
        [0.5, 0.5, 0.6, 0.6, 0.5, 0.5, 0.5, 0.4]
    )
    assert pulls([1, 2, 3, 4], start=0.85) == pytest.approx([0.85, 0.95, 1.0, 1.0])
    assert pulls([4, 3, 2, 1], start=0.15, patience=1.0) == pytest.approx([0.15, 0.05, 0.0, 0.0])
    assert pulls([9, 8, 7, 6, 5, 4, 3]) == pytest.approx([1.0] * 5 + [0.9, 0.8])
    assert pulls([1, 1e9], start=0.0) == pytest.approx([0.0, 0.1])


@pytest.mark.parametrize("engine", ENGINES)
def test_adaptive_end_to_end(engine: str) -> None:
    """The loss is the weighted objective at the model that was sent; the pull then follows it."""
    sim = simulation(quadratic_task(P2), named("fedprox:adaptive"), engine=engine)
    curvature, centre = tensors(P2["H"]), tensors(P2["c"])
    share = torch.tensor([[0.25], [0.75]], dtype=torch.float64)
    mu, w, losses = 1.0, torch.tensor(P2["w0"], dtype=torch.float64), []
    for _ in rounds(sim, 8):
        losses.append(float((share * 0.5 * curvature * (w - centre) ** 2).sum()))
        local = w.expand(2, 2)
        for _ in range(2):
            local = local - 0.1 * (curvature * (local - centre) + mu * (local - w))
        w = (share * local).sum(0)
        close(weight(sim), w)
        assert float(sim.snapshot.state.loss) == pytest.approx(losses[-1], abs=1e-9)
        mu = pulls(losses)[-1]
        assert float(sim.snapshot.state.mu) == pytest.approx(mu, abs=1e-12)
    assert mu == pytest.approx(0.7)


# SCAFFOLD


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("variate", VARIATES)
def test_mean_of_the_variates_is_the_servers(variate: Any, engine: str) -> None:
    """Two of five clients a round, with different numbers of steps; the rest count with zero."""
    algorithm = Algorithm("scaffold", Scaffold(0.05, variate), ScaffoldServer(), weights="uniform")
    sim = simulation(quadratic_task(MANY), algorithm, engine=engine)
    seen: set[int] = set()
    for round_ in rounds(sim, 6):
        seen |= {e.client for e in sim.planner.batches(round_)}
        own = torch.stack([memory(sim, k)["weight"] for k in range(5)])
        close(own.mean(0), sim.snapshot.state["weight"][0], 1e-12)
        assert {k for k in range(5) if bool(own[k].any())} == seen
        assert set(sim.memory.of_trial(0)) == seen
        if round_ == 1:
            assert seen != set(range(5))
    assert sim.snapshot.state["weight"].abs().max() > 0.1


def test_two_quadratics() -> None:
    """Clients of different curvature: FedAvg settles beside the optimum, where it must."""
    task, best = quadratic_task(P2), optimum(P2)
    # A client closes this share of its distance to its own optimum in a round's two steps.
    closed = 1 - (1 - 0.2 * tensors(P2["H"])) ** 2
    biased = (closed * tensors(P2["c"])).sum(0) / closed.sum(0)
    assert (biased - best).abs().min() > 0.02
    for limit, algorithm in (
        (biased, named("fedavg", weights="uniform", client_lr=0.2)),
        (best, named("scaffold", client_lr=0.2)),
        (best, named("scaffold:option-1", client_lr=0.2)),
        (best, named("feddyn", client_lr=0.2, client_alpha=2.0)),
    ):
        sim = simulation(task, algorithm)
        for _ in rounds(sim, 50):
            pass
        close(weight(sim), limit)


def projected_scaffold(variate: str, who: list[list[str]]) -> Iterator[tuple[Tensor, Any, Any]]:
    """SCAFFOLD on P3 that projects the corrected gradient and keeps variates as they are."""
    w = torch.tensor(P3["w0"], dtype=torch.float64)
    own = {k: torch.zeros(3, dtype=torch.float64) for k in CLIENTS}
    common = torch.zeros(3, dtype=torch.float64)
    for present in who:
        ends, change = [], torch.zeros(3, dtype=torch.float64)
        for k in present:
            curvature, centre = (torch.tensor(P3[f][k], dtype=torch.float64) for f in ("H", "c"))
            y, slopes = w, []
            for _ in range(P3["local_steps"]):
                slopes.append(curvature * (y - centre))
                y = y - 0.1 * zero_mean(slopes[-1] - own[k] + common, (0,))
            new = slopes[0] if variate == "start" else torch.stack(slopes).mean(0)
            change = change + (new - own[k])
            own[k] = new
            ends.append(y)
        w, common = torch.stack(ends).mean(0), common + change / 2
        yield w, common, dict(own)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("variate", VARIATES)
def test_zero_mean_scaffold_projects_the_variates(variate: Any, engine: str) -> None:
    who = [["A"], ["B"], ["A", "B"], ["B"]]
    client = ZeroMean(Scaffold(0.1, variate))
    algorithm = Algorithm("zmg-scaffold", client, ScaffoldServer(), weights="uniform")
    sim = simulation(quadratic_task(P3), algorithm, engine=engine, participants=who)
    reference = projected_scaffold(variate, who)
    for _ in rounds(sim, len(who)):
        w, common, own = next(reference)
        close(weight(sim), w)
        close(weight(sim).sum(), sum(P3["w0"]), 1e-12)
        close(sim.snapshot.state["weight"], zero_mean(common, (0,)))
        for i, k in enumerate(CLIENTS):
            close(memory(sim, i)["weight"], zero_mean(own[k], (0,)))
