"""Records of a round: message sizes by hand, and the training losses of a cohort."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedzmg import Trial, simulate
from fedzmg.data.plan import ClientBatch
from fedzmg.engine.local import Chunk, Outcome
from fedzmg.simulation.records import (
    QUANTILES,
    ClientLosses,
    integer_bytes,
    loss_quantiles,
    message_size,
)
from fedzmg.tree import Tree
from golden_problems import random_task


def test_arrays_scalars_and_whole_numbers_are_counted_apart() -> None:
    value = (
        Tree({"w": torch.zeros(3, 10, 2), "b": torch.zeros(3, 4, dtype=torch.float64)}),
        torch.zeros(3),
        torch.zeros(3, dtype=torch.int64),
        Tree({"ticks": torch.zeros(3, 100, dtype=torch.int32)}),
    )
    message = message_size(value, longest=20)
    assert message.arrays == 10 * 2 * 4 + 4 * 8 + 100 * 1
    assert message.scalars == 4 + 8
    # 41 values from -20 to 20 need six bits.
    assert message.bound == 10 * 2 * 4 + 4 * 8 + 100 * 6 // 8
    assert message_size(value, longest=200).arrays == message.arrays + 100
    assert message.times(3) == tuple(3 * part for part in message)


@pytest.mark.parametrize(("steps", "width"), [(0, 1), (127, 1), (128, 2), (32767, 2), (32768, 4)])
def test_integers_are_as_wide_as_they_must_be(steps: int, width: int) -> None:
    assert integer_bytes(steps) == width
    assert steps <= torch.iinfo({1: torch.int8, 2: torch.int16, 4: torch.int32}[width]).max


def test_records_add_up_and_skip_clients_that_sent_nothing() -> None:
    task = random_task(
        nn.Linear(3, 2), [4, 4, 4, 1], inputs=3, classes=2, cohort=4, batch_size=4,
        keep_partial=False,
    )  # fmt: skip
    [history] = simulate(task, [Trial.of("fedavg")], rounds=3, engine="vectorized")
    model = 4 * (3 * 2 + 2)
    for i, record in enumerate(history.records, 1):
        assert (record.clients, record.dropped) == (3, 0)
        assert (record.bytes_down, record.bytes_up) == (4 * model, 3 * model)
        assert record.bytes_up_bound == record.bytes_up
        assert (record.scalar_bytes_down, record.scalar_bytes_up) == (0, 3 * 8)
        assert record.bytes_kept == 0
        assert record.total_bytes_down == i * 4 * model
        assert record.total_bytes_up == i * 3 * (model + 8)


def batch(trial: int) -> ClientBatch:
    return ClientBatch(trial, 0, 1, None)  # type: ignore[arg-type]


def chunk(batches: list[int], losses: list[float]) -> Chunk:
    # Rows are in another order than batches, as after a sort by length.
    rows = list(range(len(batches)))[::-1]
    loss = torch.tensor(losses[::-1])
    return Chunk(batches, rows, Outcome(None, None, torch.zeros(len(rows)), loss), 0)  # type: ignore[arg-type]


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_quantiles_of_losses_are_numpys_whatever_the_chunks(data: st.DataObject) -> None:
    trials, cohort = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    total = trials * cohort
    number = st.floats(0, 100, width=32)
    losses = data.draw(st.lists(number, min_size=total, max_size=total))
    accepted = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
    order = data.draw(st.permutations(range(total)))
    cut = data.draw(st.integers(1, total))
    found = ClientLosses([batch(i // cohort) for i in range(total)], trials)
    for part in (order[:cut], order[cut:]):
        if part:
            own = torch.tensor([accepted[i] for i in part])
            found.add(chunk(list(part), [losses[i] for i in part]), own)
    for trial, row in enumerate(found.table().tolist()):
        first = trial * cohort
        kept = [losses[i] for i in range(first, first + cohort) if accepted[i]]
        # Six digits are recorded.
        expected = pytest.approx(np.quantile(kept, QUANTILES), rel=1e-5) if kept else None
        assert loss_quantiles(row) == expected
