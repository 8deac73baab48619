"""Tables of grids and studies with long labels: every number stays whole, at any width."""

from __future__ import annotations

import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from typer.testing import CliRunner

from fedzmg.cli import app
from fedzmg.report.numbers import NONE
from fedzmg.report.terminal import grids, studies
from fedzmg.report.terminal.stacked import Column, stacked

FACTORS = [
    " + ".join(words) or "plain"
    for n in range(4)
    for words in itertools.combinations(("projection", "momentum", "decay"), n)
]
LABELS = [f"{server}: {own}" for server in ("average", "Adam") for own in FACTORS]
SHORT = ["fedzmg", "fedzmg-adam", "fedavg"]
WIDTHS = pytest.mark.parametrize("width", [60, 80, 100, 120, 200])


def printed(shown: RenderableType | None, width: int) -> list[str]:
    assert shown is not None
    file = io.StringIO()
    Console(file=file, width=width).print(shown, highlight=False)
    return file.getvalue().splitlines()


def percent(value: float) -> str:
    return f"{100 * value:.2f}"


def check(lines: list[str], width: int, numbers: list[str], labels: list[str]) -> None:
    """Nothing is cut: numbers are on one line, labels in one column from top to bottom."""
    assert max(map(cell_len, lines)) <= width
    assert "…" not in "".join(lines)
    found = {word.strip(",;*") for line in lines for word in line.split()}
    assert set(numbers) <= found
    first = " ".join(re.split(r"\s{2,}", line.strip())[0] for line in lines)
    assert all(label in first for label in labels)


def grid(labels: list[str]) -> dict[str, Any]:
    """A ``grid.json``: the best point in a corner, every fourth point stopped."""
    client, server = [0.0316, 0.1, 0.316], [0.316, 1.0]
    entries = {}
    for i, label in enumerate(labels):
        points = [
            {"options": {"client.lr": c, "server.lr": s}, "score": 0.1, "diverged": 1}
            for c in client for s in server
        ]  # fmt: skip
        best = {
            "options": points[i % 6]["options"], "score": 0.2511 + i / 97, "border": True,
            "border_axes": ["client.lr", "server.lr"],
            "neighbours": [{"score": 0.1012 + i / 89}, {"score": 0.2013 + i / 83}],
        }  # fmt: skip
        entries[label.replace(": ", "-")] = {
            "label": label, "axes": {"client.lr": client, "server.lr": server}, "points": points,
            "best": best,
            "stopped": {"diverged": 1, "halving": 1, "rounds": 250, "rounds_asked": 300},
        }  # fmt: skip
    return {
        "task": "toy", "label": "", "metric": "accuracy", "higher_is_better": True,
        "selection": "tune", "examples": 1000, "rounds": 50, "last": 10, "seeds": [1000],
        "stop": {"diverged": True}, "algorithms": entries,
    }  # fmt: skip


def study(labels: list[str], thresholds: int = 2, *, every_pair: bool = False) -> dict[str, Any]:
    """A ``study.json`` with numbers as wide as they come; the last algorithm diverged."""
    rows = {
        label: {
            "final": {"full": {"mean": 0.4012 + i / 97, "sd": 0.1034 + i / 89}},
            "diverged": [None, None],
        }
        for i, label in enumerate(labels)
    }  # fmt: skip
    rows[labels[-1]] |= {"diverged": [12, 31], "stopped": [14, 1033]}
    levels = [
        {
            "threshold": 0.35 + n / 10,
            "rules": {"rolling_mean": {
                "arrival": {x: {"averaged": 1000 * n + i or None} for i, x in enumerate(labels)},
                "late_stage_mean": {x: 0.7011 + n / 10 + i / 97 for i, x in enumerate(labels)},
            }},
        }
        for n in range(thresholds)
    ]  # fmt: skip
    against_first = [(labels[0], label) for label in labels[1:]]
    compared = list(itertools.combinations(labels[:4], 2)) if every_pair else against_first
    pairs = [
        {
            "first": a, "second": b, "p_holm": 0.0001234, "sign_flip": 0.0625, "seeds_needed": 1189,
            "smallest_sign_flip": 0.0625,
            "test": {"mean_difference": -0.1067 - i / 97, "t": -3.2588 - i / 7,
                     "p": 0.00123 + i / 7, "effect_size": -1.88 - i / 7, "ci_low": -0.5491 - i / 97,
                     "ci_high": 0.1724},
        }
        for i, (a, b) in enumerate(compared)
    ]  # fmt: skip
    return {
        "task": "toy", "label": "", "metric": "accuracy", "seeds": [0, 1], "rounds": 2000,
        "thresholds": levels, "algorithms": rows, "tests": {"pairs": pairs},
    }  # fmt: skip


