"""Results of a task that a user made in Python: no command is offered that cannot work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedzmg.cli import app
from fedzmg.report.html.page import render
from fedzmg.results.reading import read


@pytest.fixture
def pets(write_run: Any) -> Path:
    made: Path = write_run("all/pets", "fedavg", 0, [0.1, 0.2], task="pets",
                           manifest={"command": "Python"})  # fmt: skip
    return made


def test_only_the_page_itself_can_be_made_again_by_a_command(pets: Path, write_run: Any) -> None:
    page = render(read([pets]), drawn={})
    assert re.findall(r"<code>(.*?)</code>", page) == [
        f"fedzmg report {pets.as_posix()} --out reproduced/report"
    ]
    assert "The task pets was made in Python" in page
    digits = write_run("all/digits", "fedavg", 0, [0.1, 0.2])
    both = render(read([pets.parent]), drawn={})
    assert f"fedzmg run {digits.as_posix()}/spec.toml" in both
    assert f"{pets.as_posix()}/spec.toml" not in both


@pytest.mark.parametrize(
    ("command", "call"),
    [
        (("run", "spec.toml"), "fedzmg.compare(task, ..., out=DIR)"),
        (("validate", "spec.toml"), "fedzmg.compare(task, ..., out=DIR)"),
        (("verify", ""), "verify(DIR, task=task)"),
        (("diagnose", ""), "fedzmg.diagnose.diagnose(task, params=...)"),
    ],
)
def test_commands_name_the_call_to_make_instead(
    pets: Path, command: tuple[str, str], call: str
) -> None:
    name, file = command
    done = CliRunner().invoke(app, [name, str(pets / file)])
    assert str(done.exception).startswith(f"{pets / file} is of 'pets'")
    assert str(done.exception).endswith(call)
