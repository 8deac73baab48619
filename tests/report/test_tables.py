"""Tables in windows of any width: names and numbers stay whole."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from fedzmg.algorithms import ALGORITHMS
from fedzmg.cli import app
from fedzmg.data.sources import SOURCES
from fedzmg.report.terminal import tables
from fedzmg.tasks import TASKS

HOLM = f"{0.000123 * len(ALGORITHMS):.3g}"
"""The smallest of so many p-values of 0.000123, corrected: as large as all others."""
WIDTHS = pytest.mark.parametrize("width", [60, 80, 120])


def printed(table: Table, width: int) -> list[str]:
    shown = io.StringIO()
    Console(width=width, file=shown).print(table)
    return shown.getvalue().splitlines()


def words(lines: list[str]) -> list[str]:
    return [word for line in lines for word in line.split()]


@WIDTHS
def test_names_of_algorithms_and_tasks_are_never_broken(width: int) -> None:
    lines = CliRunner().invoke(app, ["list"], env={"COLUMNS": str(width)}).stdout.splitlines()
    assert max(map(len, lines)) <= width
    names = [line.split()[0] for line in lines if line[:1].isalpha()]
    heads = ["Algorithms", "name", "Tasks", "name"]
    assert sorted(names) == sorted([*heads, *ALGORITHMS, *TASKS])
    # A name within a command is broken no more than one in front.
    for task in TASKS.values():
        for word in task.missing.split():
            assert word in words(lines)


@WIDTHS
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["list", "fedzmg"], ["client.embedding_axis", "heavy_ball", "nesterov"]),
        (["list", "cifar100"], ["preset.partition_seed", "flip-shift"]),
        (["data", "list"], [*SOURCES, "671,585", "77,483"]),
        (["theory", "T2", "--quick"], ["predicted", "0.38369", "2.25", "agrees"]),
    ],
)
def test_keys_and_numbers_are_never_broken(
    width: int, arguments: list[str], names: list[str]
) -> None:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": str(width)})
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert set(names) <= {word.strip(",") for word in words(lines)}
    assert "…" not in done.stdout


def compared(**changes: Any) -> dict[str, Any]:
    """A comparison of all algorithms with numbers as wide as they come."""
    test = {"mean_difference": -0.1234, "p": 0.000123, "effect_size": -12.34}
    rows = [
        {
            "algorithm": name, "inferred": i == 0, "mean": 0.8899, "sd": 0.1122, "test": test,
            "rounds_to_threshold": 1234, "bytes_down": 54321 * 2**20, "bytes_up": 65432 * 2**20,
            "metric_per_mib": 0.3377, "dropped": 0, "diverged": 0, **changes,
        }
        for i, name in enumerate(ALGORITHMS)
    ]  # fmt: skip
    return {"metric": "accuracy", "threshold": 0.8, "seeds": [0, 1], "reference": "fedzmg",
            "algorithms": rows}  # fmt: skip


@WIDTHS
def test_a_comparison_never_cuts_a_number(width: int) -> None:
    lines = printed(tables.comparison(compared(), width), width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    rows = [row for row in map(str.split, lines) if "±" in row and row[0] in ALGORITHMS]
    assert [row[0] for row in rows] == [name for name in ALGORITHMS if name != "fedzmg"]
    ends = {
        60: ["88.99", "±", "11.22", "%", "\u221212.34", "%", HOLM],
        80: ["88.99", "±", "11.22", "%", "1234", "\u221212.34", "%", "0.000123", HOLM],
        120: ["88.99", "±", "11.22", "%", "1234", "\u221212.34", "%", "0.000123", HOLM,
              "\u221212.34", "54321", "/", "65432", "33.77", "%"],
    }  # fmt: skip
    assert all(row[1:] == ends[width] for row in rows)
    caption = " ".join(words(lines))
    missing = re.search(r"for want of room only in study.json: (.*)", caption)
    assert (missing is None) == (width == 120)
    if missing is not None:
        assert missing[1].endswith("d_z, MiB ↓ / ↑, per MiB")
    assert "fedzmg* " in caption


def test_several_tests_are_corrected_as_one_family() -> None:
    rows = compared()["algorithms"][:4]
    tests = [None, *({**rows[0]["test"], "p": p} for p in (0.01, 0.04, 0.03))]
    rows = [{**row, "test": test} for row, test in zip(rows, tests, strict=True)]
    data = {**compared(), "algorithms": rows}
    shown = printed(tables.comparison(data, 120), 120)
    lines = [row for row in map(str.split, shown) if "±" in row and row[0] in ALGORITHMS]
    # By Holm: 3 times 0.01; 2 times 0.03; 1 times 0.04, but no less than the one before.
    assert [line[8:10] for line in lines] == [["0.01", "0.03"], ["0.04", "0.06"], ["0.03", "0.06"]]
    alone = printed(tables.comparison({**data, "algorithms": rows[:2]}, 120), 120)
    assert "Holm" not in "".join(alone)


def caption(data: dict[str, Any], width: int) -> str:
    return str(tables.comparison(data, width).caption).partition("; for want of room")[0]


def test_caption_explains_the_columns_that_are_there() -> None:
    assert "; diff., p and d_z: paired t-test of fedzmg minus this one" in caption(compared(), 120)
    narrow = caption(compared(), 60)
    assert "; diff.: paired t-test of fedzmg minus this one; Holm: p over the family" in narrow
    assert not any(head in narrow for head in ("d_z", "MiB", "to 80"))
    assert "; diff.: paired t-test of fedzmg minus this one" in caption(compared(), 52)
    assert "test" not in caption(compared(), 44)


@WIDTHS
def test_one_seed_has_no_columns_of_a_test(width: int) -> None:
    data = {**compared(sd=None, test=None), "seeds": [0]}
    shown = " ".join(words(printed(tables.comparison(data, width), width)))
    for word in ("diff.", " p ", "d_z", "±", "paired", "t-test"):
        assert word not in shown
    assert "final accuracy: the only seed, last tenth of the rounds" in shown
    assert "to 80 %: index" in shown


def test_lost_runs_are_shown_in_the_narrowest_window() -> None:
    lines = printed(tables.comparison(compared(dropped=3, diverged=1), 60), 60)
    [row] = [line for line in lines if " fedavg " in line]
    assert row.split()[-3:] == ["3", "/", "1"]
    assert max(map(len, lines)) <= 60


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5),
       st.integers(0, 150))  # fmt: skip
def test_widths_share_what_there_is(pairs: list[tuple[int, int]], room: int) -> None:
    least, wanted = [min(p) for p in pairs], [max(p) for p in pairs]
    found = tables.shares(wanted, least, room)
    assert all(a <= x <= b for a, x, b in zip(least, found, wanted, strict=True))
    assert sum(found) == max(sum(least), min(sum(wanted), room))
