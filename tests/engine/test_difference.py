"""Merging whole models gives the bits of the obvious path."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import Task, Trial, simulate, tree
from fedzmg.algorithms import fedavg
from fedzmg.algorithms.fedavg import SGD, Average
from fedzmg.contract import Algorithm, rule_class
from fedzmg.engine import sequential
from fedzmg.engine.aggregate import Merger
from fedzmg.messages import ClientContext, Cohort, FullPass
from fedzmg.tree import State, Tree


def task(*, batch_norm: bool, broken: int | None = None) -> Task:
    """Build a task of four clients; gradients of one may be not finite."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 6)).astype(np.float32)
    owners = np.repeat(np.arange(4), [4, 8, 12, 16])
    if broken is not None:
        x[owners == broken] = 1e38
    norm = nn.BatchNorm1d(5) if batch_norm else nn.ReLU()
    model = nn.Sequential(nn.Linear(6, 5), norm, nn.Linear(5, 3))
    test = rng.normal(size=(4, 6)).astype(np.float32), rng.integers(0, 3, 4)
    return Task.from_arrays(
        model, x, rng.integers(0, 3, 40), owners, test=test, cohort=3, batch_size=3, epochs=2
    )


def results(
    problem: Task, name: str, engine: Any = "sequential"
) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Train a few rounds; return the model and the records without their times."""
    [found] = simulate(problem, [Trial.of(name, 0)], rounds=3, engine=engine)
    return dict(found.params), [record._replace(seconds=0.0) for record in found.records]


@pytest.mark.parametrize(
    ("engine", "collected", "threads"),
    [("sequential", True, 1), ("sequential", False, 1), ("sequential", False, 2),
     ("vectorized", True, 1)],
)  # fmt: skip
@pytest.mark.parametrize(("batch_norm", "broken"), [(False, None), (True, None), (False, 2)])
@pytest.mark.parametrize("name", ["fedavg", "fedavg:momentum", "fedzmg", "fedprox", "scaffold"])
def test_the_fast_path_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    batch_norm: bool,
    broken: int | None,
    engine: str,
    collected: bool,
    threads: int,
) -> None:
    problem = task(batch_norm=batch_norm, broken=broken)
    with monkeypatch.context() as patch:
        patch.setattr(Merger, "_add_models", lambda *_: False)
        model, records = results(problem, name, engine)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    if not collected:
        monkeypatch.setattr(sequential, "CHUNK_BYTES", 0)
        monkeypatch.setattr(tree, "BLOCK", 4)
    fast_model, fast_records = results(problem, name, engine)
    assert repr(fast_records) == repr(records)
    for key, leaf in model.items():
        assert torch.equal(fast_model[key], leaf)


@pytest.mark.parametrize("name", ["fedavg", "fedavg:momentum", "fedzmg"])
def test_steps_in_place_round_once_and_pack(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    problem = task(batch_norm=True)
    with monkeypatch.context() as patch:
        patch.setattr(sequential, "takes_out", lambda _: False)
        usual, _ = results(problem, name)
    in_place: list[bool] = []

    def add(base: Tree, scale: Any, other: Tree, *out: Tree) -> Tree:
        in_place.append(bool(out))
        return tree.add_scaled(base, scale, other, *out)

    monkeypatch.setattr(fedavg, "add_scaled", add)
    before = {key: leaf.clone() for key, leaf in problem.model.params().items()}
    alone, _ = results(problem, name)
    both = [Trial.of(name, 0), Trial.of(name, 0, client_lr=0.02)]
    packed, _ = simulate(problem, both, rounds=3, engine="sequential")
    assert any(in_place)
    for key, leaf in alone.items():
        assert torch.equal(packed.params[key], leaf)
        assert torch.equal(problem.model.params()[key], before[key])
        torch.testing.assert_close(leaf, usual[key], rtol=1e-5, atol=1e-5)


@rule_class
class Continued(SGD):
    """Momentum that begins with what the server sends."""

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        return context.shared


@rule_class
class Sending(Average):
    """An average that sends the initial model as momentum."""

    def init(self, params: Tree) -> State:
        return params

    def share(self, state: State) -> State:
        return state

    def update(self, params: Tree, state: State, cohort: Cohort) -> Any:
        return super().update(params, (), cohort)[0], state


def test_steps_in_place_leave_what_the_server_sent() -> None:
    own, problem = (
        Algorithm("own", Continued(lr=0.1, momentum=0.9), Sending()),
        task(batch_norm=False),
    )
    loop, mapped = (
        simulate(problem, [Trial(own)], rounds=3, engine=engine)[0].params
        for engine in ("sequential", "vectorized")
    )
    for name, leaf in loop.items():
        torch.testing.assert_close(leaf, mapped[name], rtol=0, atol=1e-5)
