"""FedProx and the algorithms whose clients or servers remember: known answers and invariants.

Numbers in ``golden/client_state.json`` are traces on the two-client problem of ``golden_problems``,
worked out apart from the library, some with clients that skip rounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from known_answers import DTYPES, ENGINES, close, named
from torch import Tensor

import fedzmg
from fedzmg.algorithms import SGD, Average, ZeroMean, zero_mean
from fedzmg.algorithms.adabest import AdaBest, Bias
from fedzmg.algorithms.fedprox import AdaptiveMu, Prox, ServerSetProx
from fedzmg.algorithms.scaffold import Scaffold, ScaffoldServer
from fedzmg.contract import Algorithm, ClientContext, Cohort, FullPass
from fedzmg.data.plan import ClientBatch
from fedzmg.simulation import RoundPlanner, Simulation
from fedzmg.tree import Tree, leaves, row
from golden_problems import P2, P3, TOLERANCE, make_context, models, quadratic_task

STORED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "client_state.json").read_text()
)
CLIENTS = ["A", "B"]
VARIATES = ["path", "start"]


GOLDEN_ENTRIES: dict[str, Algorithm] = {
    "fedprox": named("fedprox", client_mu=0.5),
    "scaffold_option2": named("scaffold"),
    "scaffold_option1": named("scaffold:option-1"),
    "scaffold_option2_partial": named("scaffold"),
    "feddyn": named("feddyn", client_alpha=0.1),
    "feddyn_partial": named("feddyn", client_alpha=0.1),
    "mimelite_momentum": named("mimelite", server_beta=0.9),
    "adabest": named("adabest", client_mu=0.1, server_beta=0.8),
    "adabest_partial": named("adabest", client_mu=0.1, server_beta=0.8),
}

MANY: dict[str, Any] = {
    "H": {"A": [1.0, 2.0], "B": [3.0, 1.0], "C": [2.0, 2.5], "D": [0.5, 4.0], "E": [1.5, 1.0]},
    "c": {"A": [1.0, 3.0], "B": [-1.0, 2.0], "C": [0.0, -2.0], "D": [4.0, 1.0], "E": [2.0, 2.0]},
    "n": {"A": 10, "B": 30, "C": 40, "D": 70, "E": 5},
    "w0": [1.0, -1.0],
    "local_steps": 2,
}
"""Five clients; with batches of 30 they do 2, 2, 4, 6 and 2 steps a round."""


def simulation(
    task: fedzmg.Task,
    algorithm: Algorithm,
    *,
    engine: Any = "sequential",
    dtype: torch.dtype = torch.float64,
    who: list[list[str]] | None = None,
    cohort: int | None = None,
) -> Simulation:
    """``who`` names the participants of each round; the rest of the cohort is sent home."""
    protocol = replace(task.protocol, cohort=cohort or task.protocol.cohort, eval_every=1000)
    task = replace(task, protocol=protocol)

    class Chosen(RoundPlanner):
        def batches(self, round_: int) -> list[ClientBatch]:
            batches = super().batches(round_)
            return [b for b in batches if who is None or CLIENTS[b.client] in who[round_ - 1]]

    return Simulation(
        task,
        [fedzmg.Trial(algorithm)],
        rounds=1000,
        device=torch.device("cpu"),
        dtype=dtype,
        engine=engine,
        planner=Chosen(task, [0]),
    )


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


def check_state(name: str, expected: dict[str, Any], state: Any, memories: dict[str, Any]) -> None:
    """Everything that a stored round says about server and clients."""
    if name.startswith("scaffold"):
        close(state["weight"], expected["c"])
        for client, value in expected["c_i"].items():
            close(memories[client]["weight"], value)
    elif name.startswith("feddyn"):
        close(0.1 * state["weight"], expected["h"])
        for client, value in expected["h_k"].items():
            close(memories[client]["weight"], value)
    elif name.startswith("mimelite"):
        close(state["weight"], expected["m"])
    elif name.startswith("adabest"):
        close(state["weight"], expected["w_bar"])
        w = torch.tensor(expected["w"], dtype=torch.float64)
        close(state["weight"].flatten() - w, expected["h_server"])
        for client, value in expected["h_i"].items():
            close(memories[client].estimate["weight"], value)
    else:
        assert name == "fedprox"
        assert leaves((state, list(memories.values()))) == []


def test_every_stored_trace_is_used() -> None:
    assert set(STORED) == set(GOLDEN_ENTRIES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", GOLDEN_ENTRIES)
def test_model_and_state_after_every_round(name: str, engine: str, dtype: torch.dtype) -> None:
    stored = STORED[name]["rounds"]
    who = [r.get("participants", CLIENTS) for r in stored]
    sim = simulation(quadratic_task(P2), GOLDEN_ENTRIES[name], engine=engine, dtype=dtype, who=who)
    last = dict.fromkeys(CLIENTS, 0)
    for round_ in rounds(sim, len(stored)):
        expected = stored[round_ - 1]
        assert weight(sim).dtype == dtype
        close(weight(sim), expected["w"], TOLERANCE[dtype])
        last |= dict.fromkeys(who[round_ - 1], round_)
        if dtype == torch.float64:
            memories = {c: memory(sim, i) for i, c in enumerate(CLIENTS)}
            check_state(name, expected, row(sim.snapshot.state, 0), memories)
            if name.startswith("adabest"):
                assert {c: int(m.round) for c, m in memories.items()} == last


def combined(factors: list[float], parts: list[Any]) -> Any:
    """Trees times factors, added up; nothing of nothings."""
    if parts[0] == ():
        return ()
    return sum((f * part for f, part in zip(factors, parts, strict=True)), parts[0].zeros())


@pytest.mark.parametrize("name", GOLDEN_ENTRIES)
def test_rules_by_hand(name: str) -> None:
    """No engine: the rules' own methods give the stored local iterates, models and state."""
    algorithm = GOLDEN_ENTRIES[name]
    client, server = algorithm.client, algorithm.server
    params = Tree({"weight": torch.tensor([P2["w0"]], dtype=torch.float64)})
    state, memories = server.init(params), {c: client.init_memory(params) for c in CLIENTS}
    for expected in STORED[name]["rounds"]:
        stamp, uploads, weights = torch.tensor(expected["round"]), [], []
        for owner, iterates in expected["local_iterates"].items():
            count = torch.tensor(P2["n"][owner])
            context = ClientContext(params, server.share(state), memories[owner], stamp, count)
            curvature, centre = (
                torch.tensor([P2[k][owner]], dtype=torch.float64) for k in ("H", "c")
            )

            def slope(w: Tree, h: Tensor = curvature, c: Tensor = centre) -> Tree:
                return w.map(lambda leaf: h * (leaf - c))

            wanted = client.full_pass != "never"
            full_pass = (
                FullPass(torch.zeros((), dtype=torch.float64), slope(params)) if wanted else ()
            )
            local, scratch = params, client.begin(context, full_pass)
            for iterate in iterates:
                local, scratch = client.step(context, local, scratch, slope(local))
                close(local["weight"], iterate)
            upload, memories[owner] = client.finish(
                context, local, scratch, torch.tensor(len(iterates))
            )
            uploads.append(upload)
            weights.append(float(count) if algorithm.weights == "examples" else 1.0)
        shares = [w / sum(weights) for w in weights]
        total = combined([1.0] * len(uploads), [u.total for u in uploads])
        average = combined(shares, [u.average for u in uploads])
        delta = combined(shares, [u.delta for u in uploads])
        size, everybody = torch.tensor(len(uploads)), torch.tensor(2)
        cohort = Cohort(delta, average, total, size, everybody, stamp)
        params, state = server.update(params, state, cohort)
        close(params["weight"], expected["w"])
        check_state(name, expected, state, memories)


