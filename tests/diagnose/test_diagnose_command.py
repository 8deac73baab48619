"""``fedzmg diagnose`` as a user runs it, and its table."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from fedzmg.cli import app
from fedzmg.diagnose import diagnose
from fedzmg.errors import InputError
from fedzmg.tasks import Task
from fedzmg.terminal import views


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of figures take a second each; the tests of figures write some."""
    monkeypatch.setattr("fedzmg.report.figures.save", lambda figure, stem: (stem, stem))


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_task_gives_table_verdict_and_json(tmp_path: Path) -> None:
    printed = run("diagnose", "logistic", "--along", "2", "--every", "1", "--out", str(tmp_path),
                  "--lr", "0.1")  # fmt: skip
    for words in ("before training: 6 clients", "expect a loss", "along plain FedAvg"):
        assert words in printed
    assert "are centred" in printed  # the last column is not cut off
    assert "…" not in printed
    points = json.loads((tmp_path / "diagnosis.json").read_text())["points"]
    assert [point["round"] for point in points] == [0, 1, 2]


def test_a_preset_changes_the_json_on_standard_output(tmp_path: Path) -> None:
    found = []
    for settings in ([], ["--set", "preset.start=zero_sum"]):
        arguments = ("--json", "--drifting", "0", "--out", str(tmp_path / "q"))
        found.append(run("diagnose", "quadratic", *settings, *arguments))
    plain, changed = map(json.loads, found)
    assert "NaN" not in found[0]
    assert plain["directory"] == str(tmp_path / "q")
    assert plain["points"][0]["drift"] == {}
    lost = [data["points"][0]["whole"]["forbidden"] for data in (plain, changed)]
    assert lost[0] > 2 * lost[1]


def test_a_run_directory_is_measured_at_its_checkpoint(tmp_path: Path) -> None:
    trained = str(tmp_path / "run")
    run("run", "quadratic", "--rounds", "3", "--seed", "4", "--engine", "vectorized",
        "--out", trained)  # fmt: skip
    printed = run("diagnose", trained, "--out", str(tmp_path / "found"), "--lr", "0.01")
    assert "quadratic, after round 3" in printed
    data = json.loads((tmp_path / "found" / "diagnosis.json").read_text())
    assert (data["seed"], data["centred"]) == (4, None)
    with pytest.raises(InputError, match="x=1"):
        run("diagnose", trained, "--set", "x=1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digit"], "did you mean 'digits'"),
        (["not/there"], "'not/there'"),
        (["my_task.py"], "my_task.py:NAME"),
        (["quadratic", "--set", "client.lr=1"], "client.lr=1"),
        (["quadratic", "--set", "preset.starts=zero_sum"], "did you mean 'start'"),
        (["."], "spec.toml"),
        (["quadratic", "--every", "3"], "every = 3"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message) as raised:
        run("diagnose", *arguments)
    assert "\n" not in str(raised.value)


LONG = "encoder_of_the_first_branch_of_the_network"


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(160, 6)).astype("float32") + 1, rng.integers(0, 3, 160)
    model = nn.Sequential()
    model.add_module(LONG, nn.Linear(6, 5))
    model.add_module("[bold]", nn.Linear(5, 3))  # not markup
    task = Task.from_arrays(model, x, y, np.arange(160) % 16, test=(x, y), cohort=4)
    return diagnose(task, along=8, every=1, device="cpu").as_dict()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_nothing_is_cut_at_any_width(data: dict[str, Any], width: int) -> None:
    file = io.StringIO()
    Console(file=file, width=width).print(views.diagnosis(data, width))
    lines = file.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= width
    assert "…" not in file.getvalue()
    table = views._layers(data)
    assert all(any(c.text in line for line in lines) for row in table.rows for c in row[1:])
    names = "".join(line.split("  ")[0].strip() for line in lines)
    assert f"{LONG}.weight" in names
    assert "[bold].weight" in names
    rounds = [word for line in lines if line.startswith("layer") for word in line.split()]
    assert [word for word in rounds if word.isdigit()] == [str(n) for n in range(9)]
