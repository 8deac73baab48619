"""Merging beyond the mean: aggregators, weights and values of single clients, sizes on the wire."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedzmg import (
    Aggregator,
    Federation,
    InputError,
    Participation,
    Task,
    Trial,
    aggregators,
)
from fedzmg.algorithms import SGD, Average
from fedzmg.contract import Algorithm, Need, Number, ServerRule, number
from fedzmg.data.federated import Examples
from fedzmg.engine.choose import EnginePlanner
from fedzmg.messages import ClientContext, Cohort, Result, Rows, Upload
from fedzmg.seeds import key
from fedzmg.simulation import Simulation
from fedzmg.tree import State, Tree, leaves, row
from golden_problems import random_task

SIZES = [6, 9, 4, 8, 5, 7, 3, 10]
STAGES = {
    "median": {"name": "median", "weighted": True},
    "krum": {"name": "krum"},
    "bulyan": {"name": "bulyan"},
    "clipping": {"name": "centred_clipping", "tau": 0.05},
    "bound": {"name": "norm_bound", "bound": "median"},
}


def task(cohort: int = 7, **protocol: Any) -> Task:
    given = {"batch_size": 4, "epochs": 1, "rounds": 3, **protocol}
    return random_task(nn.Linear(5, 3), SIZES, inputs=5, classes=3, seed=2, cohort=cohort, **given)


def poisoned(problem: Task, client: int, factor: float) -> Task:
    x = problem.train.examples.x.clone()
    first, last = problem.train.offsets[client : client + 2]
    x[first:last] *= factor
    examples = Examples(x, problem.train.examples.y)
    return replace(problem, train=replace(problem.train, examples=examples))


def trials(algorithm: Algorithm | None = None) -> list[Trial]:
    if algorithm is not None:
        return [Trial(algorithm, seed) for seed in (0, 1)]
    return [Trial.of("fedavg", seed, client_lr=0.05 * (1 + seed)) for seed in (0, 1)]


def simulation(chosen: list[Trial], engine: Any = "vectorized", **kwargs: Any) -> Simulation:
    kwargs = {"problem": task(), "dtype": torch.float64, **kwargs}
    return Simulation(
        kwargs.pop("problem"),
        chosen,
        rounds=3,
        device=torch.device("cpu"),
        engine=engine,
        **kwargs,
    )


def run(sim: Simulation, rounds: int = 3) -> list[Any]:
    return [
        [record._replace(seconds=0) for record in sim.run_round().records] for _ in range(rounds)
    ]


def check_all_ways(chosen: list[Trial], **stages: Any) -> Simulation:
    """Compare chunks, packs, resumes and engines with one simulation, and return it."""
    whole, first = simulation(chosen, **stages), simulation(chosen, **stages)
    records = run(whole)
    run(first, 1)
    kept = [first.checkpoint(i) for i in range(len(chosen))]
    chunked = simulation(chosen, EnginePlanner("vectorized", chunk=3), **stages)
    resumed = simulation(chosen, restored=kept, **stages)
    alone = simulation(chosen[1:], **stages)
    loop = simulation(chosen, "sequential", **stages)
    assert run(chunked) == records
    assert run(resumed, 2) == records[1:]
    assert [rs[0] for rs in run(alone)] == [rs[1] for rs in records]
    run(loop)
    for a, b, c, d, e in zip(
        *(leaves(sim.snapshot) for sim in (whole, chunked, resumed, alone, loop)), strict=True
    ):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        assert torch.equal(a[1], d[0])
        assert torch.allclose(a.double(), e.double(), rtol=0, atol=1e-9)
    return whole


@pytest.mark.parametrize("guard", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", STAGES)
def test_packs_chunks_resumes_and_engines_agree(name: str, guard: bool) -> None:
    stages = Federation(guard=guard, aggregator=aggregators.build(STAGES[name]))
    problem = poisoned(task(8), 2, 1e7) if guard else task()
    whole = check_all_ways(trials(), federation=stages, problem=problem)
    assert bool(leaves(whole.snapshot.aggregator)) == (name == "clipping")
    if guard:
        last = run(simulation(trials(), federation=stages, problem=problem), 1)[0][0]
        assert (last.clients, last.dropped) == (7, 1)
        assert [client for client, _ in last.rejected] == ["2"]


@pytest.mark.parametrize("name", STAGES)
def test_packed_equals_alone_in_float32(name: str) -> None:
    stages = Federation(aggregator=aggregators.build(STAGES[name]))
    kwargs = {"federation": stages, "dtype": torch.float32}
    packed, alone = (simulation(chosen, **kwargs) for chosen in (trials(), trials()[1:]))
    assert [rs[1] for rs in run(packed)] == [rs[0] for rs in run(alone)]
    pairs = zip(leaves(packed.snapshot), leaves(alone.snapshot), strict=True)
    assert all(torch.equal(a[1], b[0]) for a, b in pairs)


def test_mean_streams_and_changes_no_bit() -> None:
    plain = simulation(trials())
    mean = simulation(trials(), federation=Federation(aggregator="mean"))  # type: ignore[arg-type]
    assert run(plain) == run(mean)
    for a, b in zip(leaves(plain.snapshot), leaves(mean.snapshot), strict=True):
        assert torch.equal(a, b)

    @dataclass(frozen=True)
    class KeptMean(Aggregator):
        def aggregate(self, rows: Rows, state: State) -> tuple[Tensor, State]:
            return aggregators.Mean().aggregate(rows, state)

    kept = simulation(trials(), federation=Federation(aggregator=KeptMean()))
    run(kept)
    for a, b in zip(leaves(plain.snapshot), leaves(kept.snapshot), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=0, atol=1e-12)


def test_too_few_updates_leave_everything_untouched() -> None:
    stages = Federation(aggregator=aggregators.build({"name": "krum", "byzantine": 2}))
    problem = task(7)
    bad = [int(c) for c in range(8)]
    for client in bad[:3]:
        problem = poisoned(problem, client, math.nan)
    sim = simulation(trials(), federation=stages, problem=problem)
    before = sim.snapshot
    [[first, _]] = run(sim, 1)
    # Of seven clients at most five have finite updates, and Krum with f = 2 needs seven.
    assert (first.clients, first.dropped, first.client_loss) == (0, 7, None)
    assert {client for client, _ in first.rejected} <= {"0", "1", "2"}
    for part in ("params", "state", "aggregator"):
        for a, b in zip(
            leaves(getattr(before, part)), leaves(getattr(sim.snapshot, part)), strict=True
        ):
            assert torch.equal(a, b)
    assert [rs[0].diverged for rs in run(sim, 2)] == [False, True]


@dataclass(frozen=True)
class Weighted(SGD):  # type: ignore[misc]
    """SGD that sets its own weight and uploads values of its own."""

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        upload, memory = super().finish(context, params, scratch, steps)
        loss = upload.delta["bias"].abs().sum()
        count = context.num_examples
        return Upload(upload.delta, each=(loss, count), weight=count.double() ** 2), memory

    def wire(self, upload: Upload) -> State | int:
        return 1000 + upload.delta["bias"].numel()


@dataclass(frozen=True)
class Fair(ServerRule):
    """Server with a weight of its own for every client, which also draws and sees clients."""

    clients: int = len(SIZES)
    lr: Number = number(1.0, above=0, doc="learning rate")
    weighs: bool = True

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"client", "key"})

    @property
    def own_weights(self) -> bool:
        return self.weighs

    def init(self, params: Tree) -> State:
        one = next(iter(params.values()))
        return one.new_ones(self.clients), torch.zeros((), dtype=torch.int64)

    def weigh(self, state: State, clients: Tensor, weights: Tensor) -> Tensor:
        return state[0][clients] * self.lr * weights

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        losses, counts = cohort.each
        seen = torch.where(cohort.valid, losses.to(state[0].dtype), 0.0)
        seen = seen + 0 * counts
        grown = state[0] + torch.zeros_like(state[0]).index_add(0, cohort.clients, seen)
        return params - cohort.delta, (grown, cohort.key)


def own_algorithm(**kwargs: Any) -> Algorithm:
    return Algorithm("own", Weighted(lr=0.1), Fair(**kwargs))


@pytest.mark.parametrize("weighs", [True, False])
@pytest.mark.parametrize("guard", [True, False])
def test_weights_and_values_of_clients_reach_the_server(weighs: bool, guard: bool) -> None:
    chosen = trials(own_algorithm(weighs=weighs))
    whole = check_all_ways(chosen, federation=Federation(guard=guard))
    grown, keys = whole.snapshot.state
    assert keys.tolist() == [key(seed, "server", 3) for seed in (0, 1)]
    assert int((grown > 1).sum()) == 2 * len(SIZES)


def test_weights_are_those_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = task(8)
    chosen = trials(own_algorithm())
    sim = simulation(chosen, problem=problem)
    before = sim.snapshot
    batches = sim.planner.batches(1)
    broadcast = sim.broadcast(1, before)
    uploads: dict[tuple[int, int], Upload] = {}
    for chunk in simulation(chosen, "sequential", problem=problem).engine.train(
        batches, broadcast, ()
    ):
        for i, place in zip(chunk.batches, chunk.rows, strict=True):
            own_rows = row(chunk.outcomes.upload, slice(place, place + 1))
            uploads[batches[i].trial, batches[i].client] = own_rows
    [records] = run(sim, 1)
    for trial in (0, 1):
        own = {client: up for (t, client), up in uploads.items() if t == trial}
        weights = {client: float(SIZES[client] ** 2) for client in own}
        total = sum(weights.values())
        mean = sum(weights[c] / total * own[c].delta["bias"][0] for c in own)
        moved = before.params["bias"][trial] - sim.snapshot.params["bias"][trial]
        assert torch.allclose(moved, mean, rtol=0, atol=1e-12)
        # The weight travels within the bytes that the rule declares; counts do not.
        assert (records[trial].bytes_up, records[trial].scalar_bytes_up) == (8 * 1003, 0)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 1e39])
def test_bad_weights_drop_the_upload(value: float) -> None:
    @dataclass(frozen=True)
    class Odd(SGD):  # type: ignore[misc]
        def finish(self, *args: Any) -> Result:
            upload, memory = super().finish(*args)
            is_bad = args[0].num_examples == SIZES[3]
            usual = torch.ones((), dtype=torch.float64)
            return upload._replace(weight=torch.where(is_bad, usual * value, usual)), memory

    chosen = [Trial(Algorithm("odd", Odd(lr=0.1), Average()))]
    for engine in ("sequential", "vectorized"):
        [[record]] = run(simulation(chosen, engine, problem=task(8), dtype=torch.float32), 1)
        assert (record.clients, record.dropped) == (7, 1)
        assert record.rejected == (("3", math.inf),)


def listed(*clients: list[int]) -> Participation:
    return Participation(sampler="schedule", schedule=clients)


def test_a_schedule_may_be_larger_than_the_cohort() -> None:
    stages = Federation(
        aggregator=aggregators.get("krum"), participation=listed([*range(7)], [*range(3)])
    )
    found = run(simulation(trials(), federation=stages, problem=task(2)), 2)
    assert [(rs[0].clients, rs[0].dropped) for rs in found] == [(7, 0), (0, 3)]


def test_cohorts_of_different_size_do_not_move_bits_of_values_of_clients() -> None:
    @dataclass(frozen=True)
    class Summed(Fair):
        def weigh(self, state: State, clients: Tensor, weights: Tensor) -> Tensor:
            return weights / weights.sqrt().sum()

        def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
            return params - cohort.delta / cohort.each[0].sum(), state

    @dataclass(frozen=True)
    class Plain(SGD):  # type: ignore[misc]
        def finish(self, *args: Any) -> Result:
            upload, memory = super().finish(*args)
            return upload._replace(each=(upload.delta["bias"].abs().sum(),)), memory

    chosen = [Trial(Algorithm("own", Plain(lr=0.1), Summed(40)), seed) for seed in range(4)]
    stages = Federation(participation=Participation(sampler="poisson"))
    problem = random_task(nn.Linear(5, 3), SIZES * 5, inputs=5, classes=3, cohort=20, batch_size=4)
    given = {"problem": problem, "federation": stages, "dtype": torch.float32}
    packed = simulation(chosen, **given)
    run(packed)
    for i, trial in enumerate(chosen):
        alone = simulation([trial], **given)
        run(alone)
        pairs = zip(leaves(packed.snapshot), leaves(alone.snapshot), strict=True)
        assert all(torch.equal(a[i], b[0]) for a, b in pairs)


def unfit(kind: str) -> tuple[list[Trial], Federation, int]:
    krum = aggregators.get("krum")
    own = Algorithm("mine", SGD(lr=0.1), Average(), aggregator=krum)
    return {
        "cohort": (trials(), Federation(aggregator=krum), 4),
        "schedule": (trials(), Federation(aggregator=krum, participation=listed([0, 1, 2])), 7),
        "weights": (trials(own_algorithm()), Federation(aggregator=krum), 7),
        "each": (trials(own_algorithm(weighs=False)), Federation(aggregator=krum), 7),
        "total": ([Trial.of("scaffold")], Federation(aggregator=krum), 7),
        "twice": (trials(own), Federation(aggregator=krum), 7),
        "shape": (trials(), Federation(aggregator=Wrong()), 7),
    }[kind]


@dataclass(frozen=True)
class Wrong(Aggregator):
    """Aggregator that forgets to merge."""

    def aggregate(self, rows: Rows, state: State) -> tuple[Tensor, State]:
        return rows.deltas, state


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("cohort", "cohort = 4"),
        ("schedule", "cohort = 3"),
        ("weights", "own"),
        ("each", "each"),
        ("total", "total"),
        ("twice", "mine"),
        ("shape", "Wrong.aggregate"),
    ],
)
def test_stages_that_do_not_fit_are_refused_before_the_first_round(kind: str, named: str) -> None:
    chosen, stages, cohort = unfit(kind)
    with pytest.raises(InputError, match=named):
        simulation(chosen, federation=stages, problem=task(cohort))


def test_an_own_aggregator_replaces_the_mean_and_its_numbers_may_differ() -> None:
    def own(tau: float) -> Algorithm:
        clip = aggregators.CentredClipping(tau=tau, start="zero")
        return Algorithm("own", SGD(lr=0.1), Average(), aggregator=clip)

    packed = simulation([Trial(own(0.01)), Trial(own(1e9))])
    plain = simulation([Trial(Algorithm("x", SGD(lr=0.1), Average(), "uniform"))])
    run(packed, 1)
    run(plain, 1)
    moved: Callable[[Simulation], Tensor] = lambda sim: sim.snapshot.params["weight"]  # noqa: E731
    assert torch.allclose(moved(packed)[1], moved(plain)[0], rtol=0, atol=1e-12)
    assert not torch.allclose(moved(packed)[0], moved(plain)[0], rtol=0, atol=1e-3)
