"""Terminal output: nothing is cut, broken or interpreted at any width."""

from __future__ import annotations

import io
import itertools
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from fedzmg.algorithms import ALGORITHMS
from fedzmg.cli import app
from fedzmg.data.sources import SOURCES
from fedzmg.report.tables.grids import best_points
from fedzmg.report.tables.table import Cell, Table, to_csv, to_json, to_latex, to_markdown
from fedzmg.results.diff import ASPECTS, Change, Curves, Difference, Scores
from fedzmg.results.reading import read
from fedzmg.results.significance import PairedTest
from fedzmg.results.study_result import study_result
from fedzmg.results.watch import State, Training, Work
from fedzmg.tasks import TASKS
from fedzmg.terminal import inspection, views
from fedzmg.terminal.render import print_line, render
from fedzmg.terminal.views import prose

RESULTS = Path(__file__).parents[2] / "results"
FACTORS = [
    " + ".join(words) or "plain"
    for n in range(4)
    for words in itertools.combinations(("projection", "momentum", "decay"), n)
]
LABELS = [f"average: {own}" for own in FACTORS]
JOINED = [label.replace(": ", "-").replace(" + ", "-") for label in LABELS]
WIDTHS = pytest.mark.parametrize("width", [60, 200])
LONG = pytest.mark.parametrize("labels", [LABELS, JOINED])


def printed(shown: RenderableType, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(shown)
    return file.getvalue().splitlines()


def check(
    lines: list[str], width: int, numbers: list[str], labels: list[str] | None = None
) -> None:
    """Numbers are whole; labels are whole but for line breaks and stand in the first column."""
    assert max(map(cell_len, lines)) <= width
    assert "…" not in "".join(lines)
    found = {word.strip(",;") for line in lines for word in line.split()}
    assert set(numbers) <= found
    first = "".join(re.split(r"\s{2,}", line.strip())[0] for line in lines).replace(" ", "")
    assert all(label.replace(" ", "") in first for label in labels or [])


def percent(value: float) -> str:
    return f"{100 * value:.2f}"


WORD = st.text("abcdefgh", min_size=1, max_size=12)
NAMES = st.lists(st.lists(WORD, min_size=1, max_size=6).map(" ".join), min_size=1, max_size=4)


@settings(max_examples=25)
@given(NAMES, st.data(), st.integers(40, 120))
def test_names_are_folded_between_words_and_numbers_never(
    names: list[str], data: st.DataObject, width: int
) -> None:
    column = st.lists(st.integers(0, 10**9).map(str), min_size=len(names), max_size=len(names))
    columns = data.draw(st.lists(column, min_size=1))
    heads = ("name", *(f"#{i}" for i in range(len(columns))))
    table = Table.of("", heads, list(zip(names, *columns, strict=True)))
    lines = printed(render([table], width), width)
    assert max(map(cell_len, lines)) <= width
    words = [word for line in lines for word in line.split()]
    blocks = [line.split()[1:] for line in lines if line.startswith("name")]
    assert [head for block in blocks for head in block] == list(heads[1:])
    # Every number once, row by row of every block; every word of a name in every block.
    expected, start = [], 0
    for block in blocks:
        shown = columns[start : start + len(block)]
        start += len(block)
        expected += [own[row] for row in range(len(names)) for own in shown]
    assert [word for word in words if word.isdigit()] == expected
    letters = [word for word in words if word.isalpha() and word != "name"]
    assert letters == " ".join(names).split() * len(blocks)


def test_a_printed_line_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(Path("a\nb") / ("long" * 99))
    print_line("[red]\x1b[0m", err=True)
    assert capsys.readouterr() == (f"a b/{'long' * 99}\n", "[red][0m\n")


def test_one_table_in_every_format() -> None:
    cells = [[Cell("x|y & {z}"), Cell("1 %", 0.01, "best"), Cell("long", None, "words")]]
    records = [{"name": "x", "share": 0.1, "lost": float("nan")}]
    table = Table("k", "T", ("a_b", "c", "d"), cells, "words", records)
    assert "|:--|--:|:--|\n| x\\|y & {z} | **1 %** | long |\n\nwords\n" in to_markdown(table)
    assert r"x|y \& \{z\} & \textbf{1 \%} & long \\" in to_latex(table)
    assert r"\begin{tabular}{lrl}" in to_latex(table)
    assert to_csv(table) == "name,share,lost\nx,0.1,nan\n"
    assert json.loads(to_json(table))["records"] == [{"name": "x", "share": 0.1, "lost": None}]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["list"], [*ALGORITHMS, *TASKS, *(w for t in TASKS.values() for w in t.missing.split())]),
        (["list", "fedzmg"], ["client.embedding_axis", "heavy_ball", "nesterov"]),
        (["list", "cifar100"], ["preset.partition_seed", "flip-shift"]),
        (["data", "list"], [*SOURCES, "671,585", "77,483"]),
        (["theory", "T2", "--quick"], ["predicted", "0.38369", "2.25", "agrees"]),
    ],
)
def test_lists_and_cards(width: int, arguments: list[str], names: list[str]) -> None:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": str(width)})
    check(done.stdout.splitlines(), width, names)
    assert "``" not in done.stdout
    assert "::" not in done.stdout


