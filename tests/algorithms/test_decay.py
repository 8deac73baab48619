"""Weight decay on the server: torch's own answer, sums of columns, schedules, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given as hypotheses
from hypothesis import settings
from hypothesis import strategies as st
from known_answers import ENGINES, close, drive, named
from torch import nn

from fedzmg import algorithms
from fedzmg.algorithms import Adam, Average, Projected
from fedzmg.algorithms.options import configure
from fedzmg.algorithms.schedule import ServerSchedule
from fedzmg.algorithms.wrapper import ServerDecay
from fedzmg.errors import InputError
from golden_problems import P3, models, quadratic_task

DELTAS = [[0.5, -2.0], [0.25, 1.0], [-1.0, 0.5]]


@hypotheses(st.floats(0.01, 0.5), st.floats(0, 1), st.booleans())
@settings(max_examples=20)
def test_adam_with_decay_is_torchs_adamw(lr: float, decay: float, bound: bool) -> None:
    """Without an epsilon, which the two put in different places."""
    weight = nn.Parameter(torch.tensor([1.0, -1.0], dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=lr, betas=(0.9, 0.99), eps=0.0, weight_decay=decay)
    rule = ServerDecay(Adam(lr, 0.9, 0.99, 0.0), decay)
    for delta, found in zip(DELTAS, drive(rule, [1.0, -1.0], DELTAS, bound=bound), strict=True):
        weight.grad = torch.tensor(delta, dtype=torch.float64)
        optimizer.step()
        assert found == pytest.approx(weight.tolist(), abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_sums_of_columns_shrink_where_a_clients_decay_would_be_undone(engine: str) -> None:
    """By ``1 - decay lr`` a round; the moments of the server see nothing of it."""
    task, start = quadratic_task(P3), sum(P3["w0"])
    bare = named("fedzmg-adam:projected", client_decay=None)
    decayed = configure(bare, {"server.decay": 0.5})
    for round_, model in enumerate(models(task, decayed, engine=engine, rounds=3), 1):
        close(model["weight"].sum(), start * (1 - 0.5 * 0.1) ** round_, 1e-12)
    on_clients = bare.with_options({"client.decay": 0.5})
    for model in models(task, on_clients, engine=engine, rounds=3):
        close(model["weight"].sum(), start, 1e-12)


def test_a_schedule_scales_the_decay_too() -> None:
    """Without updates the decay shows alone, at half the rate in every round."""
    rule = ServerSchedule(ServerDecay(Average(0.5), 0.4), "exponential", gamma=0.5)
    found = drive(rule, [1.0], [[0.0]] * 3)
    assert found == [pytest.approx([w]) for w in (0.8, 0.8 * 0.9, 0.8 * 0.9 * 0.95)]


def test_decay_is_outside_of_a_projection() -> None:
    inner = Projected(Adam())
    found = configure(algorithms.get("fedzmg-adam:projected"), {"server.decay": 0.01})
    assert found.server == ServerDecay(inner, 0.01)
    assert found.options()["server.decay"] == 0.01


@pytest.mark.parametrize("name", ["feddyn", "adabest", "mfl", "fedlion"])
def test_a_server_without_a_rate_is_refused(name: str) -> None:
    algorithm = algorithms.get(name)
    with pytest.raises(
        InputError, match=f"{name}, server.decay: .*{type(algorithm.server).__name__}"
    ):
        configure(algorithm, {"server.decay": 0.1})