@WIDTHS
@pytest.mark.parametrize("labels", [LABELS, SHORT])
def test_a_grid_shows_every_score(width: int, labels: list[str]) -> None:
    data = grid(labels)
    numbers = []
    for entry in data["algorithms"].values():
        best = entry["best"]
        numbers += [percent(one["score"]) for one in (best, *best["neighbours"])]
        numbers += [f"{value:.4g}" for value in best["options"].values()]
    check(printed(grids.table(data, width), width), width, numbers, labels)


def test_a_narrow_grid_says_below_what_it_leaves_out() -> None:
    lines = printed(grids.table(grid(LABELS), 80), 80)
    [head] = [line for line in lines if line.startswith("algorithm")]
    assert " ".join(head.split()) == "algorithm best point score neighbours diverged stopped"
    [plain] = [line for line in lines if line.startswith("average: plain")]
    numbers = "0.0316*, 0.316* 25.11 % 10.12 to 20.13 % 6 of 6 2"
    assert plain.split() == ["average:", "plain", *numbers.split()]
    below = " ".join(" ".join(lines).split())
    assert "Best point: client.lr, server.lr; * on the border." in below
    assert "Stopped in all: 16 diverged, 16 halving (heuristic); 83 % of the rounds" in below


def test_points_of_a_narrow_grid_with_different_axes_are_told_apart() -> None:
    data = grid(LABELS)
    first, second = list(data["algorithms"].values())[:2]
    first["axes"] = {"client.mu": [0.5], **first["axes"]}
    first["best"] |= {"options": {"client.mu": 0.5, "client.lr": 0.1, "server.lr": 1.0},
                      "border_axes": ["client.mu"]}  # fmt: skip
    second["best"] = None
    text = " ".join(" ".join(printed(grids.table(data, 80), 80)).split())
    assert "Best point: client.mu, client.lr, server.lr; * on the border." in text
    assert "average: plain 0.5*, 0.1, 1 " in text
    assert "all diverged" in text
    assert f" {NONE}, 0.1*, 0.316* " in text


@WIDTHS
@pytest.mark.parametrize("labels", [LABELS, SHORT])
@pytest.mark.parametrize("thresholds", [0, 2, 4])
def test_a_study_shows_every_score(width: int, labels: list[str], thresholds: int) -> None:
    data = study(labels, thresholds)
    numbers = ["1033"]
    for i, (label, row) in enumerate(data["algorithms"].items()):
        numbers += [percent(value) for value in row["final"]["full"].values()]
        for n, level in enumerate(data["thresholds"]):
            numbers.append(str(1000 * n + i or "never"))
            numbers.append(percent(level["rules"]["rolling_mean"]["late_stage_mean"][label]))
    lines = printed(studies.scores(data, width), width)
    check(lines, width, numbers, labels)
    # Runs that were lost are in the row of their algorithm.
    assert "2 of 2" in " ".join(lines)
    assert " ".join(lines).count("0 of 2") == len(labels) - 1


@WIDTHS
@pytest.mark.parametrize("labels", [LABELS, SHORT])
@pytest.mark.parametrize("every_pair", [False, True])
def test_a_study_shows_every_test(width: int, labels: list[str], every_pair: bool) -> None:
    data = study(labels, every_pair=every_pair)
    numbers, names = ["0.000123", "0.0625", "1189"], []
    for pair in data["tests"]["pairs"]:
        test = pair["test"]
        numbers += [percent(test[key]) for key in ("mean_difference", "ci_low", "ci_high")]
        numbers += [f"{test['t']:.3f}", f"{test['p']:.3g}", f"{test['effect_size']:+.2f}"]
        names += [pair["first"], pair["second"]]
    lines = printed(studies.tests(data, width), width)
    check(lines, width, numbers, [] if every_pair else names)
    if every_pair:  # names beside intervals: their words, in order
        beside = "".join(lines)
        assert all(word in beside for name in names for word in name.split())


