"""The sentences at the head of a page, where they could be taken to contradict the tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedzmg.report.html.page import render
from fedzmg.report.tables.scores import scores
from fedzmg.results.reading import read
from fedzmg.results.study_result import study_result
from fedzmg.results.summary import summary

# The last tenth is above the threshold of 0.5, no mean of four evaluations is.
LATE = [0.1] * 18 + [0.52, 0.52]
HELD = [0.1] * 15 + [0.55] * 5


def test_a_final_value_above_a_threshold_is_not_said_to_have_missed_it(
    write_run: Any, tmp_path: Path
) -> None:
    for name in ("fedzmg", "fedavg"):
        write_run(f"s/{name}/seed-0", name, 0, LATE)
    result = study_result(read([tmp_path / "s"]).studies[0])
    assert result.scores[0].mean == pytest.approx(0.52)
    assert "None holds 50 % (mean of 4 evaluations)." in summary(result)
    page = render(read([tmp_path / "s"])).replace("\u00a0", " ")
    assert "First to hold 50 %" in page
    assert "reaches 50 %" not in page


def test_runs_that_hold_it_alone_are_counted(write_run: Any, tmp_path: Path) -> None:
    for name in ("fedzmg", "fedavg"):
        for seed in range(3):
            lucky = name == "fedzmg" and seed == 1
            write_run(f"s/{name}/seed-{seed}", name, seed, HELD if lucky else LATE)
    result = study_result(read([tmp_path / "s"]).studies[0])
    assert (
        "None holds 50 % (mean of 4 evaluations) on average over its seeds, though 1 of 6 runs "
        "does."
    ) in summary(result)
    assert scores(result).rows[0][5].text == "19 (1 of 3)"


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
        "The rates of fedzmg (client.lr) lie on the border of the grid that chose them: a wider "
        "grid may do better."
    )
    found = summary(study_result(material.studies[0]), [extra.content for extra in material.grids])
    assert (words in found) == said
    assert (words in render(material)) == said