@pytest.mark.parametrize("name", [name for name, one in ALGORITHMS.items() if one.about])
def test_docstrings_lose_nothing_but_markup(name: str) -> None:
    about = ALGORITHMS[name].about.strip()
    shown = prose(about, 100)
    plain = re.sub(r"(?m)(?<!:)::$", ":", about).replace("\n:\n", "").replace("``", "")
    assert shown.split() == plain.split()
    equations = {line for line in about.splitlines() if line.startswith("    ")}
    assert equations <= set(shown.splitlines())
    narrow = prose(about, 60)
    assert narrow.split() == shown.split()
    assert all(len(line) <= 60 for line in narrow.splitlines() if line.startswith(" "))


@pytest.mark.parametrize("name", ["compare-all", "mnist-by-writer-study"])
def test_a_study_shows_every_score_test_and_note(name: str) -> None:
    result = study_result(read([RESULTS / name]).studies[0])
    numbers = []
    for score in result.scores:
        assert score.mean is not None
        numbers += [percent(score.mean), percent(score.sd or 0.0)]
        numbers += [f"{one:,}" for one in score.arrivals.values() if one is not None]
    for one in result.tests:
        for value in (one.test.mean_difference, one.test.ci_low, one.test.ci_high):
            numbers.append(f"{100 * value:+.2f}".replace("-", "\u2212"))
    for width in (60, 200):
        lines = printed(views.study(result, width), width)
        check(lines, width, numbers, [score.label for score in result.scores])
        inferred = {s.algorithm for s in result.scores if ALGORITHMS[s.algorithm].inferred}
        assert all(one in lines[-1] or one in lines[-2] for one in inferred)
        words = " ".join(" ".join(lines).split())
        assert all(note in words for note in result.notes)


@WIDTHS
@pytest.mark.parametrize("name", ["ablation-factors-grid", "cifar100-grid"])
def test_a_grid_shows_every_score(width: int, name: str) -> None:
    [grid] = read([RESULTS / name]).grids.values()
    entries = grid["algorithms"].values()
    numbers = [percent(entry["best"]["score"]) for entry in entries]
    numbers += [f"{v:.4g}" for entry in entries for v in entry["best"]["options"].values()]
    lines = printed(render([best_points(grid)], width), width)
    check(lines, width, numbers, [entry["label"] for entry in entries])


def work(labels: list[str], seeds: int, kind: Any = "study") -> Work:
    """Trainings in every state."""
    found = [
        Training(
            f"a{i} client.lr=0.0316 seed={seed}" if kind == "grid" else f"a{i}/seed-{seed}",
            f"a{i}", get_args(State)[(i + seed) % 6], 1000 + 13 * i + seed,
            1500, False, 5, 0.1012 + i / 97 + seed / 977, label=label, why="slow " * 9 * (not i),
        )
        for i, label in enumerate(labels)
        for seed in range(seeds)
    ]  # fmt: skip
    return Work("runs/study", kind, "toy", "accuracy", True, tuple(found), None)


