"""Metrics of single clients against a plain loop, without an effect on training.

Everything is compared in double precision: 1e-9 is far above its rounding for these few terms, and
far below any mistake.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedzmg import Metric, Task, Trial, simulate
from fedzmg.data.federated import Examples, FederatedData
from fedzmg.evaluation import OverClients
from fedzmg.simulation import History, Simulation, rounds
from fedzmg.simulation import history as results
from fedzmg.simulation.history import Watched
from fedzmg.simulation.records import QUANTILES
from fedzmg.tasks.protocol import Protocol
from golden_problems import Net, random_task

COUNTS = [4, 9, 1, 6, 3, 8, 5]


def images() -> Task:
    net = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 3))
    return random_task(net, COUNTS, inputs=5, classes=3, cohort=3, batch_size=4, rounds=3)


def tokens() -> Task:
    rng = np.random.default_rng(1)
    owner = np.repeat(np.arange(len(COUNTS)), COUNTS)
    x, y = (rng.integers(0, 6, (len(owner), 7)) for _ in range(2))
    net = Net(lambda m, x: m.head(m.embed(x)), embed=nn.Embedding(6, 4), head=nn.Linear(4, 6))
    return Task.from_arrays(net, x, y, owner, test=(x, y), cohort=3, batch_size=4, rounds=3)


def squared(outputs: Any, targets: Any) -> Any:
    return (outputs.squeeze(-1) - targets) ** 2


def regression() -> Task:
    rng = np.random.default_rng(2)
    owner = np.repeat(np.arange(len(COUNTS)), COUNTS)
    x = rng.normal(size=(len(owner), 3))
    return Task.from_arrays(
        nn.Linear(3, 1), x, x.sum(1), owner, test=(x, x.sum(1)), loss=squared,
        metric=Metric("mse", squared, higher_is_better=False), cohort=3, batch_size=4, rounds=3,
    )  # fmt: skip


TASKS = {"images": images, "tokens": tokens, "regression": regression}


def by_hand(history: History) -> list[tuple[int, float, float]]:
    """Examples, metric and loss of every client, one example at a time."""
    model, data = history.model(), history.task.train
    found = []
    for client in range(len(data)):
        first, last = data.offsets[client : client + 2]
        right, lost = [], []
        for i in range(first, last):
            with torch.no_grad():
                out = model(data.examples.x[i : i + 1])
            y = data.examples.y[i : i + 1]
            if history.task.metric.name == "mse":
                right.append(float((out[0, 0] - y[0]) ** 2))
                lost.append(right[-1])
            else:
                flat, wanted = out.reshape(-1, out.shape[-1]), y.reshape(-1)
                right.append(float((flat.argmax(1) == wanted).double().mean()))
                lost.append(float(nn.functional.cross_entropy(flat, wanted)))
        found.append((last - first, sum(right) / len(right), sum(lost) / len(lost)))
    return found


def train(task: Task) -> tuple[Simulation, list[History]]:
    trials = [Trial.of("fedavg", seed=seed) for seed in (0, 1)]
    simulation = Simulation(
        task, trials, rounds=task.protocol.rounds, device=torch.device("cpu"),
        dtype=torch.float64, engine="vectorized",
    )  # fmt: skip
    records: list[list[Any]] = [[], []]
    while simulation.round < simulation.rounds:
        for kept, one in zip(records, simulation.run_round().records, strict=True):
            kept.append(one)
    return simulation, simulation.histories(records)


@pytest.mark.parametrize("kind", TASKS)
def test_every_client_as_by_hand(kind: str) -> None:
    simulation, histories = train(TASKS[kind]())
    for history, found in zip(histories, simulation.evaluate_clients(), strict=True):
        examples, metric, loss = zip(*by_hand(history), strict=True)
        assert (found.round, found.part, found.population) == (3, "training", len(COUNTS))
        assert found.clients.tolist() == list(range(len(COUNTS)))
        assert found.examples.tolist() == list(examples)
        # A history alone finds the same.
        for one in (found, history.client_metrics()):
            assert one.metric == pytest.approx(metric, rel=1e-9, abs=1e-9)
            assert one.loss == pytest.approx(loss, rel=1e-9, abs=1e-9)


def test_examples_kept_for_tests_go_first_where_owners_are_known() -> None:
    plain = images()
    rng = np.random.default_rng(3)
    owners = rng.integers(-1, len(COUNTS), plain.test.size)
    owners[owners == 2] = 3  # one client has no test example
    simulation, histories = train(dataclasses.replace(plain, test_owners=owners))
    [found, _] = simulation.evaluate_clients()
    assert (found.part, found.population) == ("test", len(COUNTS) - 1)
    assert 2 not in found.clients
    x, y = histories[0].task.test
    with torch.no_grad():
        right = (histories[0].model()(x).argmax(1) == y).numpy()
    for client, examples, metric in zip(found.clients, found.examples, found.metric, strict=True):
        assert examples == (owners == client).sum()
        assert metric == pytest.approx(right[owners == client].mean())


def test_evaluating_clients_changes_no_bit() -> None:
    """Evaluation after every round leaves records and parameters the same."""
    seen: list[Any] = []
    looking = simulate(
        images(), [Trial.of("fedadam", seed=1)], engine="vectorized", device="cpu",
        observer=lambda report: seen.append(report.simulation.evaluate_clients()),
    )  # fmt: skip
    [blind] = simulate(images(), [Trial.of("fedadam", seed=1)], engine="vectorized", device="cpu")
    assert len(seen) == 3
    assert [r._replace(seconds=0) for r in looking[0].records] == [
        r._replace(seconds=0) for r in blind.records
    ]
    assert all(torch.equal(looking[0].params[n], blind.params[n]) for n in blind.params)


def test_too_little_memory_makes_smaller_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, _ = train(images())
    whole = simulation.evaluate_clients()
    inner, asked = results.evaluate_by_owner, []

    def small(*args: Any, chunk: int) -> Any:
        asked.append(chunk)
        if chunk > 100:
            raise torch.OutOfMemoryError
        return inner(*args, chunk=chunk)

    monkeypatch.setattr(results, "evaluate_by_owner", small)
    again = simulation.evaluate_clients()
    assert asked == [500, 250, 125, 62]
    assert np.array_equal(again[0].metric, whole[0].metric)


def test_too_little_memory_evaluates_fewer_models_then_fewer_examples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation, _ = train(images())
    whole, inner, asked = simulation.evaluate(), rounds.evaluate, []

    def small(params: Any, *args: Any, chunk: int) -> Any:
        asked.append((len(next(iter(params.values()))), chunk))
        if chunk > 100:
            raise torch.OutOfMemoryError
        return inner(params, *args, chunk=chunk)

    monkeypatch.setattr(rounds, "evaluate", small)
    assert simulation.evaluate() == whole
    assert asked == [(2, 500), (2, 250), (2, 125), (2, 62)]


def sized(counts: list[int], rounds: int) -> Any:
    """Make the parts of a task that decide the clients to evaluate; some have no examples."""
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    x = torch.zeros(sum(counts), 1)
    train = FederatedData(Examples(x, x), offsets, tuple(map(str, range(len(counts)))))
    protocol = Protocol(rounds=rounds, cohort=1)
    return SimpleNamespace(train=train, protocol=protocol, test_owners=None)


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    rounds=st.integers(1, 30), few=st.integers(1, 20), most=st.integers(1, 12),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_watched_clients_bring_all_their_examples_and_no_others(
    counts: list[int], rounds: int, few: int, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "FEW_EXAMPLES", few)
        patch.setattr(results, "MOST_CLIENTS", most)
        task = sized(counts, rounds)
        found, longer = Watched.of(task), Watched.of(sized(counts, 2 * rounds))
        everyone = Watched.of(task, everyone=True)
    holders = np.flatnonzero(counts)
    assert everyone.clients.tolist() == holders.tolist()
    assert everyone.positions.tolist() == list(range(sum(counts)))
    assert found.population == len(holders)
    assert set(found.clients) <= set(longer.clients) <= set(holders)
    assert 1 <= len(found.clients) <= most
    owner = np.repeat(np.arange(len(counts)), counts)
    wanted = [i for client in found.clients for i in np.flatnonzero(owner == client)]
    assert found.positions.tolist() == wanted
    assert found.counts.tolist() == [counts[client] for client in found.clients]
    afford = max(few, int(rounds * np.mean(counts)) // results.SHARE_OF_TRAINING)
    assert found.counts.sum() <= afford or len(found.clients) == 1
    assert len(found.clients) == len(holders) or most == len(found.clients) or sum(counts) > afford


def test_records_hold_quantiles_of_the_cohorts_losses() -> None:
    """A cohort of everybody, one step each: the losses of the initial model, by hand."""
    task = regression()
    protocol = task.protocol.with_options({"cohort": 7, "batch_size": 9, "rounds": 1})
    task = dataclasses.replace(task, protocol=protocol)
    [still] = simulate(
        task, [Trial.of("fedavg", client_lr=1e-30)], engine="vectorized", dtype=torch.float64
    )
    losses = [loss for _, _, loss in by_hand(still)]
    [record] = still.records
    assert record.client_loss == pytest.approx(np.quantile(losses, QUANTILES), rel=1e-5)
    assert record.client_loss == tuple(float(f"{v:.6g}") for v in record.client_loss or ())


def test_spread_over_twenty_clients_by_hand() -> None:
    found = OverClients.of(np.arange(20) / 20)
    assert found.worst_tenth == pytest.approx(0.025)
    assert found.best_tenth == pytest.approx(0.925)
    assert found.median == pytest.approx(0.475)
    assert found.sd == pytest.approx(math.sqrt((20**2 - 1) / 12) / 20)
