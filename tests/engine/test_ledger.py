"""The byte ledger against sizes computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import Task, Trial, simulate
from fedzmg.engine.message_size import integer_bytes, weigh
from fedzmg.tree import Tree


def test_arrays_scalars_and_whole_numbers_are_told_apart() -> None:
    value = (
        Tree({"w": torch.zeros(3, 10, 2), "b": torch.zeros(3, 4, dtype=torch.float64)}),
        torch.zeros(3),
        torch.zeros(3, dtype=torch.int64),
        Tree({"ticks": torch.zeros(3, 100, dtype=torch.int32)}),
    )
    message = weigh(value, longest=20)
    assert message.arrays == 10 * 2 * 4 + 4 * 8 + 100 * 1
    assert message.scalars == 4 + 8
    # 41 values from -20 to 20 need six bits.
    assert message.bound == 10 * 2 * 4 + 4 * 8 + 100 * 6 // 8
    assert weigh(value, longest=200).arrays == message.arrays + 100
    assert message.times(3) == tuple(3 * part for part in message)


@pytest.mark.parametrize(("steps", "width"), [(0, 1), (127, 1), (128, 2), (32767, 2), (32768, 4)])
def test_integers_are_as_wide_as_they_must_be(steps: int, width: int) -> None:
    assert integer_bytes(steps) == width
    assert steps <= torch.iinfo({1: torch.int8, 2: torch.int16, 4: torch.int32}[width]).max


def test_records_add_up_and_skip_clients_that_sent_nothing() -> None:
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(4), [4, 4, 4, 1])
    x, y = rng.normal(size=(13, 3)), rng.integers(0, 2, 13)
    task = Task.from_arrays(
        nn.Linear(3, 2), x, y, owner, test=(x, y), cohort=4, batch_size=4, keep_partial=False
    )
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


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [(1_690_046, 6_760_184), (2_214_532, 8_858_128), (4_022_850, 16_091_400)],
)
def test_the_papers_models_weigh_what_they_should(parameters: int, expected: int) -> None:
    assert weigh(Tree({"w": torch.zeros(1, parameters)}), 0).arrays == expected
