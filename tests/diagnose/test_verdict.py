"""Verdicts on measurements: kept tasks, few clients, frozen layers."""

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
from fedzmg.diagnose import ClientSpread, Layer, Measurement, Verdict, diagnose, judge
from fedzmg.diagnose.measure import WHOLE, Pair
from fedzmg.simulation import Trial, simulate
from fedzmg.tasks import Task

KEPT = Path(__file__).parents[2] / "results" / "diagnose"
CASES = {
    f"{path.stem}: {name}": case
    for path in sorted(KEPT.glob("*.json"))
    for name, case in json.loads(path.read_text())["cases"].items()
}


def layer(name: str, share: float | None, diversity: Pair, clients: int, **more: Any) -> Layer:
    found: dict[str, Any] = {
        "kind": "Linear", "inputs": 8, "parameters": 16, "energy": 1.0, "forbidden": share,
        "lost": 0.0, "distance": Pair(1.0, 0.5), "identity_error": 0.0,
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
    for name, preset in {"quadratic": {}, "logistic": {}, "quadratic, zero-sum start": {}}.items():
        task, _, zero = name.partition(", ")
        made = tasks.get(task, {"start": "zero_sum"} if zero else preset)
        verdict = diagnose(made, drifting=0, device="cpu").verdict
        assert verdict.summary == CASES[f"validation: {name}"]["verdict"]


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("task", ["quadratic", "logistic"])
def test_few_clients_never_promise_a_gain_where_all_of_them_show_a_loss(
    task: str, clients: int
) -> None:
    made = tasks.get(task)
    for seed in range(4):
        verdict = diagnose(made, clients=clients, drifting=0, seed=seed, device="cpu").verdict
        assert verdict.expect != "gain"
        assert any("so few clients" in line for line in verdict.evidence)
        if clients == 1:
            assert verdict.expect == "unclear"
            assert "no verdict" in verdict.summary


def test_few_clients_speak_where_it_is_plain() -> None:
    assert judge(measured(0.6, 0.5, Pair(2.0, 2.6), clients=4)).expect == "loss"
    assert judge(measured(0.6, 0.5, Pair(2.0, 1.6), clients=4)).expect == "gain"
    assert judge(measured(0.6, 0.5, Pair(2.0, 2.05), clients=4)).expect == "unclear"
    assert judge(measured(0.6, 0.5, Pair(2.0, 1.95), clients=4)).expect == "unclear"
    assert judge(measured(0.6, 0.5, Pair(2.0, 2.05), clients=6)).expect == "loss"
    one = judge(measured(0.9, 0.1, Pair(1.0, 1.0), clients=1))
    assert one.expect == "unclear"
    assert "one client" in one.summary
    assert not any("diverse" in line for line in one.evidence)  # nothing to compare with


def test_a_first_layer_that_loses_everything_is_a_loss() -> None:
    """Every example's inputs are all the same number, and there is no bias."""
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(240, 1)), 5, 1).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    task = Task.from_arrays(
        nn.Linear(5, 2, bias=False), x, y, np.arange(240) % 8, test=(x, y), cohort=2
    )
    found = diagnose(task, drifting=0, device="cpu")
    assert found.points[0].measurement.layers[0].diversity.after is None
    assert found.verdict.expect == "loss"


# Layers with one input per unit.


class Scaled(nn.Module):
    """A depthwise convolution of size one: a factor for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.dense = nn.Conv1d(4, 4, 1, groups=4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.scale(x[..., None])[..., 0])


class Shifted(nn.Module):
    """An embedding with a single row: a constant that the dense layer could learn as well."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.dense = nn.Embedding(1, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x + self.row(torch.zeros(len(x), dtype=torch.int64)))


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
        (Scaled(), 4, "scale.weight"),
    ],
)
def test_a_first_layer_that_cannot_learn_is_a_loss(
    model: nn.Module, inputs: int, name: str
) -> None:
    found = diagnose(signs(model, inputs), drifting=0, device="cpu")
    assert found.verdict.expect == "loss"
    assert f"the first layer ({name}) cannot learn" in found.verdict.summary
    assert f"{name} has one input per unit" in found.verdict.evidence[0]
    first = found.points[0].measurement.layers[0]
    assert first.lost == first.forbidden == pytest.approx(1.0)  # no bias stands in for it


def test_and_it_is_one() -> None:
    task = signs(nn.Linear(1, 2), 1)
    (free,), (frozen,) = (
        simulate(task, Trial.of("fedzmg", 0, client_lr=0.1, client_project=kind), device="cpu")
        for kind in ("none", "all")
    )
    assert free.metrics[-1] > 0.95
    assert frozen.metrics[-1] < 0.7


def test_a_constant_that_cannot_learn_is_named_and_the_next_layer_decides() -> None:
    verdict = diagnose(signs(Shifted(), 4), drifting=0, device="cpu").verdict
    assert verdict.expect == "little"
    assert "(dense.weight)" in verdict.summary
    assert "row.weight has one input per unit" in verdict.evidence[0]


def test_a_frozen_layer_inside_counts_by_its_gradient() -> None:
    found = measured(0.2, 0.1, Pair(2.0, 2.0))
    for energy, expect in ((0.3, "loss"), (0.05, "little")):
        inner = replace(found.layers[0], name="inner", inputs=1, energy=energy)
        verdict = judge(replace(found, layers=(found.layers[0], inner)))
        assert verdict.expect == expect
        assert ("inner cannot learn" in verdict.summary) is (expect == "loss")


# Nothing to judge by.


def zeros(model: nn.Module) -> Verdict:
    x, y = np.zeros((40, 6), np.float32), np.arange(40) % 3
    task = Task.from_arrays(model, x, y, np.arange(40) % 8, test=(x, y), cohort=2)
    return diagnose(task, drifting=0, device="cpu").verdict


def test_inputs_that_are_all_zero_give_no_verdict() -> None:
    verdict = zeros(nn.Linear(6, 3))
    assert verdict.expect == "unclear"
    assert "(weight) has no gradient (all inputs are zero" in verdict.summary
    assert "0 %" not in verdict.summary


def test_a_note_is_part_of_the_evidence() -> None:
    assert judge(measured(0.6, 0.0, Pair(2.0, 2.0)), notes=["mind this"]).evidence[-1] == (
        "mind this"
    )
