"""``fedzmg theory``: table, JSON, Markdown, figures, page; and the page of documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedzmg.cli import app
from fedzmg.errors import InputError
from fedzmg.report.figures.theory import CHARTS, theory
from fedzmg.report.html.theory import page as page_of
from fedzmg.report.tables.theory import markdown
from fedzmg.theory import CHECKS, FULL, QUICK, Finding, Value
from fedzmg.theory.finding import Size

ROOT = Path(__file__).parents[2]


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["theory", *words])


def test_table_names_claim_numbers_and_verdict() -> None:
    done = call("T2", "--quick")
    assert done.exit_code == 0, done.output
    for words in ("T2  Descent inequality", "fails as stated; holds with 3/(8L)", "2.25", "claim"):
        assert words in done.output
    assert re.search(r"1 checks? in \d+ s: 1 fail as stated", done.output)


def test_the_end_lists_all_checks_and_names_those_that_fail() -> None:
    done = call("T1", "T2", "E8", "--quick")
    assert done.exit_code == 0, done.output
    assert re.search(r"3 checks in \d+ s: 1 hold, 2 fail as stated \(T2, E8\)\n$", done.output)
    table = done.output[done.output.rindex("about") :]
    assert re.search(r"^T1 +holds +Geometry of the projection *$", table, re.MULTILINE)
    assert re.search(
        r"^T2 +fails as stated +Descent inequality; holds with 3/", table, re.MULTILINE
    )
    assert max(map(len, table.splitlines())) <= 80


def test_json_holds_everything() -> None:
    done = call("t1", "T2", "--json")
    data = json.loads(done.stdout)
    assert [finding["id"] for finding in data["findings"]] == ["T1", "T2"]
    [first, *_] = data["findings"][1]["lines"]
    assert (first["measured"], first["predicted"], first["agrees"]) == (2.25, 0.0, False)


def test_markdown_is_a_table() -> None:
    done = call("T2", "--markdown")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("| check | what | predicted")
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 7 for line in lines)


def test_figures_and_page_are_written(tmp_path: Path) -> None:
    words = ("T3", "--quick", "--plot", "--out", str(tmp_path / "f"))
    assert call(*words).exit_code == 0
    done = call(*words, "--html", str(tmp_path / "page.html"))
    assert done.exit_code == 0, done.output
    files = {path.name for path in (tmp_path / "f").iterdir()}
    assert files == {"T3.png", "T3.svg", "written.json"}
    assert f"figure  {tmp_path / 'f' / 'T3.png'}" in done.output
    page = (tmp_path / "page.html").read_text()
    assert 'id="T3"' in page
    assert page.count('<svg class="chart"') == 1
    # Self-contained: nothing is fetched.
    assert not re.search(r'(src|href)="(https?:)?//', page)


def test_a_figure_of_another_program_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "T3.svg").write_text("mine")
    done = call("T3", "--quick", "--plot", "--json", "--out", str(tmp_path))
    assert isinstance(done.exception, InputError)
    assert str(tmp_path / "T3.svg") in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["T3.svg"]
    assert (tmp_path / "T3.svg").read_text() == "mine"
    assert json.loads(done.stdout)["findings"]


def test_unknown_check_is_refused_before_work() -> None:
    done = call("T1", "T66")
    assert isinstance(done.exception, InputError)
    assert "'T66': did you mean 'T6'" in str(done.exception)
    assert not done.stdout


def test_exit_code_of_a_check_that_is_not_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(size: Size) -> Finding:
        return Finding("T1", "t", "c", "s", (Value("x", 1.0, 2.0, 0.1),))

    monkeypatch.setitem(CHECKS, "T1", broken)
    done = call("T1")
    assert done.exit_code == 1
    assert "not reproduced" in done.output


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = call("T1", "--html", str(tmp_path / "file" / "page.html"))
    assert isinstance(done.exception, InputError)
    assert str(tmp_path / "file") in str(done.exception)


def test_every_chart_draws_what_its_check_measures() -> None:
    """A renamed series would silently vanish from its figure."""
    for name in ("T3", "T7"):
        data = CHECKS[name](QUICK._replace(steps=200, samples=1000)).as_dict()
        assert set(CHARTS[name].strokes) <= set(data["series"]), name
        assert name in theory(data)


def test_angle_brackets_are_escaped() -> None:
    finding = Finding("T1", "<b>", "a < b", "s", (Value("<i>", 1.0, 1.0, 0.1),)).as_dict()
    page = page_of([finding], {})
    assert "&lt;b&gt;" in page
    assert "<i>" not in page


def test_documentation_names_every_check() -> None:
    text = (ROOT / "docs" / "theory.md").read_text()
    for name in CHECKS:
        assert re.search(rf"^\| \*\*{name}\*\* \|", text, re.MULTILINE), f"{name}: no table row"
        prose = text.split("## Every number")[0]
        assert f"[{name}](#" in prose, f"{name}: no claim links to it"


@pytest.mark.slow
def test_documentation_shows_what_the_command_prints() -> None:
    """Verdicts and labels are equal; last digits differ between machines."""
    text = (ROOT / "docs" / "theory.md").read_text()
    findings = [check(FULL).as_dict() for check in CHECKS.values()]
    printed = markdown(findings).splitlines()
    shown = [line for line in text.splitlines() if line in printed or line.startswith("| ")]
    heads = [line for line in printed if line.startswith("| **")]
    assert [line for line in shown if line.startswith("| **")] == heads
    whats = [line.split(" | ")[1] for line in printed if line.startswith("|  |")]
    assert [line.split(" | ")[1] for line in shown if line.startswith("|  |")] == whats


@pytest.mark.slow
def test_all_figures_can_be_drawn() -> None:
    for check in CHECKS.values():
        data = check(QUICK).as_dict()
        if data["id"] in CHARTS:
            assert set(CHARTS[data["id"]].strokes) <= set(data["series"]), data["id"]
        theory(data)
