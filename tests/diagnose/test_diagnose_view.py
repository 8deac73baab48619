"""Table and figure of a diagnosis."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from torch import nn

from fedzmg.diagnose import diagnose
from fedzmg.report.terminal import views
from fedzmg.tasks import Task

LONG = "encoder_of_the_first_branch_of_the_network"


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(160, 6)).astype("float32") + 1, rng.integers(0, 3, 160)
    model = nn.Sequential()
    model.add_module(LONG, nn.Linear(6, 5))
    model.add_module("[bold]", nn.Linear(5, 3))  # not markup
    task = Task.from_arrays(model, x, y, np.arange(160) % 16, test=(x, y), cohort=4)
    return diagnose(task, along=8, every=1, device="cpu").as_dict()


def shown(data: dict[str, Any], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(views.diagnosis(data, width))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_nothing_is_cut_at_any_width(data: dict[str, Any], width: int) -> None:
    text = shown(data, width)
    lines = text.splitlines()
    assert max(map(cell_len, lines)) <= width
    assert "…" not in text
    table = views._layers(data)
    assert all(any(c.text in line for line in lines) for row in table.rows for c in row[1:])
    names = "".join(line.split("  ")[0].strip() for line in lines)
    assert f"{LONG}.weight" in names
    assert "[bold].weight" in names
    rounds = [word for line in lines if line.startswith("layer") for word in line.split()]
    assert [word for word in rounds if word.isdigit()] == [str(n) for n in range(9)]


def test_no_verdict_has_a_table_and_a_figure(data: dict[str, Any]) -> None:
    from fedzmg.report.figures import diagnosis

    verdict = {**data["verdict"], "expect": "unclear"}
    undecided = {**data, "points": data["points"][:1], "verdict": verdict}
    assert "verdict  " in shown(undecided, 80)
    assert diagnosis(undecided).title.endswith("before training: no verdict")


def test_legends_lie_below_the_panels_and_inside_the_figure(data: dict[str, Any]) -> None:
    from fedzmg.report.figures import diagnosis

    drawn = diagnosis(data)
    drawn.canvas.draw()
    assert len(drawn.axes) == 3
    for axes in drawn.axes:
        legend = axes.get_legend()
        assert legend is not None
        box = legend.get_window_extent()
        assert box.y1 < axes.xaxis.label.get_window_extent().y0
        assert box.y0 > 0
        assert box.x0 > 0
        assert box.x1 < drawn.bbox.width