SLOW = named("fedavg", weights="uniform", client_lr=0.025)
UNIFORM = named("fedavg", weights="uniform")
STILL = named("fedprox:adaptive", server_start=0.5, server_change=0.0)
DEGENERATE: dict[str, tuple[Any, Algorithm, Algorithm, int]] = {
    "fedprox, mu 0": (P2, named("fedprox", client_mu=0.0), named("fedavg"), 2),
    "adaptive fedprox, change 0": (P2, STILL, named("fedprox", client_mu=0.5), 4),
    "scaffold, first round": (MANY, named("scaffold"), UNIFORM, 1),
    "scaffold option 1, first round": (MANY, named("scaffold:option-1"), UNIFORM, 1),
    "mimelite, beta 0": (MANY, named("mimelite", server_beta=0.0), UNIFORM, 3),
    "mimelite, first round": (MANY, named("mimelite", server_beta=0.75), SLOW, 1),
    "adabest, mu and beta 0": (
        MANY, named("adabest", client_mu=0.0, server_beta=0.0), UNIFORM, 4
    ),
}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_cases(case: str, engine: str) -> None:
    problem, algorithm, simpler, count = DEGENERATE[case]
    one, other = (
        models(quadratic_task(problem), a, engine=engine, rounds=count)
        for a in (algorithm, simpler)
    )
    for a, b in zip(one, other, strict=True):
        close(a["weight"], b["weight"], 0 if case.startswith("fedprox") else 1e-12)


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


