"""The table of a study in a terminal, from kept results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedzmg.report.terminal import studies

RESULTS = Path(__file__).parents[2] / "results"


def shown(study: dict[str, Any], width: int) -> str:
    console = Console(width=width, record=True, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(studies.scores(study, width))
    return " ".join(capture.get().split())


@pytest.mark.parametrize("width", [80, 200])
def test_a_run_that_fell_back_is_named(width: int) -> None:
    study = json.loads((RESULTS / "mnist-by-writer-study" / "study.json").read_text())
    assert "fedadam, seed 0, fell back from 98.46 % to 12.75 %" in shown(study, width)


def test_neither_learning_nor_divergence_is_falling_back() -> None:
    for name in ("cifar100-study", "ablation-centring-study", "ablation-factors-adam-study"):
        study = json.loads((RESULTS / name / "study.json").read_text())
        assert "fell back" not in shown(study, 200)
