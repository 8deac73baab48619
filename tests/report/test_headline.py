"""Warnings in the summary of a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedzmg.report.html.page import render
from fedzmg.results.reading import read
from fedzmg.results.study_result import study_result
from fedzmg.results.summary import summary

HELD = [0.1] * 15 + [0.55] * 5


@pytest.mark.parametrize(("server_lr", "said"), [(1.0, True), (10.0, False)])
def test_rates_on_the_border_of_the_grid_are_said_first(
    write_run: Any, grid: dict[str, Any], tmp_path: Path, server_lr: float, said: bool
) -> None:
    # The runs have client.lr = 0.1 and server.lr = 1; a grid that chose others is not theirs.
    grid["algorithms"]["fedzmg"]["best"]["options"] = {"client.lr": 0.1, "server.lr": server_lr}
    write_run("s/fedzmg/seed-0", "fedzmg", 0, HELD)
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "grid.json").write_text(json.dumps(grid))
    material = read([tmp_path / "s", tmp_path / "g"])
    words = (
        "The learning rates of fedzmg (client.lr) lie on the border of the grid that chose them: "
        "a wider grid may do better."
    )
    found = summary(study_result(material.studies[0]), [extra.content for extra in material.grids])
    assert (words in found) == said
    assert (words in render(material)) == said