def test_adaptive_hands_everything_else_on() -> None:
    """State, uploads and memory of the rule inside are forwarded unchanged."""
    task, nested = quadratic_task(P2), named("scaffold:option-1")
    client, server = ServerSetProx(nested.client), AdaptiveMu(nested.server, start=0.0, change=0.0)
    assert client.full_pass == "start"
    both = Algorithm("both", client, server, weights="uniform")
    ours, theirs = simulation(task, both), simulation(task, nested)
    for _ in range(3):
        ours.run_round()
        theirs.run_round()
        close(weight(ours), weight(theirs), 1e-12)
        close(ours.snapshot.state.inner["weight"], theirs.snapshot.state["weight"], 1e-12)
        close(memory(ours, 1)["weight"], memory(theirs, 1)["weight"], 1e-12)


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


@pytest.mark.parametrize("engine", ENGINES)
def test_variate_from_the_path_counts_the_steps_that_were_done(engine: str) -> None:
    """In the first round it is the mean of the gradients along the client's own path."""
    sim = simulation(quadratic_task(MANY), named("scaffold"), engine=engine, cohort=5)
    sim.run_round()
    start = torch.tensor(MANY["w0"], dtype=torch.float64)
    for k, steps in enumerate([2, 2, 4, 6, 2]):
        w = start
        slopes = []
        for _ in range(steps):
            slopes.append(tensors(MANY["H"])[k] * (w - tensors(MANY["c"])[k]))
            w = w - 0.1 * slopes[-1]
        close(memory(sim, k)["weight"], torch.stack(slopes).mean(0))


@pytest.mark.parametrize("engine", ENGINES)
def test_two_quadratics(engine: str) -> None:
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
        sim = simulation(task, algorithm, engine=engine)
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
    sim = simulation(quadratic_task(P3), algorithm, engine=engine, who=who)
    reference = projected_scaffold(variate, who)
    for _ in rounds(sim, len(who)):
        w, common, own = next(reference)
        close(weight(sim), w)
        close(weight(sim).sum(), sum(P3["w0"]), 1e-12)
        close(sim.snapshot.state["weight"], zero_mean(common, (0,)))
        for i, k in enumerate(CLIENTS):
            close(memory(sim, i)["weight"], zero_mean(own[k], (0,)))


# FedDyn


@pytest.mark.parametrize("engine", ENGINES)
def test_feddyn_server_keeps_the_mean_of_the_clients(engine: str) -> None:
    sim = simulation(quadratic_task(MANY), named("feddyn", client_lr=0.05), engine=engine, cohort=5)
    for _ in rounds(sim, 5):
        own = torch.stack([memory(sim, k)["weight"] for k in range(5)])
        close(own.mean(0), 0.01 * sim.snapshot.state["weight"][0], 1e-12)


# AdaBest


@pytest.mark.parametrize("gap", [1, 2, 5])
def test_adabest_estimate_is_divided_by_the_gap(gap: int) -> None:
    """A client that comes back and does not move keeps that fraction of its estimate."""
    sent = Tree({"weight": torch.tensor([1.0, -1.0], dtype=torch.float64)})
    old = Bias(Tree({"weight": torch.tensor([3.0, 6.0], dtype=torch.float64)}), torch.tensor(4))
    context = ClientContext(sent, (), old, torch.tensor(4 + gap), torch.tensor(10))
    _, new = AdaBest().finish(context, sent, (), torch.tensor(1))
    close(new.estimate["weight"], [3 / gap, 6 / gap], 1e-15)
    assert int(new.round) == 4 + gap


def test_adabest_evaluates_the_cloud_model() -> None:
    task = quadratic_task(P2)
    [history] = fedzmg.simulate(
        task, [fedzmg.Trial(named("adabest"))], rounds=1, engine="sequential", dtype=torch.float64
    )
    w = torch.tensor(STORED["adabest"]["rounds"][0]["w"], dtype=torch.float64)
    losses = 0.5 * (tensors(P2["H"]) * (w - tensors(P2["c"])) ** 2).sum(1)
    assert history.records[0].loss == pytest.approx(
        float(losses @ torch.tensor([0.25, 0.75]).double())
    )
    close(history.params["weight"], w)