@WIDTHS
@LONG
def test_work_in_progress_shows_every_run(width: int, labels: list[str]) -> None:
    one = work(labels, 3)
    lines = printed(inspection.screen([one], width), width)
    numbers = [n for t in one.trainings for n in (percent(t.metric or 0), str(t.round), "1500")]
    check(lines, width, numbers, [t.shown for t in one.trainings])
    words = " ".join(lines[next(i for i, line in enumerate(lines) if "run " in line) :]).split()
    for state in {t.state for t in one.trainings}:  # again in every further block of columns
        assert words.count(state) % [t.state for t in one.trainings].count(state) == 0
    assert words.count("slow") == 9 * 3


@WIDTHS
@LONG
@pytest.mark.parametrize("kind", ["study", "grid"])
def test_many_runs_are_grouped_by_algorithm(width: int, labels: list[str], kind: str) -> None:
    one = work(labels, 20, kind)
    lines = printed(inspection.screen([one], width), width)
    groups = [list(own) for _, own in itertools.groupby(one.trainings, lambda t: t.group)]
    bests = [[t for t in own if t.state != "diverged"][-1] for own in groups]
    numbers = [percent(t.metric or 0.0) for t in bests]
    numbers += [word for t in bests for word in t.point.split()]
    check(lines, width, numbers, labels)


FIELDS = ("train_loss", "loss", "metric", "client_loss")


@WIDTHS
@LONG
def test_a_difference_shows_every_number(width: int, labels: list[str]) -> None:
    changes = [Change("options", "client.lr", 0.03162277660168379, "runs/cifar100-grid", ("a",)),
               Change("versions", "commit", "ab" * 20, "cd" * 20, ())]  # fmt: skip
    curves, scores = [], []
    numbers = ["0.03162277660168379", "runs/cifar100-grid", "abababababab", *FIELDS, "12"]
    for i, label in enumerate(labels):
        first = None if i == 1 else 100 + i
        largest = {"metric": 0.0123 + i, "loss": 1.23e-05 + i}
        rounds = (1000 + i, 150 + i)
        curves.append(Curves(f"{label}/seed-0", 150 + i, rounds, first, FIELDS, largest, False))
        left, other = 0.4012 + i / 97, 0.7034 + i / 89
        test = PairedTest(12, 0.1, 0.1, 1.0, 1.23e-05 * (i + 1), -12.34 - i, 0.0, 1.0)
        scores.append(Scores(label, {"seed 0": left}, {"seed 0": other}, test))
        numbers += [
            percent(left),
            percent(other),
            f"{100 * (left - other):.2f}".replace("-", "\u2212"),
        ]
        numbers += [f"{test.p:.3g}", f"{largest['loss']:.3g}", str(1000 + i)]
        numbers += [] if first is None else [str(first)]
    places = ("results/precision-float32", "runs/ablation-of-every-factor-with-a")
    found = Difference(*places, "accuracy", True, tuple(changes), tuple(curves), tuple(scores), (),
                       ("b/seed-1",))  # fmt: skip
    lines = printed(inspection.diff(found, ASPECTS, width), width)
    check(lines, width, numbers, [f"{label}/seed-0" for label in labels])
    assert any(line.endswith("b/seed-1") for line in lines)


@WIDTHS
@LONG
def test_verification_shows_every_number(width: int, labels: list[str]) -> None:
    fact = {"name": "torch", "then": "2.12", "now": "2.13"}
    verdicts = [
        {"name": f"{label}/seed-0", "rounds": 3, "reproduced": not i, "note": "so " * 20 * (not i),
         "first": 1000 + i if i else None, "fields": FIELDS if i else (),
         "size": f"{1.23e-05 + i}", "facts": [fact] if i else []}
        for i, label in enumerate(labels)
    ]  # fmt: skip
    numbers = [*FIELDS, "2.12", "2.13"]
    for i in range(1, len(labels)):
        numbers += [f"{1.23e-05 + i:.3g}", str(1000 + i)]
    lines = printed(inspection.verify(verdicts, width), width)
    check(lines, width, numbers, [f"{label}/seed-0" for label in labels])
    assert lines[-1] == f"not reproduced: {len(labels) - 1} of {len(labels)}"
