"""Cards at the width of a terminal: nothing is lost, no equation is broken, no markup is shown."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from fedzmg.algorithms import ALGORITHMS
from fedzmg.cli import app
from fedzmg.report.terminal.prose import prose

ABOUT = {entry.about.strip(): name for name, entry in ALGORITHMS.items() if entry.about}
EACH = pytest.mark.parametrize("about", ABOUT, ids=ABOUT.get)


def equations(about: str) -> list[str]:
    """Every equation and every remark beside one; they stand in columns, two blanks apart."""
    lines = [line for line in about.splitlines() if line.startswith("    ")]
    return [part for line in lines for part in re.split(r"\s{2,}", line.strip())]


@EACH
@pytest.mark.parametrize("width", [40, 64, 80, 100])
def test_docstring_loses_nothing_but_its_markup(about: str, width: int) -> None:
    shown = prose(about, width)
    assert max(map(len, shown.splitlines())) <= width
    assert (
        shown.split()
        == re.sub(r"(?m)(?<!:)::$", ":", about).replace("\n:\n", "").replace("``", "").split()
    )


@EACH
def test_equations_are_whole_in_eighty_columns(about: str) -> None:
    lines = prose(about, 80).splitlines()
    found = equations(about)
    assert found
    # Beside its label and the indent there is less room than eighty columns.
    for part in found:
        assert len(part) > 66 or any(part in line for line in lines), part
    for formula in re.findall(r"``(.+?)``", about):
        assert any(formula in line for line in lines), formula


@EACH
def test_docstring_is_as_it_was_written_where_there_is_room(about: str) -> None:
    lines = prose(about, 100).splitlines()
    for line in about.splitlines():
        if line.startswith("    "):
            assert line in lines


def test_lines_that_were_meant_to_end_do_so() -> None:
    text = (
        "Travels down: the model. Travels up: the model difference. State: none, and more of it.\n"
        "Degenerate cases: many. A sentence of some length follows here, so that this is full up.\n"
        "Other sentences go on. This\nline as well."
    )
    assert prose(text, 200).splitlines() == [
        "Travels down: the model. Travels up: the model difference. State: none, and more of it.",
        "Degenerate cases: many. A sentence of some length follows here, so that this is full up.",
        "Other sentences go on. This line as well.",
    ]


def card(name: str) -> str:
    return CliRunner().invoke(app, ["list", name], env={"COLUMNS": "80"}).stdout


def test_cards_of_algorithms_and_tasks_show_no_markup() -> None:
    for name in ("fedprox", "cifar100"):
        shown = card(name)
        assert "``" not in shown
        assert "::" not in shown
        assert max(map(len, shown.splitlines())) <= 80


def test_card_offers_only_wrappers_that_fit() -> None:
    average, momentum = card("mfl"), card("fedavgm")
    assert "server.schedule" in momentum
    assert "server.decay" in momentum
    assert "client.schedule" in average
    assert "server.schedule" not in average
    assert "server.decay" not in average
