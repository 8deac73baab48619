"""What is replayed around local training gives the bits of what is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedzmg import Federation, Participation, Task, Trial, algorithms, simulate
from fedzmg.algorithms.fedavg import SGD, Average
from fedzmg.contract import Algorithm, rule_class
from fedzmg.engine import replay
from fedzmg.engine.cuda_graph import StepGraphs
from fedzmg.engine.replay import Replayed, copied
from fedzmg.messages import ClientContext, Cohort, Upload
from fedzmg.simulation import Simulation
from fedzmg.tree import State, Tree, leaves
from golden_problems import random_task

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = sorted(set(algorithms.ALGORITHMS) - {"fedbn"})  # it needs a model with BatchNorm


@pytest.mark.parametrize("device", DEVICES)
def test_replays_follow_arguments_forms_and_fixed_values(device: str) -> None:
    def function(fixed: int, tree: Tree, number: Tensor) -> tuple[Tree, Tensor]:
        return tree * fixed + number, tree["a"].sum()

    replayed = Replayed(function)
    for call in range(12):
        width, fixed = 2 + call % 2, call % 3
        tree = Tree({"a": torch.randn(width, device=device)})
        number = torch.tensor(float(call), device=device)
        found = copied(replayed(fixed, tree, number))
        for ours, expected in zip(
            leaves(found), leaves(function(fixed, tree, number)), strict=True
        ):
            assert torch.equal(ours, expected)


@pytest.mark.gpu
def test_what_cannot_be_captured_is_called() -> None:
    replayed = Replayed(lambda _, x: x * x.sum().item())
    for call in range(5):
        x = torch.full((3,), float(call), device="cuda")
        assert torch.equal(replayed((), x), x * x.sum())
    good = Replayed(lambda _, x: x + 1)
    assert [float(good((), torch.tensor(float(c), device="cuda"))) for c in range(4)] == [
        1,
        2,
        3,
        4,
    ]


def task() -> Task:
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    return random_task(
        net, [5, 12, 8, 3], inputs=6, classes=3, cohort=3, batch_size=4, epochs=2, eval_every=2
    )


@rule_class
class Telling(SGD):
    """A client that tells the server its number of examples."""

    def finish(self, context: ClientContext, *own: Any) -> tuple[Upload, State]:
        upload, memory = super().finish(context, *own)
        return upload._replace(each=context.num_examples.to(torch.float32)), memory


@rule_class
class Slower(Average):
    """A server that divides its step by the largest client of the cohort."""

    def update(self, params: Tree, state: State, cohort: Cohort) -> Any:
        moved, state = super().update(params, state, cohort)
        return params + (moved - params) / cohort.each.max(), state


OWN = Algorithm("own", Telling(lr=0.1), Slower())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("algorithm", "engine"),
    [*((name, "cuda_graph") for name in [*NAMES, OWN]), ("fedzmg", "sequential")],
    ids=lambda a: getattr(a, "name", a),
)
def test_rounds_are_the_same_whether_replayed_or_called(
    algorithm: str | Algorithm, engine: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(most: int) -> Simulation:
        """Models are evaluated one by one: each replay overwrites the result before."""
        monkeypatch.setattr(replay, "MOST_BYTES", most)
        trials = [Trial.of(algorithm, seed) for seed in range(1 if loops else 2)]
        simulation = Simulation(
            task(), trials, rounds=6, device=torch.device(device), dtype=torch.float32,
            engine=engine, deterministic=True,
        )  # fmt: skip
        simulation._evaluated_at_once = 1
        records.append([])
        while simulation.round < simulation.rounds:
            found = simulation.run_round().records
            records[-1] += [record._replace(seconds=0) for record in found]
        return simulation

    records: list[list[object]] = []
    if loops := engine == "sequential":  # as on a GPU
        monkeypatch.setattr(Simulation, "_replays", lambda *_: True)
    called, replayed = run(0), run(1 << 28)
    assert records[0] == records[1]
    for a, b in zip(leaves(called.snapshot), leaves(replayed.snapshot), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_a_new_width_is_captured_without_a_trace(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = StepGraphs._capture

    def warmed_up(self: StepGraphs, buffers: Any, width: int) -> Any:
        run = capture(self, buffers, width)
        for _ in range(3 * (device == "cpu")):  # as before a capture on a GPU
            buffers.time.zero_()
            run()
        return run

    monkeypatch.setattr(StepGraphs, "_capture", warmed_up)
    # Clients of equal length first: their buffers then meet a second width.
    work = Participation(steps=lambda client, round_, *_: 3 if round_ == 1 else 1 + client)
    called, replayed = (
        simulate(
            task(), Trial.of("fedavg", 0), rounds=5, engine=engine, device=device,
            federation=Federation(participation=work), precision="float32",
        )[0]
        for engine in ("vectorized", "cuda_graph")
    )  # fmt: skip
    assert [r.steps for r in called.records] == [r.steps for r in replayed.records]
    for name, leaf in called.params.items():
        torch.testing.assert_close(replayed.params[name], leaf, rtol=1e-4, atol=1e-5)


@rule_class
class Looking(SGD):
    """A client that keeps its last models together, and one of them as a view."""

    def begin(self, context: ClientContext, *full_pass: Any) -> State:
        both = context.params.map(lambda leaf: torch.stack([leaf, leaf]))
        return super().begin(context, *full_pass), both, context.params

    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        own, both, older = scratch
        moved, own = super().step(context, params, own, grad)
        later = both.map(lambda pair, last: torch.stack([pair[1], last]), params)
        return moved + 0.1 * (params - older), (own, later, both.map(lambda pair: pair[1]))


@pytest.mark.parametrize("device", DEVICES)
def test_rules_may_keep_views_of_their_state(device: Any) -> None:
    algorithm = Algorithm("looking", Looking(lr=0.1), Average())
    even = Participation(steps=lambda *_: 4)  # steps without a mask
    called, replayed = (
        simulate(
            task(), Trial.of(algorithm), rounds=3, engine=engine, device=device,
            dtype=torch.float64, federation=Federation(participation=even),
        )[0]
        for engine in ("vectorized", "cuda_graph")
    )  # fmt: skip
    for name, leaf in called.params.items():
        torch.testing.assert_close(replayed.params[name], leaf, rtol=0, atol=1e-12)
