"""The first layer is the one that a model uses first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedzmg import tasks
from fedzmg.diagnose import diagnose
from fedzmg.diagnose.clients import DECLARED, in_order_of_use
from fedzmg.models.initial import initial_params
from fedzmg.tasks import Task


def task_of(model: nn.Module, shape: tuple[int, ...] = (6,)) -> Task:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, *shape)).astype(np.float32) + 3, rng.integers(0, 3, 24)
    return Task.from_arrays(model, x, y, np.arange(24) % 8, test=(x, y), cohort=2)


def order_of(task: Task) -> tuple[list[str], tuple[str, ...]]:
    layout, notes = in_order_of_use(task, initial_params(task.model, task.init, 0))
    assert layout == task.model.layout  # only the order may differ
    return [name for name, info in layout.items() if info.input_axes], notes


class HeadFirst(nn.Module):
    """Declares its last layer first, and asks that for its type and shape before it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.unused, self.body = nn.Linear(4, 3), nn.Linear(2, 2), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert self.head.weight.size(0) == len(self.head.weight)
        x = x.to(self.head.weight).to(self.head.weight.dtype)
        return self.head(torch.relu(self.body(x)))


def test_a_head_that_is_declared_before_the_body() -> None:
    task = task_of(HeadFirst())
    assert order_of(task) == (["body.weight", "head.weight", "unused.weight"], ())
    found = diagnose(task, drifting=2, device="cpu")
    assert "first layer's gradient (body.weight)" in found.verdict.summary
    assert found.centred is not None
    for point in (found.points[0].measurement, found.centred):
        assert [layer.name for layer in point.layers][:2] == ["body.weight", "head.weight"]
    share = found.centred.layers[0].share.mean
    assert share == pytest.approx(0, abs=1e-10)  # of the body's inputs, which are centred
    assert any("leaves less than 0.1 %" in line for line in found.verdict.evidence)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.tied = nn.Linear(8, 8)
        self.embed = nn.Linear(6, 8)
        self.tied_too = nn.Linear(8, 8)
        self.tied_too.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        seen = self.tied_too(self.embed(x))
        mixed, _ = self.attention(seen, seen, seen)
        return self.out(self.tied(mixed).mean(1))


def test_attention_and_tied_weights() -> None:
    names, notes = order_of(task_of(Attending(), (5, 6)))
    assert names == [
        "embed.weight", "tied.weight", "attention.in_proj_weight", "attention.out_proj.weight",
        "out.weight",
    ]  # fmt: skip
    assert notes == ()


class Opaque(HeadFirst):
    """Uses its body where nobody can look, as compiled code does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            x = self.body(x)
        return self.head(torch.relu(x))


def test_what_cannot_be_followed_is_taken_as_declared_and_said() -> None:
    task = task_of(Opaque())
    assert order_of(task) == (["head.weight", "unused.weight", "body.weight"], (DECLARED,))
    assert DECLARED in diagnose(task, drifting=0, device="cpu").verdict.evidence


def test_presets_use_their_layers_as_they_declare_them() -> None:
    for name in ("plays", "quadratic"):
        task = tasks.get(name)
        declared = [key for key, info in task.model.layout.items() if info.input_axes]
        assert order_of(task) == (declared, ())
