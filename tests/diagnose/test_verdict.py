"""Verdicts: kept tasks, the short training, frozen layers, the order of layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedzmg import Trial, simulate
from fedzmg.contract import Parts
from fedzmg.diagnose import Progress, diagnose, judge
from fedzmg.diagnose.diagnosis import RATES, excerpt, in_order_of_use
from fedzmg.evaluation import Metric
from fedzmg.models.initial import initial_params
from fedzmg.tasks import Task
from golden_problems import Net

KEPT = Path(__file__).parents[2] / "results" / "diagnose"
CASES = {
    f"{path.stem}: {name}": case
    for path in sorted(KEPT.glob("*.json"))
    for name, case in json.loads(path.read_text())["cases"].items()
}


@pytest.mark.parametrize("name", CASES)
def test_the_tasks_it_was_tested_on_are_judged_as_they_were(name: str) -> None:
    case, layer = CASES[name], diagnose(signs(nn.Linear(2, 2), 2), trial=0, device="cpu").points[0]
    tried = Progress(**case["progress"])
    verdict = judge(layer, tried)
    assert (verdict.expect, verdict.summary) == (case["expected"], case["verdict"])
    assert case["hit"] == (case["expected"] == case["actual"])


def test_the_short_training_by_a_loop_over_rates() -> None:
    task, rounds = signs(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), 4), 3
    found = diagnose(task, clients=4, examples=20, trial=rounds, drifting=0, device="cpu").progress
    assert found is not None
    small = excerpt(task, 4, 20, 0)[1]
    x, y = small.train.examples
    whole = replace(small, test=small.train.examples, protocol=replace(small.protocol, cohort=4))
    for project, loss, rate in zip(("none", "all"), found.losses, found.rates, strict=True):
        by_rate = {}
        for lr in RATES:
            trial = Trial.of("fedzmg", 0, client_lr=lr, client_project=project)
            [history] = simulate(whole, trial, rounds=rounds, engine="sequential", device="cpu")
            with torch.no_grad():
                by_rate[lr] = float(task.loss(history.model()(x), y).mean())
        assert min(by_rate, key=lambda lr: by_rate[lr]) == rate
        assert loss == pytest.approx(by_rate[rate], rel=1e-4)


@pytest.mark.parametrize(
    ("losses", "clients", "expect"),
    [((1.0, 0.8), 9, "gain"), ((1.0, 0.9), 9, "little"), ((1.0, 1.2), 9, "loss"),
     ((2.0, 2.0), 9, "unclear"), ((2.0, 1.9), 9, "gain"), ((2.0, 2.0 - 1e-9), 9, "unclear")],
)  # fmt: skip
def test_falls_of_the_loss_decide(losses: tuple[float, float], clients: int, expect: str) -> None:
    point = diagnose(signs(nn.Linear(2, 2), 2), trial=0, drifting=0, device="cpu").points[0]
    assert judge(point, Progress(6, clients, 2.0, losses, (0.1, 0.1))).expect == expect


def test_the_training_is_of_one_common_model_and_of_its_loss_alone() -> None:
    def below_chance(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(-1) == targets).float() - 1.0  # no metric of a simulation

    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    own = signs(model, 4)
    odd = replace(own, parts=Parts(personal=("last:1",)), metric=Metric("below", below_chance))
    plain, personal = (diagnose(task, drifting=0, device="cpu").progress for task in (own, odd))
    assert plain == personal
    one = diagnose(own, clients=1, drifting=0, device="cpu")
    assert (one.progress, one.verdict.expect) == (None, "unclear")


# Layers with one input per unit.


SCALED = Net(  # a depthwise convolution of size one: a factor for each channel
    lambda m, x: m.dense(m.scale(x[..., None])[..., 0]),
    scale=nn.Conv1d(4, 4, 1, groups=4),
    dense=nn.Linear(4, 2),
)


def signs(model: nn.Module, inputs: int) -> Task:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(400, inputs)).astype(np.float32)
    y = (x @ np.tile([1.0, -1.0], 2)[:inputs] > 0).astype(np.int64)
    return Task.from_arrays(
        model, x, y, np.arange(400) % 10, test=(x, y), cohort=5, batch_size=10, rounds=6
    )


@pytest.mark.parametrize(
    ("model", "inputs", "name"),
    [
        (nn.Linear(1, 2), 1, "weight"),
        (nn.Linear(1, 2, bias=False), 1, "weight"),
        (nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 2)), 1, "0.weight"),
        (SCALED, 4, "scale.weight"),
    ],
)
def test_a_first_layer_that_cannot_learn_is_named_and_promises_nothing(
    model: nn.Module, inputs: int, name: str
) -> None:
    found = diagnose(signs(model, inputs), drifting=0, device="cpu")
    assert found.verdict.expect in ("loss", "little")
    assert name in found.verdict.evidence[0]
    first = found.points[0].layers[0]
    assert first.lost == first.forbidden == pytest.approx(1.0)  # no bias stands in for it


def task_of(model: nn.Module, shape: tuple[int, ...] = (6,)) -> Task:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, *shape)).astype(np.float32) + 3, rng.integers(0, 3, 24)
    return Task.from_arrays(model, x, y, np.arange(24) % 8, test=(x, y), cohort=2)


def order_of(task: Task) -> list[str]:
    layout = in_order_of_use(task, initial_params(task.model, task.init, 0))
    assert layout == task.model.layout  # only the order may differ
    return [name for name, info in layout.items() if info.input_axes]


def head_first(m: Any, x: Tensor) -> Tensor:
    """Ask the head for its type before the body is used, where no function mode can look."""
    with torch._C.DisableTorchFunction():
        x = m.body(x.to(m.head.weight))
    return m.head(torch.relu(x))


def test_a_head_that_is_declared_before_the_body() -> None:
    layers = {"head": nn.Linear(4, 3), "unused": nn.Linear(2, 2), "body": nn.Linear(6, 4)}
    task = task_of(Net(head_first, **layers))
    assert order_of(task) == ["body.weight", "head.weight", "unused.weight"]
    found = diagnose(task, drifting=2, device="cpu")
    assert found.centred is not None
    for point in (found.points[0], found.centred):
        assert [layer.name for layer in point.layers][:2] == ["body.weight", "head.weight"]
    share = found.centred.layers[0].share.mean
    assert share == pytest.approx(0, abs=1e-10)  # of the body's inputs, which are centred
    assert any("leaves < 0.1 %" in line for line in found.verdict.evidence)


def test_attention_and_tied_weights() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        seen = m.tied_too(m.embed(x))
        return m.out(m.tied(m.attention(seen, seen, seen)[0]).mean(1))

    module: Any = Net(
        run, out=nn.Linear(8, 3), attention=nn.MultiheadAttention(8, 2, batch_first=True),
        tied=nn.Linear(8, 8), embed=nn.Linear(6, 8), tied_too=nn.Linear(8, 8),
    )  # fmt: skip
    module.tied_too.weight = module.tied.weight
    assert order_of(task_of(module, (5, 6))) == [
        "embed.weight", "tied.weight", "attention.in_proj_weight", "attention.out_proj.weight",
        "out.weight",
    ]  # fmt: skip
