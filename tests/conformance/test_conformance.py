"""Properties of every algorithm in the table, and of some with wrappers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import Federation, Task, Trial, simulate
from fedzmg.algorithms import ALGORITHMS, AlgorithmInfo
from fedzmg.algorithms.options import configure
from fedzmg.contract import bind, chain, numbers, structure
from fedzmg.data.federated import Examples
from fedzmg.data.plan import ClientBatch
from fedzmg.messages import ClientContext, Cohort, FullPass, Upload
from fedzmg.simulation import EnginePlanner, RoundPlanner, Simulation
from fedzmg.tree import Tree, leaves, num_bytes, tree_map
from golden_problems import Net, random_task


def wrapped(name: str, options: dict[str, Any]) -> AlgorithmInfo:
    info = ALGORITHMS[name]
    return replace(info, algorithm=configure(info.algorithm, options))


CLIPPED = {"client.clip_norm": 0.3, "client.clip_value": 0.1}
COSINE = {"client.schedule": "cosine", "client.horizon": 6}
DECAYED = {"server.decay": 0.05, "server.schedule": "exponential", "server.gamma": 0.7}
ENTRIES = {
    **ALGORITHMS,
    "wrapped clients": wrapped("fedzmg-adam", CLIPPED | COSINE),
    "wrapped server": wrapped("fedavg", DECAYED),
}
NAMES = list(ENTRIES)


def rule_types(name: str) -> tuple[Any, ...]:
    algorithm = ENTRIES[name].algorithm
    return tuple(
        type(rule) for side in (algorithm.client, algorithm.server) for rule in chain(side)
    )


FIRST = {rule_types(name): name for name in reversed(NAMES)}
ROWS = [
    pytest.param(name, marks=() if name in FIRST.values() else pytest.mark.slow) for name in NAMES
]
"""All algorithms; variants that differ in options alone run with ``-m slow``."""
CPU = torch.device("cpu")
PACK = 2
"""Trials that train side by side."""
SIZES = [3, 5, 1, 8, 6, 4, 2]
"""Client 2 has one example, less than a batch: it takes no step without partial batches."""


def network() -> nn.Module:
    """A convolution, dropout and a dense layer: kernels of two ranks, biases, randomness."""
    return Net(
        lambda m, x: m.dense(m.drop(torch.relu(m.conv(x[:, None])).flatten(1))),
        conv=nn.Conv1d(1, 3, 3, padding=1),
        drop=nn.Dropout(0.3),
        dense=nn.Linear(3 * 6, 4),
    )


@cache
def task(**protocol: object) -> Task:
    settings = {"batch_size": 4, "epochs": 2, "cohort": 4, "rounds": 3, **protocol}
    return random_task(network(), SIZES, inputs=6, classes=4, seed=5, shift=0.5, **settings)


def trials(name: str, count: int = PACK) -> list[Trial]:
    """Different seeds and learning rates, so that a pack mixes both."""
    base = ENTRIES[name].algorithm
    rates = [{"client.lr": 0.02 * (1 + i), "server.lr": 0.5 / (1 + i)} for i in range(count)]
    # A server that only averages has no learning rate.
    has = [{key: rate for key, rate in r.items() if key in base.options()} for r in rates]
    return [Trial(base.with_options(options), seed=i) for i, options in enumerate(has)]


def distance(a: object, b: object) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(leaves(a), leaves(b), strict=True))


class Changed(RoundPlanner):
    """Planner that changes the batches of every round."""

    def __init__(
        self, problem: Task, change: Callable[[list[ClientBatch]], list[ClientBatch]]
    ) -> None:
        super().__init__(problem, [trial.seed for trial in trials(NAMES[0])])
        self.change = change

    def batches(self, round_: int) -> list[ClientBatch]:
        return self.change(super().batches(round_))


def simulation(
    name: str,
    engine: Any = "vectorized",
    problem: Task | None = None,
    chosen: list[Trial] | None = None,
    **kwargs: object,
) -> Simulation:
    return Simulation(
        problem or task(),
        chosen or trials(name),
        rounds=4,
        device=CPU,
        dtype=torch.float64,
        engine=engine,
        **kwargs,  # type: ignore[arg-type]
    )


class Run(NamedTuple):
    """Everything that tests compare of some rounds."""

    snapshots: list[Any]
    records: list[list[Any]]
    kept: list[Any]
    """Checkpoints after one round."""


def run_of(sim: Simulation, rounds: int = 2) -> Run:
    found = Run([], [], [])
    for done in range(1, rounds + 1):
        report = sim.run_round()
        found.records.append([r._replace(seconds=0) for r in report.records])
        found.snapshots.append(sim.snapshot)
        if done == 1:
            found.kept.extend(sim.checkpoint(i) for i in range(len(report.records)))
    return found


@cache
def run(name: str, engine: str) -> Run:
    """A pack of trials; computed once for all tests."""
    return run_of(simulation(name, engine))


@pytest.mark.parametrize("name", ROWS)
def test_engines_and_orders_of_clients_agree(name: str) -> None:
    first, reference = (snapshot.params for snapshot in run(name, "sequential").snapshots)
    assert distance(reference, first) > 1e-6, "the algorithm does nothing"
    assert distance(reference, run(name, "vectorized").snapshots[-1].params) < 1e-9
    reverse = Changed(task(), lambda batches: batches[::-1])
    others = simulation(name, EnginePlanner("vectorized", chunk=3), planner=reverse)
    # The second round reads the client memory that the first one wrote.
    for other in (others, simulation(name, "cuda_graph")):
        assert distance(reference, run_of(other).snapshots[-1].params) < 1e-9


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_alone_equals_packed_bit_for_bit(name: str, engine: str) -> None:
    packed = run(name, engine)
    alone = run_of(simulation(name, engine, chosen=trials(name)[1:]))
    assert [records[0] for records in alone.records] == [rs[1] for rs in packed.records]
    for a, b in zip(leaves(alone.snapshots[1]), leaves(packed.snapshots[1]), strict=True):
        assert torch.equal(a[0], b[1])


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_resume_equals_no_interruption_bit_for_bit(name: str, engine: str) -> None:
    whole = run(name, engine)
    resumed = simulation(name, engine, restored=whole.kept)
    assert resumed.round == 1
    assert run_of(resumed, 1).records == whole.records[1:]
    for a, b in zip(leaves(whole.snapshots[-1]), leaves(resumed.snapshot), strict=True):
        assert torch.equal(a, b)


def poisoned(problem: Task, client: int, factor: float = float("nan")) -> Task:
    x = problem.train.examples.x.clone()
    first, last = problem.train.offsets[client : client + 2]
    x[first:last] *= factor
    examples = Examples(x, problem.train.examples.y)
    return replace(problem, train=replace(problem.train, examples=examples))


@pytest.mark.parametrize("name", ROWS)
def test_clients_without_a_batch_or_a_finite_upload_change_nothing(name: str) -> None:
    # Clients of 3, 1 and 2 examples hold no full batch of 4.
    clean = task(keep_partial=False, cohort=7, epochs=1)
    others = Changed(clean, lambda batches: [b for b in batches if len(b.stream) and b.client != 3])
    expected = run_of(simulation(name, problem=clean, planner=others)).snapshots[-1].params
    for engine in ("sequential", "vectorized"):
        found = run_of(simulation(name, engine, poisoned(clean, 3)))
        assert [(r.clients, r.dropped) for r in found.records[-1]] == [(3, 1)] * PACK
        assert distance(found.snapshots[-1].params, expected) < 1e-9


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "mimelite", "fedlion"])
def test_guard_rejects_an_outlier_whatever_packs_chunks_engines_and_resumes(name: str) -> None:
    # Deltas, totals and memory, averages, and deltas that are always small.
    clean = task(keep_partial=False, cohort=7, epochs=1)
    others = Changed(clean, lambda batches: [b for b in batches if b.client != 3])
    expected = run_of(simulation(name, problem=clean, planner=others))
    stages = {"problem": poisoned(clean, 3, 1e8), "federation": Federation(guard=True)}
    whole = run_of(simulation(name, **stages))
    assert [(r.clients, r.dropped) for r in whole.records[-1]] == [(3, 1)] * PACK
    assert [[c for c, _ in r.rejected] for r in whole.records[-1]] == [["3"]] * PACK
    for engine in ("sequential", "cuda_graph"):
        found = run_of(simulation(name, engine, **stages))
        assert distance(found.snapshots[-1].params, expected.snapshots[-1].params) < 1e-9
    chunked = run_of(simulation(name, EnginePlanner("vectorized", chunk=2), **stages))
    alone = run_of(simulation(name, chosen=trials(name)[1:], **stages))
    resumed = simulation(name, restored=whole.kept, **stages)
    assert chunked.records == whole.records
    assert run_of(resumed, 1).records == whole.records[1:]
    assert [records[0] for records in alone.records] == [rs[1] for rs in whole.records]
    last = whole.snapshots[-1]
    for other in (expected.snapshots[-1], chunked.snapshots[-1], resumed.snapshot):
        for part in ("params", "state"):
            for a, b in zip(leaves(getattr(last, part)), leaves(getattr(other, part)), strict=True):
                assert torch.equal(a, b)
    for a, b in zip(leaves(alone.snapshots[-1]), leaves(last), strict=True):
        assert torch.equal(a[0], b[1])


@pytest.mark.parametrize("name", ROWS)
def test_cohort_that_loses_every_upload_leaves_everything_untouched(name: str) -> None:
    base = task()
    nan = Examples(base.train.examples.x * float("nan"), base.train.examples.y)
    sim = simulation(name, problem=replace(base, train=replace(base.train, examples=nan)))
    before = sim.snapshot
    records = run_of(sim, 3).records
    for part in ("params", "state"):
        kept, now = leaves(getattr(before, part)), leaves(getattr(sim.snapshot, part))
        assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    assert [rs[0].diverged for rs in records] == [False, False, True]
    assert records[-1][0].metric == 0.0


def parts(name: str) -> tuple[Any, Any, ClientContext, Tree]:
    """Rules bound to tensors, what a client is given, and a gradient."""
    algorithm = ENTRIES[name].algorithm.for_layout(task().model.layout, len(SIZES))
    params = task().model.params().map(lambda leaf: leaf.double())
    grad = params.map(lambda leaf: torch.full_like(leaf, 0.1) + leaf.sin())

    def bound(rule):  # type: ignore[no-untyped-def]
        values = {k: torch.tensor(v, dtype=torch.float64) for k, v in numbers(rule).items()}
        return bind(structure(rule), values)

    client, server = bound(algorithm.client), bound(algorithm.server)
    shared = server.share(server.init(params))
    context = ClientContext(
        params, shared, client.init_memory(params), torch.tensor(1), torch.tensor(10)
    )
    return client, server, context, grad


@pytest.mark.parametrize("name", ROWS)
def test_rules_do_not_mutate_and_state_keeps_its_form(name: str) -> None:
    algorithm = ENTRIES[name].algorithm.for_layout(task().model.layout, len(SIZES))
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    client, server, context, grad = parts(name)
    kept = tree_map(torch.clone, (context, grad))
    seen = FullPass(torch.tensor(1.0, dtype=torch.float64), grad)
    full_pass = () if client.full_pass == "never" else seen
    scratch = client.begin(context, full_pass)
    held = tree_map(torch.clone, scratch)
    params, after = client.step(context, context.params, scratch, grad)
    assert form(after) == form(scratch)
    assert form(params) == form(context.params)
    upload, memory = client.finish(context, params, after, torch.tensor(1))
    assert isinstance(upload, Upload)
    # The type is the rule's own choice: what a client sends may be integers.
    assert [d.shape for d in leaves(upload.delta)] == [p.shape for p in leaves(context.params)]
    assert list(upload.delta) == list(context.params)
    assert form(memory) == form(context.memory)
    state = server.init(context.params)
    before = tree_map(torch.clone, state)
    one, each = torch.tensor(1), tree_map(lambda leaf: leaf[None], upload.each)
    size = torch.tensor(len(SIZES))
    cohort = Cohort(*upload[:3], one, size, one, each, one[None] > 0, one[None])
    moved, new_state = server.update(context.params, state, cohort)
    assert form(new_state) == form(state)
    assert form(moved) == form(context.params)
    untouched = leaves(((context, grad), scratch, state))
    for a, b in zip(leaves((kept, held, before)), untouched, strict=True):
        assert torch.equal(a, b)


def form(value: object) -> list[tuple[torch.Size, torch.dtype]]:
    return [(leaf.shape, leaf.dtype) for leaf in leaves(value)]


TRACED = ("wrapped clients",)
"""Traced in every run: projection and wrappers; the rest with ``-m slow``."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in TRACED else pytest.mark.slow) for name in NAMES],
)
def test_step_traces_as_one_graph(name: str) -> None:
    # Equal clients: every width would be traced anew, and one of them shows that it can be.
    base = task()
    even = replace(base, train=replace(base.train, offsets=np.arange(0, 29, 4)))
    sim = simulation(name, EnginePlanner("compiled", backend="eager"), even)
    other = simulation(name, problem=even)
    sim.run_round()
    other.run_round()
    assert distance(sim.snapshot.params, other.snapshot.params) < 1e-9


@pytest.mark.parametrize("name", ROWS)
def test_messages_and_kept_state_have_the_declared_sizes(name: str) -> None:
    entry, cohort = ENTRIES[name], task().protocol.cohort
    model = num_bytes(task().model.params())
    [history] = simulate(task(), trials(name)[:1], rounds=1, engine="sequential")
    record = history.records[0]
    assert record.bytes_down == entry.down * model * cohort
    assert record.bytes_up == entry.up * model * cohort

    sim = simulation(name)
    weights = sum(leaf[0].numel() for leaf in leaves(sim.snapshot.params))

    def size(state: object) -> float:
        # One number per client counts as a scalar.
        arrays = [leaf[0] for leaf in leaves(state) if leaf.ndim > 1]
        return sum(leaf.numel() for leaf in arrays if leaf.shape != (len(SIZES),)) / weights

    assert size(sim.snapshot.state) == entry.server_keeps
    assert size(sim.memory.fresh) == entry.client_keeps
    assert entry.about
    assert entry.source
