"""``fedzmg diagnose`` as a user runs it, and its table and figure."""

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

runner = CliRunner()


def run(*arguments: str) -> str:
    done = runner.invoke(app, ["diagnose", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of figures take a second each; one test is enough for them."""
    monkeypatch.setattr("fedzmg.report.figures.save", lambda figure, stem: (stem, stem))


def data_of(place: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((place / "diagnosis.json").read_text())
    return found


def test_a_task_gives_table_figure_verdict_and_files(tmp_path: Path) -> None:
    out = tmp_path / "made"
    printed = run("logistic", "--along", "2", "--every", "1", "--out", str(out), "--lr", "0.1")
    assert "before training: 6 clients" in printed
    assert "verdict" in printed
    assert "expect a loss" in printed
    assert "along plain FedAvg" in printed
    assert (out / "diagnosis.svg").read_bytes().startswith(b"<?xml")
    assert (out / "diagnosis.png").read_bytes().startswith(b"\x89PNG")
    data = data_of(out)
    assert [point["round"] for point in data["points"]] == [0, 1, 2]  # type: ignore[attr-defined]
    assert "are centred" in printed  # the last column is not cut off
    assert "…" not in printed


@pytest.mark.usefixtures("_undrawn")
def test_json_is_strict_and_alone_on_standard_output(tmp_path: Path) -> None:
    printed = runner.invoke(
        app, ["diagnose", "quadratic", "--json", "--drifting", "0", "--out", str(tmp_path / "q")],
        catch_exceptions=False,
    )  # fmt: skip
    data = json.loads(printed.stdout)
    assert data["verdict"]["expect"] in ("gain", "little", "loss")
    assert data["directory"] == str(tmp_path / "q")
    assert data["points"][0]["drift"] == {}
    assert "NaN" not in printed.stdout


@pytest.mark.usefixtures("_undrawn")
def test_a_run_directory_is_measured_at_its_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "run"
    done = runner.invoke(
        app, ["run", "quadratic", "--rounds", "3", "--seed", "4", "--engine", "vectorized",
              "--out", str(place)],
        catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    printed = run(str(place), "--out", str(tmp_path / "found"), "--lr", "0.01")
    assert "quadratic, after round 3" in printed
    data = data_of(tmp_path / "found")
    assert (data["seed"], data["centred"]) == (4, None)
    with pytest.raises(InputError, match="x=1"):
        runner.invoke(app, ["diagnose", str(place), "--set", "x=1"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digit"], "did you mean 'digits'"),
        (["not/there"], "'not/there'"),
        (["quadratic", "--set", "client.lr=1"], "expected preset.FIELD=VALUE"),
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
        runner.invoke(app, ["diagnose", *arguments], catch_exceptions=False)
    assert "--out" not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("_undrawn")
def test_presets_can_be_changed(tmp_path: Path) -> None:
    out = tmp_path / "made"
    run("quadratic", "--set", "preset.start=zero_sum", "--drifting", "0", "--out", str(out))
    moved = data_of(out)["points"][0]["whole"]["forbidden"]  # type: ignore[index]
    run("quadratic", "--drifting", "0", "--out", str(out))
    assert data_of(out)["points"][0]["whole"]["forbidden"] > 2 * moved  # type: ignore[index]


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


def shown(data: dict[str, Any], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(views.diagnosis(data, width))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_nothing_is_cut_at_any_width(data: dict[str, Any], width: int) -> None:
    text = shown(data, width)
    lines = text.splitlines()
    assert max(map(cell_len, lines)) <= width
    assert "…" not in text
    table = views._layers(data)
    assert all(any(c.text in line for line in lines) for row in table.rows for c in row[1:])
    names = "".join(line.split("  ")[0].strip() for line in lines)
    assert f"{LONG}.weight" in names
    assert "[bold].weight" in names
    rounds = [word for line in lines if line.startswith("layer") for word in line.split()]
    assert [word for word in rounds if word.isdigit()] == [str(n) for n in range(9)]
