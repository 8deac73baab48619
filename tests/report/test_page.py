"""The page: whole in itself, the same every time, and true to the numbers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from scipy import special
from typer.testing import CliRunner

from fedzmg.cli import app
from fedzmg.report.figures import curves, heat_maps
from fedzmg.report.html import sections
from fedzmg.report.html.page import render
from fedzmg.report.tables.study import scores
from fedzmg.results import paper
from fedzmg.results.formatting import MINUS, NONE
from fedzmg.results.reading import read
from fedzmg.results.study_result import study_result, summary

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Outline(HTMLParser):
    """Checks that tags close in order and remembers what is on the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [values["id"]] if values.get("id") else []
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            target = values.get(name)
            if target is not None and not target.startswith(("#", "data:")):
                self.outside.append(target)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).replace("\u00a0", " ").replace(MINUS, "-").split())


def test_page_is_whole_in_itself(study_page: str) -> None:
    page = Outline(text := study_page)
    assert page.open == []
    assert page.outside == []
    assert len(page.ids) == len(set(page.ids))
    assert "://" not in text
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    assert {one[1:] for one in re.findall(r"#s0-[\w-]+", text)} <= set(page.ids)


def test_policy_allows_only_the_script_of_the_page(study_page: str) -> None:
    [script] = re.findall(r"<script>(.*?)</script>", study_page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = re.findall(
        r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', study_page
    )
    assert policy.split("; ") == [
        "default-src 'none'", f"script-src 'sha256-{digest}'", "style-src 'unsafe-inline'",
        "img-src data:", "base-uri 'none'", "form-action 'none'",
    ]  # fmt: skip


def commands(*places: Path) -> list[list[str]]:
    """Return the words of every command that the page offers."""
    blocks = sections.reproduction(read(list(places))).blocks
    return [shlex.split(line) for one in blocks if one.kind == "commands" for line in one.content]


KEPT_GRID = (Path(__file__).parents[2] / "results/cifar100-grid/grid.json").read_text()


def test_commands_of_a_grid_are_recorded_as_they_were_given(
    study: Path, grid: dict[str, Any], tmp_path: Path
) -> None:
    made = "fedzmg grid digits.toml --set rounds=40 --out runs/g"
    for name, text in {"a": json.dumps({"command": made}), "b": json.dumps({}), "c": "{"}.items():
        (tmp_path / "g" / name).mkdir(parents=True)
        (tmp_path / "g" / name / "manifest.json").write_text(text)
    (tmp_path / "g" / "grid.json").write_text(json.dumps(grid))
    (tmp_path / "g" / "grid.toml").write_text('task = "digits"\n')
    assert commands(study, tmp_path / "g").count(made.split()) == 1


def test_names_cannot_break_out(write_run: Any, tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>&'"
    write_run("all/x", bad, 0, [0.1, 0.2, 0.3, 0.4])
    material = read([tmp_path / "all"])
    chart = curves(study_result(material.studies[0]))
    text = render(material, drawn={"curves": chart})  # type: ignore[dict-item]
    assert "<script>alert" not in text
    assert bad in Outline(text).text


@pytest.fixture
def pets(write_run: Any) -> Path:
    """A run of a task that a user made in Python."""
    made: Path = write_run("all/pets", "fedavg", 0, [0.1, 0.2], task="pets",
                           manifest={"command": "Python"})  # fmt: skip
    return made


@pytest.mark.parametrize(
    ("name", "file", "call"),
    [
        ("run", "spec.toml", "fedzmg.compare(task, ..., out=DIR)"),
        ("validate", "spec.toml", "fedzmg.compare(task, ..., out=DIR)"),
        ("verify", "", "verify(DIR, task=task)"),
        ("diagnose", "", "fedzmg.diagnose.diagnose(task, params=...)"),
    ],
)
def test_commands_name_the_call_to_make_instead(
    pets: Path, name: str, file: str, call: str
) -> None:
    done = CliRunner().invoke(app, [name, str(pets / file)])
    assert str(done.exception).startswith(f"{pets / file} is of 'pets'")
    assert str(done.exception).endswith(call)


def charts(text: str) -> list[ElementTree.Element]:
    return [
        ElementTree.fromstring(one.replace(" data-legend", ""))
        for one in re.findall(r'<svg class="chart.*?</svg>', text, re.DOTALL)
    ]


def test_figures_carry_series_for_the_script_and_colours_of_the_page(study_page: str) -> None:
    found = {one.get("aria-label", ""): one for one in charts(study_page)}
    assert list(found) == [
        "digits, 3 seeds: test accuracy by round", "digits: fedzmg minus each of the others",
        "digits: final accuracy of every seed", "digits: test accuracy by traffic",
    ]  # fmt: skip
    for chart in found.values():
        assert chart.get("role") == "img"
        styles = " ".join(one.get("style", "") for one in chart.iter())
        assert "var(--ink)" in styles
        # Every ink and paper follows the theme of the page.
        assert not re.search("#(222222|ffffff|000000|0072b2)", styles)
    curves = next(iter(found.values()))
    lines = {one.get("data-series", ""): one for one in curves.iter() if one.get("data-points")}
    assert list(lines) == ["fedavg", "fedzmg"]
    points = lines["fedzmg"].get("data-points", "").split("\n")
    assert (len(points), points[-1]) == (10, "round 10: 80.00 ± 20.00 %")
    ends = {}
    for name, line in lines.items():
        data = line[0].get("d", "")
        assert data.count("L") == 9
        ends[name] = float(data.split()[-1])
    # Higher is further up.
    assert ends["fedzmg"] < ends["fedavg"]


def test_paper_stands_beside_its_own_task(write_run: Any, tmp_path: Path) -> None:
    for name, top in (("fedzmg", 0.4), ("fedavg", 0.35), ("fedprox", 0.01)):
        for seed in (0, 1):
            write_run(
                f"all/{name}/{seed}", name, seed, [0.1, *([top] * 9)], every=5, task="cifar100"
            )
    text = Outline(render(read([tmp_path / "all"]), drawn={})).text
    assert "cifar100 beside the paper's CIFAR-100" in text
    # The windows that end after rounds 16 and 21 have means of 32.5 and 40 %.
    for line in (
        "index at 20 % fedzmg 15 95 -80", "index at 33 % fedzmg 20 250 -230",
        "late-stage mean fedzmg 40.00 % 39.50 % +0.50 %", "index at 33 % fedavg 20 805 -785",
        f"final accuracy fedavg 35.00 % {NONE}",
        "paired t fedavg +∞ +20.716", "p, uncorrected fedavg 0 3.208e-05",
    ):  # fmt: skip
        assert line in text
    assert "50 rounds instead of 1000, 2 cohort instead of 10, 2 seeds instead of 5" in text
    assert "stand-in" not in text


def test_paper_numbers_agree_with_each_other() -> None:
    """Each printed p is the two-sided Student value of its t with four degrees of freedom."""
    datasets = {dataset.title: dataset for dataset in paper.COUNTERPARTS.values()}
    assert set(datasets) == {"EMNIST", "CIFAR-100", "Shakespeare"}
    for dataset in datasets.values():
        assert set(dataset.tests) == {"fedavg", "fedadam"}
        for t, p in dataset.tests.values():
            assert 2 * special.stdtr(4, -t) == pytest.approx(p, rel=2e-3)


def test_grids_and_heterogeneity_alone_make_a_page(grid: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "grid.json").write_text(json.dumps(grid))
    report = {
        "name": "cifar100", "unit": "examples", "entropy": "classes", "reference": "pooled",
        "total": 500, "sample": 3, "seed": 0, "labels": ["0", "1"], "clients": [],
        "summary": {"entropy": {"mean": 0.5, "sd": 0.1}},
    }  # fmt: skip
    (tmp_path / "heterogeneity.json").write_text(json.dumps(report))
    text = render(read([tmp_path]), drawn={"grid-fedzmg": heat_maps(grid, "fedzmg")})
    words = Outline(text).text
    assert "A grid over client.lr and server.lr on digits." in words
    assert "The clients of 1 data set, described by their data" in words
    assert "on the border" in words
    assert "entropy 0.500 ± 0.100 0.56 ± 0.07 -0.060" in words
    assert [one.get("aria-label", "").split(":")[0] for one in charts(text)] == ["digits"]


@pytest.mark.parametrize("kind", ["grid", "study"])
def test_a_reduced_protocol_says_so_in_every_heading_of_its_task(kind: str) -> None:
    kept = Path(__file__).parents[2] / "results" / f"shakespeare-by-role-reduced-{kind}"
    text = render(read([kept]), drawn={})
    headings = re.findall(r"<(?:title|h1|h2|h3)>([^<]*shakespeare-by-role[^<]*)<", text)
    assert len(headings) >= 3
    assert all("reduced protocol" in heading for heading in headings), headings


def test_grids_and_studies_share_a_page(
    study: Path, grid: dict[str, Any], write_run: Any, tmp_path: Path
) -> None:
    write_run("other/a", "fedavg", 0, [0.1, 0.2, 0.3], task="plays")
    places = [study, tmp_path / "other"]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "grid.json").write_text(json.dumps({**grid, "label": name}))
        places.append(tmp_path / name)
    page = Outline(render(read(places), drawn={}))
    sections = r"s\d+|grids|heterogeneity|reproduce"
    found = [one for one in page.ids if re.fullmatch(sections, one)]
    assert found == ["s0", "s1", "grids", "reproduce"]
    assert len(page.ids) == len(set(page.ids))
    for words in ("digits, first", "digits, second"):
        assert words in page.text


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


def test_an_unfinished_study_is_described_truly(write_run: Any, tmp_path: Path) -> None:
    """The first variant is finished, the second at round 3 of 10, the third not begun."""
    rising = [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0]
    for seed in range(3):
        write_run(f"s/ours/seed-{seed}", "fedavg", seed, rising)
        write_run(f"s/the-other/seed-{seed}", "fedavg", seed, rising[:3], rounds=10, lr=0.2)
    place = tmp_path / "s"
    (place / "study.toml").write_text(ASKED)
    material = read([place])
    [study] = material.studies
    assert list(study.members) == ["FedAvg, ours", "plain"]
    assert study.awaited == {"fedadam": 3}
    page = render(material, drawn={})
    assert page.count('href="#s0"') == 1
    assert "#s1" not in page
    assert "2 of 3 algorithms" in page
    result = study_result(study)
    assert summary(result) == [
        "FedAvg, ours ends at 100.00 % final accuracy on digits, trial (mean over 3 seeds).",
        "First to hold 50 % (mean of 4 evaluations), after 5 rounds: FedAvg, ours.",
        "6 of 9 runs are not finished.",
    ]
    assert "Still to come: fedadam (3 runs)." in result.notes
    assert "No late-stage mean: plain has yet to hold the threshold." in result.notes
    assert not any("seed" in note and "no test" in note for note in result.notes)
    ours, plain = scores(result).rows
    assert [cell.text for cell in plain[2:6]] == ["not yet"] * 4
    assert (plain[6].text, ours[6].text) == ("6.0 so far", "20.0")

    def keep(source: Path, name: str) -> str:
        done = CliRunner().invoke(app, ["keep", str(source), "--out", str(tmp_path / name)])
        assert done.exit_code == 0
        return done.stderr

    assert f"the study {place} is not finished" in keep(place, "whole")
    assert "is not finished" in keep(place / "the-other" / "seed-0", "run")
    assert keep(place / "ours", "finished") == ""
    assert len(read([tmp_path / "whole"]).studies) == 1