def test_where_there_is_room_nothing_is_folded_or_shortened() -> None:
    wide = printed(grids.table(grid(LABELS), 200), 200)
    assert sum(line.startswith(("average:", "Adam:")) for line in wide) == len(LABELS)
    row = next(line for line in wide if line.startswith(LABELS[7]))
    for words in ("client.lr 0.0316, server.lr 1", "on the border",
                  "1 diverged, 1 halving (heuristic); 83 % of the rounds trained"):  # fmt: skip
        assert words in row
    heads = [line for line in printed(studies.scores(study(LABELS), 200), 200) if "final" in line]
    assert re.split(r"\s{2,}", heads[0]) == [
        "algorithm", "final accuracy", "to 35 %", "after 35 %", "to 45 %", "after 45 %", "diverged",
        "stopped after",
    ]  # fmt: skip
    tests = printed(studies.tests(study(LABELS), 200), 200)
    assert any(line.startswith(f"{LABELS[0]} - {LABELS[15]} ") for line in tests)


WORD = st.text("abcdefgh", min_size=1, max_size=12)
NAMES = st.lists(st.lists(WORD, min_size=1, max_size=6).map(" ".join), min_size=1, max_size=4)
NUMBERS = st.integers(0, 10**9).map(str)


@given(NAMES, st.data(), st.integers(40, 120))
def test_names_are_folded_between_words_and_numbers_never(
    names: list[str], data: st.DataObject, width: int
) -> None:
    cells = st.lists(NUMBERS, min_size=len(names), max_size=len(names))
    columns = [Column(f"#{i}", own) for i, own in enumerate(data.draw(st.lists(cells, min_size=1)))]
    lines = printed(Group(*stacked(Column("name", names), columns, width)), width)
    assert max(map(cell_len, lines)) <= width
    words = [word for line in lines for word in line.split()]
    # Every number once, row by row of every block; every word of a name in every block.
    heads = [line.split()[1:] for line in lines if line.startswith("name")]
    assert [head for block in heads for head in block] == [column.head for column in columns]
    at = 0
    expected = []
    for block in heads:
        shown = columns[at : at + len(block)]
        at += len(block)
        expected += [column.cells[row] for row in range(len(names)) for column in shown]
    assert [word for word in words if word.isdigit()] == expected
    letters = [word for word in words if word.isalpha() and word != "name"]
    assert letters == " ".join(names).split() * len(heads)


def test_files_get_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no terminal has 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("fedzmg.report.plots.style.save", lambda _, place: [place])  # only tables
    common = 'task = "digits"\nengine = "vectorized"\nrounds = 2\nstop.diverged = true\n'
    smaller = "protocol = { cohort = 2, epochs = 1 }\n"
    labels = LABELS[6:8]
    for kind, rest, own in (
        ("grid", "last = 1\nseeds = [1000]\n", "axes.client.lr = [0.1, 1e9]\n"),
        ("study", "eval_every = 1\nseeds = [0, 1]\nthresholds = [0.01]\n", "client.lr = 0.1\n"),
    ):
        text = f'kind = "{kind}"\n{common}{rest}{smaller}'
        for i, label in enumerate(labels):
            text += f'[algorithms.a{i}]\nalgorithm = "fedavg"\nlabel = "{label}"\n{own}'
        Path(f"{kind}.toml").write_text(text)
        done = CliRunner().invoke(app, [kind, f"{kind}.toml", "--out", kind])
        assert done.exit_code == 0, done.output
        data = json.loads(Path(kind, f"{kind}.json").read_text())
        rows = data["algorithms"].values()
        numbers = [
            percent(row["best"]["score"] if kind == "grid" else row["final"]["full"]["mean"])
            for row in rows
        ]
        table = done.stdout[done.stdout.index("\ndigits") + 1 :].splitlines()
        check(table, 80, numbers, labels)
