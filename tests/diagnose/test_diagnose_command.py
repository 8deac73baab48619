"""``fedzmg diagnose`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
from typer.testing import CliRunner

from fedzmg.cli import app
from fedzmg.errors import InputError

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
def test_the_order_of_a_file_does_not_decide_which_layer_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "run"
    arguments = ["run", "digits", "--rounds", "1", "--engine", "vectorized", "--out", str(place)]
    runner.invoke(app, [*arguments, "--set", "protocol.cohort=1"], catch_exceptions=False)
    load = safetensors.torch.load
    for end in (1, -1):  # a safetensors file has no order of its own
        monkeypatch.setattr(
            "safetensors.torch.load", lambda file, end=end: dict(list(load(file).items())[::end])
        )
        run(
            str(place), "--clients", "2", "--examples", "4", "--drifting", "0",
            "--out", str(tmp_path / "out"),
        )  # fmt: skip
        layers = data_of(tmp_path / "out")["points"][0]["layers"]  # type: ignore[index]
        assert [layer["name"] for layer in layers] == [f"{n}.weight" for n in (1, 3, 6, 8)]


@pytest.mark.usefixtures("_undrawn")
def test_presets_can_be_changed(tmp_path: Path) -> None:
    out = tmp_path / "made"
    run("quadratic", "--set", "preset.start=zero_sum", "--drifting", "0", "--out", str(out))
    moved = data_of(out)["points"][0]["whole"]["forbidden"]  # type: ignore[index]
    run("quadratic", "--drifting", "0", "--out", str(out))
    assert data_of(out)["points"][0]["whole"]["forbidden"] > 2 * moved  # type: ignore[index]
