"""Tables with long labels and places: every number stays whole, at any width."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from typer.testing import CliRunner

from fedzmg.cli import app, inspection
from fedzmg.report.terminal import diff, grids, studies, tables, verify, watch
from fedzmg.report.terminal.stacked import Column, stacked
from fedzmg.results.diff import ASPECTS, Change, Curves, Difference, Scores
from fedzmg.results.formatting import NONE
from fedzmg.results.significance import PairedTest
from fedzmg.results.watch import State, Training, Work
from fedzmg.storage.lock import NAME as LOCK
from fedzmg.storage.lock import Owner

FACTORS = [
    " + ".join(words) or "plain"
    for n in range(4)
    for words in itertools.combinations(("projection", "momentum", "decay"), n)
]
LABELS = [f"{server}: {own}" for server in ("average", "Adam") for own in FACTORS]
JOINED = [label.replace(": ", "-").replace(" + ", "-") for label in LABELS]
"""As directories are called."""
SHORT = ["fedzmg", "fedzmg-adam", "fedavg"]
WIDTHS = pytest.mark.parametrize("width", [60, 80, 100, 120, 200])


def printed(shown: RenderableType | None, width: int) -> list[str]:
    assert shown is not None
    file = io.StringIO()
    Console(file=file, width=width).print(shown, highlight=False)
    return file.getvalue().splitlines()


def percent(value: float) -> str:
    return f"{100 * value:.2f}"


def signed(text: str) -> str:
    """With the minus of tables."""
    return text.replace("-", "\u2212")


def points(difference: float) -> str:
    return signed(f"{100 * difference:+.2f}")


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
            "final": {"full": {
                "runs": [0.4, 0.4], "mean": 0.4012 + i / 97, "sd": 0.1034 + i / 89,
            }},
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
        "higher_is_better": True, "window": 4,
        "curves": {label: {"runs": [[0.4] * 5, [0.4] * 5]} for label in labels},
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
        numbers += [percent(row["final"]["full"][what]) for what in ("mean", "sd")]
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
        numbers += [points(test[key]) for key in ("mean_difference", "ci_low", "ci_high")]
        numbers += [signed(f"{test['t']:.3f}"), f"{test['p']:.3g}"]
        numbers.append(signed(f"{test['effect_size']:+.2f}"))
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


@pytest.mark.parametrize("kind", ["grid", "study"])
def test_files_get_whole_numbers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no terminal has 80 columns; results as if trained, and no figures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    labels = LABELS[6:8]
    none = SimpleNamespace(runs=())

    def trained(spec: Any, place: Path, **_: Any) -> Any:
        for name in spec.algorithms:
            (place / spec.folder(name)).mkdir(parents=True)
            (place / spec.folder(name) / "manifest.json").write_text('{"seconds": 1}')
        if kind == "grid":
            return grid(labels)
        return SimpleNamespace(as_dict=lambda: study(labels), study=none)

    monkeypatch.setattr("fedzmg.experiment.grids.grid.run_grid", trained)
    monkeypatch.setattr("fedzmg.experiment.studies.study.run_study", trained)
    for drawing in ("grids.figure", "grids.figures", "comparison.figure"):
        monkeypatch.setattr(f"fedzmg.report.plots.{drawing}", lambda *_: None)
    monkeypatch.setattr("fedzmg.report.plots.style.save", lambda _, place: [place])
    text = f'kind = "{kind}"\ntask = "digits"\nrounds = 20\nseeds = [0, 1]\n'
    rate = "axes.client.lr = [0.1]" if kind == "grid" else "client.lr = 0.1"
    Path("plan.toml").write_text(f'{text}[algorithms.a]\nalgorithm = "fedavg"\n{rate}\n')
    done = CliRunner().invoke(app, [kind, "plan.toml", "--out", kind])
    assert done.exit_code == 0, done.output
    rows = (grid(labels) if kind == "grid" else study(labels))["algorithms"].values()
    numbers = [
        percent(row["best"]["score"] if kind == "grid" else row["final"]["full"]["mean"])
        for row in rows
    ]
    check(done.stdout.splitlines(), 80, numbers, labels)


def trials(labels: list[str]) -> Work:
    """A grid at work: six points of every algorithm, some in every state."""
    found = []
    for i, label in enumerate(labels):
        for k, (client, server) in enumerate(itertools.product((0.0316, 0.1, 0.316), (0.316, 1.0))):
            state: State = get_args(State)[(i + k) % 6]
            point = {"client.lr": f"{client:.4g}", "server.lr": f"{server:.4g}", "seed": "1000"}
            name = " ".join([f"a{i}", *map("=".join, point.items())])
            metric = 0.1012 + i / 97 + k / 977
            one = Training(name, f"a{i}", state, 11 * k + i, 1500, False, 5, metric)
            found.append(one._replace(label=label, options=point))
    return Work("runs/grid", "grid", "toy", "accuracy", True, tuple(found), None)


def runs(labels: list[str], seeds: int, **last: Any) -> Work:
    """A study at work."""
    found = [
        Training(
            f"a{i}/seed-{seed}", f"a{i}", get_args(State)[(i + seed) % 6], 1000 + 13 * i + seed,
            1500, False, 5, 0.1012 + i / 97 + seed / 977, label=label,
        )
        for i, label in enumerate(labels)
        for seed in range(seeds)
    ]  # fmt: skip
    found[-1] = found[-1]._replace(**last)
    return Work("runs/study", "study", "toy", "accuracy", True, tuple(found), None)


def bests(work: Work) -> list[Training]:
    """Of every algorithm; a metric grows with the place in a list."""
    groups = itertools.groupby(work.trainings, lambda one: one.group)
    return [[one for one in own if one.state != "diverged"][-1] for _, own in groups]


def text_of(parts: Iterable[RenderableType], width: int) -> list[str]:
    return [line for part in parts for line in printed(part, width)]


@WIDTHS
@pytest.mark.parametrize("labels", [LABELS, JOINED, SHORT])
def test_a_grid_at_work_shows_every_algorithm(width: int, labels: list[str]) -> None:
    work = trials(labels)
    lines = printed(watch.screen([work], width), width)
    numbers = []
    for one in bests(work):
        point = one.options
        numbers += [percent(one.metric or 0.0), point["client.lr"], point["server.lr"]]
    numbers += [str(first + i) for i in range(len(labels)) for first in (0, 55)]
    check([line.replace("=", " ") for line in lines], width, ["1500", "1000", *numbers], labels)
    counts = re.findall(r"\b1 (\w+)", " ".join(lines))
    assert [counts.count(state) for state in get_args(State)] == [len(labels)] * 6


@WIDTHS
@pytest.mark.parametrize("labels", [LABELS[:8], JOINED[:8], SHORT])
def test_a_study_at_work_shows_every_run(width: int, labels: list[str]) -> None:
    work = runs(labels, 3)
    lines = printed(watch.screen([work], width), width)
    numbers = [percent(one.metric or 0.0) for one in work.trainings]
    numbers += [str(one.round) for one in work.trainings]
    check(lines, width, ["1500", *numbers], [one.shown for one in work.trainings])
    found = " ".join(lines).split()
    states = [one.state for one in work.trainings]
    assert all(found.count(state) == states.count(state) for state in states)


@WIDTHS
@pytest.mark.parametrize("labels", [LABELS, JOINED])
def test_many_runs_at_work_are_summed_up(width: int, labels: list[str]) -> None:
    work = runs(labels, 4)
    lines = printed(watch.screen([work], width), width)
    numbers = [percent(one.metric or 0.0) for one in bests(work)]
    numbers += [one.name.removeprefix(f"{one.group}/") for one in bests(work)]
    check(lines, width, ["1500", *numbers], labels)


def test_a_narrow_grid_at_work_says_below_what_points_are() -> None:
    done = [one._replace(state="done", round=50, rounds=50) for one in trials(JOINED).trainings]
    lost = done[-1]._replace(state="diverged", round=3)
    work = Work("g", "grid", "toy", "accuracy", True, (*done[:-1], lost), None)
    lines = [line.rstrip() for line in printed(watch.screen([work], 80), 80)]
    assert "average-projection-momentum-decay  6 done           50   17.85 %  0.316, 1" in lines
    assert "best point: client.lr, server.lr; seed=1000 in all" in lines
    at = next(i for i, line in enumerate(lines) if line.startswith(JOINED[-1]))
    assert " ".join(lines[at].split()[1:]) == "5 done, 3 to 50 25.99 % 0.316, 0.316"
    assert lines[at + 1].strip() == "1 diverged"
    other = work._replace(trainings=(done[0]._replace(options={"seed": "7"}), *work.trainings))
    lines = printed(watch.screen([other], 60), 60)
    assert any(line.startswith("best point: seed, client.lr, server.lr") for line in lines)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_why_a_run_stopped_is_beside_it_or_below(width: int) -> None:
    why = "its loss is no number, and no round after this one can change that"
    work = runs(JOINED[:8], 2, why=why, state="stopped")
    lines = printed(watch.screen([work], width), width)
    name = work.trainings[-1].shown
    beside = any(line.startswith(f"{name} ") and line.rstrip().endswith(why) for line in lines)
    assert beside == (width == 200)
    assert beside or f"{name}: {why}" in " ".join(" ".join(lines).split())


def test_watch_redraws_for_the_width_there_is(
    planned_long: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal, until nobody is at work; its window is made narrower in between."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120, height=50)
    monkeypatch.setattr(inspection, "Console", lambda: console)
    frames = []

    def wait(_: float) -> None:
        frames.append(shown.getvalue())
        if len(frames) == 1:
            console.width = 60
        else:
            (planned_long / LOCK).unlink()

    monkeypatch.setattr("time.sleep", wait)
    inspection.watch(planned_long)
    frames.append(shown.getvalue())
    for i, (width, text) in enumerate(zip((120, 60, 60), frames, strict=True)):
        new = text[len(frames[i - 1]) if i else 0 :]
        lines = re.sub(r"\x1b\[[0-9?;]*[a-zA-Z]|\r", "", new).splitlines()
        check(lines, width, ["40.00"], [f"{JOINED[7]}/seed-0", f"{JOINED[7]}/seed-1"])
        assert "nobody is at work" in " ".join(lines) or i < 2


def test_watch_in_a_file_has_whole_names(
    planned_long: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    done = CliRunner().invoke(app, ["watch", str(planned_long), "--once"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("run")) :]
    check(table, 80, ["40.00"], [f"{JOINED[7]}/seed-0", f"{JOINED[7]}/seed-1"])


@pytest.fixture
def planned_long(tmp_path: Path, write_run: Callable[..., Path]) -> Path:
    """A study of this process with a long name."""
    write_run(f"study/{JOINED[7]}/seed-0", "fedavg", 0, [0.2, 0.4], rounds=10)
    place = tmp_path / "study"
    (place / "study.toml").write_text(
        'kind = "study"\ntask = "digits"\nrounds = 10\nseeds = [0, 1]\n\n'
        f"[algorithms.{JOINED[7]}]\n"
    )
    (place / LOCK).write_text(json.dumps(asdict(Owner.of_this_process())))
    return place


FIELDS = ("train_loss", "loss", "metric", "client_loss")


def difference(labels: list[str], places: tuple[str, str]) -> Difference:
    """Everything differs, with numbers as wide as they come."""
    keys = ["rates", *(f"algorithms.{label}.client.lr" for label in labels)]
    changes = [
        Change("options", key, 0.03162277660168379 + i, f"runs/cifar100-grid-{i}", ("a",) * (i % 3))
        for i, key in enumerate(keys)
    ]
    changes.append(Change("versions", "commit", "ab" * 20, "cd" * 20, ()))
    changes.append(Change("spec", "seeds", list(range(30)), None, ()))
    curves = [
        Curves(f"{label}/seed-0", 150 + i, (1000 + i, 150 + i), None if i == 1 else 100 + i,
               () if i == 1 else FIELDS, {"metric": 0.0123 + i, "loss": 1.23e-05 + i})
        for i, label in enumerate(labels)
    ]  # fmt: skip
    scores = [
        Scores(label, {"seed 0": 0.4012 + i / 97}, {"seed 0": 0.7034 + i / 89},
               PairedTest(12, 0.1, 0.1, 1.0, 1.23e-05 * (i + 1), -12.34 - i, 0.0, 1.0))
        for i, label in enumerate(labels)
    ]  # fmt: skip
    return Difference(*places, "accuracy", True, tuple(changes), tuple(curves), tuple(scores),
                      (), ())  # fmt: skip


PLACES = [
    ("results/precision-float32", "results/precision-bf16"),
    ("runs/compare-cifar100-resnet-3f2a1b9c", "runs/ablation-of-every-factor-with-adam-and-decay"),
]


@WIDTHS
@pytest.mark.parametrize("labels", [LABELS[:8], JOINED[:8], SHORT])
@pytest.mark.parametrize("places", PLACES)
def test_a_difference_shows_every_number(
    width: int, labels: list[str], places: tuple[str, str]
) -> None:
    found = difference(labels, places)
    lines = text_of(diff.screen(found, ["scores"], width), width)
    numbers = ["12"]
    for pair in found.scores:
        left, right = pair.left["seed 0"], pair.right["seed 0"]
        assert pair.test is not None
        numbers += [percent(left), percent(right), points(left - right)]
        numbers += [f"{pair.test.p:.3g}", signed(f"{pair.test.effect_size:+.2f}")]
    check(lines, width, numbers, labels)
    lines = text_of(diff.screen(found, ["curves"], width), width)
    numbers = [*FIELDS, "none"]
    for pair in found.curves:
        numbers += [str(n) for n in (*pair.rounds, pair.first) if n is not None]
        numbers += [f"{pair.largest[key]:.3g}" for key in ("metric", "loss")]
    check(lines, width, numbers, [pair.name for pair in found.curves])


@WIDTHS
@pytest.mark.parametrize("labels", [JOINED[:8], SHORT])
@pytest.mark.parametrize("places", PLACES)
def test_a_difference_shows_every_setting(
    width: int, labels: list[str], places: tuple[str, str]
) -> None:
    found = difference(labels, places)
    lines = text_of(diff.screen(found, ["spec", "options", "versions"], width), width)
    values = [str(change.left) for change in found.changes if change.aspect == "options"]
    values += [str(change.right) for change in found.changes if change.aspect == "options"]
    values += ["abababababab", "cdcdcdcdcdcd"]
    check(lines, width, values, [])
    if width > 60 or labels == SHORT:  # a key of 50 characters leaves 8 to values
        check(lines, width, [change.key for change in found.changes], [])
    seeds = re.sub(r"\s+", " ", " ".join(lines))
    assert all(re.search(rf"\b{seed}[],]", seeds) for seed in range(30))


def test_heads_of_a_difference_are_whole_where_there_is_room() -> None:
    found = difference(SHORT, PLACES[0])
    lines = text_of(diff.screen(found, ASPECTS, 83), 83)
    [head] = [line for line in lines if line.startswith("algorithm")]
    whole = "algorithm precision-float32 precision-bf16 difference p d_z pairs"
    assert " ".join(head.split()) == whole
    lines = text_of(diff.screen(found, ASPECTS, 80), 80)
    [at] = [i for i, line in enumerate(lines) if line.startswith("algorithm")]
    assert lines[at - 1].split() == ["precision-"]
    assert " ".join(lines[at].split()) == whole.replace("precision-", "", 1)
    # Values of both sides are one below the other where they find no room beside each other.
    at = next(i for i, line in enumerate(lines) if line.startswith("what"))
    assert [lines[at - 1].split(), lines[at].split()] == [
        ["precision-float32"],
        ["what", "(runs)", "precision-bf16"],
    ]
    row = next(i for i, line in enumerate(lines) if line.startswith("options: rates"))
    assert lines[row].split()[2:] == ["(the", "plan)", "0.03162277660168379"]
    assert lines[row + 1].split() == ["runs/cifar100-grid-0"]


@WIDTHS
@pytest.mark.parametrize("labels", [LABELS[:8], JOINED[:8], SHORT])
def test_what_was_trained_again_is_shown_whole(width: int, labels: list[str]) -> None:
    verdicts = [
        {
            "name": f"{label}/seed-0", "rounds": 3, "reproduced": not i,
            "first": 1000 + i if i else None, "fields": FIELDS if i else (),
            "size": f"{1.23e-05 + i}", "facts": [], "note": "",
        }
        for i, label in enumerate(labels)
    ]  # fmt: skip
    numbers = [f"{1.23e-05 + i:.3g}" for i in range(1, len(labels))]
    numbers += [f"{1000 + i}" for i in range(1, len(labels))]
    lines = text_of(verify.screen(verdicts, width), width)
    check(lines, width, [*FIELDS, *numbers], [f"{label}/seed-0" for label in labels])


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("labels", [LABELS[:8], JOINED[:8], ["package.algorithms:" + "x" * 33]])
def test_a_comparison_folds_names_rather_than_cut_numbers(width: int, labels: list[str]) -> None:
    rows = [
        {
            "algorithm": label, "inferred": False, "mean": 0.4012 + i / 97, "sd": 0.1034,
            "test": None, "rounds_to_threshold": 1234, "bytes_down": 2**30, "bytes_up": 2**30,
            "metric_per_mib": 0.3377, "dropped": 1, "diverged": 2,
        }
        for i, label in enumerate(labels)
    ]  # fmt: skip
    data = {"metric": "accuracy", "threshold": 0.8, "seeds": [0, 1], "reference": labels[0],
            "algorithms": rows}  # fmt: skip
    lines = printed(tables.comparison(data, width), width)
    check(lines, width, ["10.34", *(percent(row["mean"]) for row in rows)], [])
    # Names have no digits: what is before them, one below the other.
    names = "".join(re.split(r"\d", line)[0].replace(" ", "") for line in lines)
    assert all(label.replace(" ", "") in names for label in labels)
