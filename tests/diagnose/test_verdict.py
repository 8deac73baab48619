"""Verdicts on measurements: kept tasks, few clients, frozen layers, the order of layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedzmg import tasks
from fedzmg.diagnose import ClientSpread, Layer, Measurement, diagnose, judge
from fedzmg.diagnose.diagnosis import in_order_of_use
from fedzmg.diagnose.measure import WHOLE, Pair
from fedzmg.models.initial import initial_params
from fedzmg.tasks import Task
from golden_problems import Net

KEPT = Path(__file__).parents[2] / "results" / "diagnose"
CASES = {
    f"{path.stem}: {name}": case
    for path in sorted(KEPT.glob("*.json"))
    for name, case in json.loads(path.read_text())["cases"].items()
}


def layer(name: str, share: float | None, diversity: Pair, clients: int, **more: Any) -> Layer:
    found: dict[str, Any] = {
        "kind": "Linear", "inputs": 8, "parameters": 16, "energy": 1.0, "forbidden": share,
        "lost": 0.0, "distance": Pair(1.0, 0.5),
    }  # fmt: skip
    spread = ClientSpread(share, None, share, share)
    shares = (share,) * clients
    return Layer(
        name=name, share=spread, diversity=diversity, shares=shares, **{**found, **more}
    )  # fmt: skip


def measured(
    share: float | None, lost: float, diversity: Pair, clients: int = 50, name: str = "first"
) -> Measurement:
    whole = layer(WHOLE, share, diversity, clients, inputs=0, lost=lost)
    return Measurement((layer(name, share, diversity, clients),), whole)


@pytest.mark.parametrize("name", CASES)
def test_the_tasks_it_was_tested_on_are_judged_as_they_were(name: str) -> None:
    case = CASES[name]
    first = case["verdict"].partition("gradient (")[2].partition(")")[0]
    found = measured(
        case["first layer's mean share"], case["lost"], Pair(**case["first layer's diversity"]),
        clients=6, name=first or "weight",
    )  # fmt: skip
    verdict = judge(found, inputs=case["inputs"])
    assert (verdict.expect, verdict.summary) == (case["expected"], case["verdict"])


def test_the_tasks_that_come_along_are_judged_as_they_were() -> None:
    for name in ("quadratic", "logistic", "quadratic, zero-sum start"):
        task, _, zero = name.partition(", ")
        made = tasks.get(task, {"start": "zero_sum"} if zero else {})
        verdict = diagnose(made, drifting=0, device="cpu").verdict
        assert verdict.summary == CASES[f"validation: {name}"]["verdict"]


@pytest.mark.parametrize("clients", [1, 2, 3, 5])
@pytest.mark.parametrize("task", ["quadratic", "logistic"])
def test_few_clients_never_promise_a_gain_where_all_of_them_show_a_loss(
    task: str, clients: int
) -> None:
    made = tasks.get(task)
    for seed in range(3):
        verdict = diagnose(made, clients=clients, drifting=0, seed=seed, device="cpu").verdict
        assert verdict.expect != "gain"
        assert clients > 1 or verdict.expect == "unclear"


@pytest.mark.parametrize(
    ("share", "lost", "after", "clients", "expect"),
    [
        (0.6, 0.5, 2.6, 4, "loss"), (0.6, 0.5, 1.6, 4, "gain"), (0.6, 0.5, 2.05, 4, "unclear"),
        (0.6, 0.5, 1.95, 4, "unclear"), (0.6, 0.5, 2.05, 6, "loss"), (0.9, 0.1, 2.0, 1, "unclear"),
    ],
)  # fmt: skip
def test_few_clients_speak_where_it_is_plain(
    share: float, lost: float, after: float, clients: int, expect: str
) -> None:
    assert judge(measured(share, lost, Pair(2.0, after), clients=clients)).expect == expect


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
def test_a_first_layer_that_cannot_learn_is_a_loss(
    model: nn.Module, inputs: int, name: str
) -> None:
    found = diagnose(signs(model, inputs), drifting=0, device="cpu")
    assert found.verdict.expect == "loss"
    assert name in found.verdict.summary
    first = found.points[0].layers[0]
    assert first.lost == first.forbidden == pytest.approx(1.0)  # no bias stands in for it


def test_a_frozen_layer_inside_counts_by_its_gradient() -> None:
    found = measured(0.2, 0.1, Pair(2.0, 2.0))
    for energy, expect in ((0.3, "loss"), (0.05, "little")):
        inner = replace(found.layers[0], name="inner", inputs=1, energy=energy)
        assert judge(replace(found, layers=(found.layers[0], inner))).expect == expect


def test_inputs_that_are_all_zero_give_no_verdict() -> None:
    x, y = np.zeros((40, 6), np.float32), np.arange(40) % 3
    task = Task.from_arrays(nn.Linear(6, 3), x, y, np.arange(40) % 8, test=(x, y), cohort=2)
    verdict = diagnose(task, drifting=0, device="cpu").verdict
    assert verdict.expect == "unclear"
    assert "(weight) has no gradient" in verdict.summary


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
    assert "first layer's gradient (body.weight)" in found.verdict.summary
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
