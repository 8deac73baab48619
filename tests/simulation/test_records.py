"""Records of a round: message sizes by hand, and the training losses of a cohort."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedzmg import Trial, simulate
from fedzmg.data.plan import ClientBatch, full_pass
from fedzmg.engine.aggregate import Merger
from fedzmg.engine.local import Chunk, Outcome
from fedzmg.messages import Upload
from fedzmg.simulation.records import QUANTILES, loss_quantiles, message_size
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
    for longest, width in [(0, 1), (127, 1), (128, 2), (32767, 2), (32768, 4)]:
        assert message_size(value, longest).arrays == message.arrays + 100 * (width - 1)


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


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_quantiles_of_losses_are_numpys_whatever_the_chunks(data: st.DataObject) -> None:
    trials, cohort = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    total = trials * cohort
    number = st.floats(0, 100, width=32)
    losses = data.draw(st.lists(number, min_size=total, max_size=total))
    accepted = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
    size = data.draw(st.integers(1, total))
    stream = full_pass(1, 0, 1)
    batches = [ClientBatch(i // cohort, 0, 1, stream) for i in range(total)]
    merger = Merger(batches, trials, by_examples=True)
    for begin in range(0, total, size):
        part = range(begin, min(begin + size, total))
        # Rows are in another order than batches, as after a sort by length.
        own = list(part)[::-1]
        sent = torch.tensor([[0.0 if accepted[i] else torch.nan] for i in own])
        loss = torch.tensor([losses[i] for i in own])
        outcome = Outcome(Upload(Tree({"w": sent})), (), torch.ones(len(own), dtype=int), loss)
        merger.add(Chunk(list(part), list(range(len(own)))[::-1], outcome))
    merger.finish()
    table = merger.losses
    assert table.shape == (trials, cohort)
    for trial, row in enumerate(table.tolist()):
        first = trial * cohort
        kept = [losses[i] for i in range(first, first + cohort) if accepted[i]]
        # Six digits are recorded.
        expected = pytest.approx(np.quantile(kept, QUANTILES), rel=1e-5) if kept else None
        assert loss_quantiles(row) == expected
