"""Examples of docs/extending.md run as printed, and its tables name everything in the contract."""

from __future__ import annotations

import re
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import Task, Trial, simulate
from fedzmg.cli.extending import load_algorithms
from fedzmg.contract import Aggregator, AlgorithmInfo, ClientRule, ServerRule
from fedzmg.messages import Asked, BatchOutputs, ClientContext, Cohort, FullPass, Rows, Upload
from fedzmg.testing import PROPERTIES, check

pytestmark = pytest.mark.usefixtures("forget_plugins")
TEXT = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
NOVA, *OTHERS = BLOCKS


def algorithms(block: str, path: Path) -> list[object]:
    """Run a block like the file it would be."""
    path.write_text(block)
    return list(load_algorithms(str(path)))


def named(kind: str) -> set[str]:
    """Return the names in the first column of the tables about a class."""
    tables = re.findall(rf"^\| \w+ of `{kind}` .*\n\|-.*\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    first = [line.split("|")[1] for table in tables for line in table.splitlines()]
    return {name for cell in first for name in re.findall(r"`(\w+)", cell)}


@pytest.mark.parametrize("rule", [ClientRule, ServerRule, Aggregator])
def test_every_method_is_documented(rule: type) -> None:
    assert named(rule.__name__) - {"pairing"} == {n for n in vars(rule) if not n.startswith("_")}


@pytest.mark.parametrize("kind", [ClientContext, FullPass, BatchOutputs, Upload, Cohort, Rows])
def test_every_field_is_documented(kind: type) -> None:
    more = Asked._fields if kind is ClientContext else ()
    assert named(kind.__name__) == {*kind._fields, *more}  # type: ignore[attr-defined]


def test_every_property_and_declaration_is_documented() -> None:
    rows = re.findall(r"^\| ([^|`]*) \|", TEXT.partition("## First")[0], re.MULTILINE)
    assert rows[1:] == list(PROPERTIES)
    assert named("AlgorithmInfo") == set(AlgorithmInfo.__dataclass_fields__)


def test_fednova_runs_from_a_file_of_ones_own_and_agrees_with_numpy(tmp_path: Path) -> None:
    assert len(NOVA.splitlines()) <= 45
    [info] = algorithms(NOVA, tmp_path / "my_fednova.py")
    assert isinstance(info, AlgorithmInfo)
    rng = np.random.default_rng(0)
    x, y, owner = rng.normal(size=(6, 2)), rng.normal(size=(6, 1)), [0, 1, 1, 1, 1, 1]
    task = Task.from_arrays(
        nn.Linear(2, 1, bias=False), x, y, owner, test=(x, y), cohort=2, batch_size=1, epochs=1,
        loss=lambda outputs, targets: 0.5 * ((outputs - targets) ** 2).sum(1), init="given",
    )  # fmt: skip
    [history] = simulate(task, Trial(info.algorithm), rounds=1, dtype=torch.float64)
    # The order of five single-example steps is the engine's: any of them is tried.
    start = task.model.params()["weight"].double().numpy()[0]
    found = history.params["weight"].numpy()[0]

    def local(order: tuple[int, ...]) -> np.ndarray:
        w = start.copy()
        for i in order:
            w -= 0.1 * (x[i] @ w - y[i, 0]) * x[i]
        return (start - w) / len(order)

    mean_steps = 1 / 6 * 1 + 5 / 6 * 5
    expected = [
        start - mean_steps * (1 / 6 * local((0,)) + 5 / 6 * local(order))
        for order in permutations(range(1, 6))
    ]
    assert min(np.abs(found - e).max() for e in expected) < 1e-12


QUICK = [name for name in PROPERTIES if name != "compiled step"]


@pytest.mark.parametrize(
    "block",
    [NOVA, *(pytest.param(b, marks=pytest.mark.slow) for b in OTHERS)],
    ids=["fednova", "trim", "head"],
)
def test_examples_keep_the_contract(block: str, tmp_path: Path) -> None:
    [example] = algorithms(block, tmp_path / "mine.py")
    result = check(example, only=QUICK)  # type: ignore[arg-type]
    assert result.ok, str(result)
