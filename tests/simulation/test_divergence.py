"""A trial that diverged stays where it is, and what it lost on the way is accounted for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import Task, Trial, simulate
from fedzmg.data.federated import Examples

SIZES = [4, 4, 8]


def task(*, test: float = 1.0, poisoned: int | None = None) -> Task:
    """Three clients who all take part; test inputs are multiplied, one client's may be spoilt."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(3), SIZES)
    x, y = rng.normal(size=(16, 3)).astype(np.float32), rng.integers(0, 2, 16)
    whole = Task.from_arrays(
        nn.Linear(3, 2), x, y, owner, test=(x, y), cohort=3, batch_size=4, eval_every=2
    )
    if poisoned is not None:
        spoilt = torch.from_numpy(np.where((owner == poisoned)[:, None], np.nan, x))
        data = Examples(spoilt.to(torch.float32), whole.train.examples.y)
        whole = replace(whole, train=replace(whole.train, examples=data))
    return replace(whole, test=Examples(whole.test.x * test, whole.test.y))


@pytest.mark.parametrize("name", ["fedzmg", "fedadam", "scaffold"])
def test_a_loss_that_is_not_finite_freezes_the_model(name: str) -> None:
    """Also while clients still send what is fine: nothing comes back from the dead."""
    one, more = (
        simulate(task(test=np.nan), Trial.of(name), rounds=rounds, engine="vectorized")[0]
        for rounds in (1, 4)
    )
    assert one.diverged == more.diverged == 1
    assert [record.clients for record in more.records] == [3] * 4
    assert more.metrics == [0.0] * 3
    assert all(torch.equal(one.params[n], more.params[n]) for n in one.params)
    [alive] = simulate(task(), Trial.of(name), rounds=4, engine="vectorized")
    assert alive.diverged is None
    assert not all(torch.equal(one.params[n], alive.params[n]) for n in one.params)


def test_rounds_in_which_nobody_has_a_batch_are_no_divergence() -> None:
    """Nothing was sent, so nothing was lost; only three lost rounds in a row end a trial."""
    protocol = {"batch_size": 9, "keep_partial": False}
    small = replace(task(), protocol=task().protocol.with_options(protocol))
    [history] = simulate(small, Trial.of("fedavg"), rounds=5, engine="vectorized")
    assert [(r.clients, r.dropped, r.steps) for r in history.records] == [(0, 0, 0)] * 5
    assert history.diverged is None
    everybody = replace(task(), train=replace(task().train, examples=_not_a_number(task())))
    [lost] = simulate(everybody, Trial.of("fedavg"), rounds=5, engine="vectorized")
    assert [(r.clients, r.dropped) for r in lost.records] == [(0, 3)] * 5
    assert lost.diverged == 3


def _not_a_number(whole: Task) -> Examples:
    x, y = whole.train.examples
    return Examples(x * np.nan, y)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_uploads_that_were_refused_have_travelled(engine: str) -> None:
    [history] = simulate(task(poisoned=1), Trial.of("fedavg"), rounds=3, engine=engine)  # type: ignore[arg-type]
    model = 4 * (3 * 2 + 2)
    for rounds, record in enumerate(history.records, 1):
        assert (record.clients, record.dropped, record.steps) == (2, 1, 1 + 2)
        assert record.bytes_up == 3 * model
        assert record.total_bytes_up == rounds * 3 * (model + 8)
        assert record.total_bytes_down == rounds * 3 * model
