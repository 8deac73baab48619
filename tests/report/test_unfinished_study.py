"""A study that was interrupted: one section, its own labels, and no word that is not true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedzmg.cli import app
from fedzmg.report.html.page import render
from fedzmg.report.tables.study import scores
from fedzmg.results.reading import read
from fedzmg.results.study_result import study_result
from fedzmg.results.summary import summary

RISING = [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0]
ASKED = """
task = "digits"
label = "trial"
seeds = [0, 1, 2]
rounds = 10
window = 4
tests = "reference"
thresholds = []

[algorithms.ours]
algorithm = "fedavg"
label = "FedAvg, ours"

[algorithms."the other"]
algorithm = "fedavg"
label = "plain"

[algorithms.fedadam]
"""


@pytest.fixture
def stopped(write_run: Any, tmp_path: Path) -> Path:
    """The first variant is finished, the second at round 3 of 10, the third not begun."""
    for seed in range(3):
        write_run(f"s/ours/seed-{seed}", "fedavg", seed, RISING)
        write_run(f"s/the-other/seed-{seed}", "fedavg", seed, RISING[:3], rounds=10, lr=0.2)
    place = tmp_path / "s"
    (place / "study.toml").write_text(ASKED)
    return place


def test_variants_stand_in_one_section_under_their_labels(stopped: Path) -> None:
    material = read([stopped])
    [study] = material.studies
    assert list(study.members) == ["FedAvg, ours", "plain"]
    assert study.awaited == {"fedadam": 3}
    page = render(material, drawn={})
    assert page.count('href="#s0"') == 1
    assert "#s1" not in page
    assert "2 of 3 algorithms" in page


def test_sentences_are_true_of_what_is_there(stopped: Path) -> None:
    result = study_result(read([stopped]).studies[0])
    assert summary(result) == [
        "FedAvg, ours ends at 100.00 % final accuracy on digits, trial (mean over 3 seeds).",
        "It first holds 50 % (mean of 4 evaluations) after 5 rounds.",
        "6 of 9 runs are not finished.",
    ]
    assert "Still to come: fedadam (3 runs)." in result.notes
    assert "No late-stage mean: plain has yet to hold the threshold." in result.notes
    assert not any("seed" in note and "no test" in note for note in result.notes)
    ours, plain = scores(result).rows
    assert [cell.text for cell in plain[2:6]] == ["not yet"] * 4
    assert plain[6].text == "6.0 so far"
    assert ours[6].text == "20.0"


def test_a_copy_of_it_is_called_unfinished(stopped: Path, tmp_path: Path) -> None:
    def keep(source: Path, name: str) -> str:
        done = CliRunner().invoke(app, ["keep", str(source), "--out", str(tmp_path / name)])
        assert done.exit_code == 0
        return done.stderr

    words = f"the study {stopped} is not finished (3 of 9 trained); keep it again when it is\n"
    assert keep(stopped, "whole") == f"fedzmg: {words}"
    assert "is not finished; keep it again" in keep(stopped / "the-other" / "seed-0", "run")
    assert keep(stopped / "ours", "finished") == ""
    assert len(read([tmp_path / "whole"]).studies) == 1
