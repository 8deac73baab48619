"""Presets on the command line and in Python: recorded, and the same for all algorithms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedzmg
from fedzmg import InputError
from fedzmg.cli import app
from fedzmg.experiment.specs.run import RunSpec

QUICK = ["--rounds", "1", "--engine", "sequential", "--device", "cpu", "--json"]
NARROW = ["--set", "protocol.cohort=1", "--set", "protocol.epochs=1"]


@pytest.fixture
def here(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parsed(*arguments: str) -> Any:
    """Parse the JSON that a command prints."""
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


def test_run_records_every_field_of_the_preset(here: Path) -> None:
    done = CliRunner().invoke(app, ["run", "chars74k", *NARROW, *QUICK], catch_exceptions=False)
    assert "12 clients instead of 55" in done.stderr
    plain = json.loads(done.stdout)
    centred = parsed("run", "chars74k", *NARROW, *QUICK, "--set", "preset.centring=image")
    assert plain["directory"] != centred["directory"]
    assert plain["loss"] != centred["loss"]
    spec = RunSpec.read(Path(centred["directory"]) / "spec.toml")
    assert spec.preset == {
        "outputs": 62,
        "polarity": "background-one",
        "centring": "image",
        "selection": "half",
        "initializer": "keras",
    }
    again = parsed("run", f"{centred['directory']}/spec.toml", "--json")
    assert again == centred


def test_another_algorithm_drops_the_options_of_the_file(here: Path) -> None:
    parsed("run", "digits", "--algorithm", "fedadam", *NARROW, *QUICK, "--out", "first")
    other = CliRunner().invoke(
        app, ["run", "first/spec.toml", "--algorithm", "fedavg", "--json"], catch_exceptions=False
    )
    line = other.stderr.splitlines()[0]
    assert "server.beta2" in line
    assert "first/spec.toml left out: they were not chosen for fedavg" in line
    plain = parsed("run", "digits", "--set", "algorithm=fedavg", *NARROW, *QUICK)
    assert json.loads(other.stdout) == plain


def test_compare_changes_the_task_of_all(here: Path) -> None:
    common = ["compare", "chars74k", "--algorithms", "fedzmg,fedavg", "--seeds", "1", *QUICK]
    for setting in ("protocol.cohort=1", "protocol.epochs=1", "preset.polarity=ink-one"):
        common += ["--set", setting]
    made = Path(parsed(*common)["directory"])
    for name in ("fedzmg", "fedavg"):
        assert RunSpec.read(made / name / "seed-0/spec.toml").preset["polarity"] == "ink-one"
    with pytest.raises(InputError, match=r"preset\.polarity cannot be set for one algorithm"):
        parsed(*common, "--set", "fedavg.preset.polarity=ink-one")


def test_compare_in_python(here: Path) -> None:
    options: dict[str, Any] = {"seeds": 1, "rounds": 1, "engine": "sequential", "device": "cpu"}
    narrow = {"fedavg": {"protocol.cohort": 1, "protocol.epochs": 1}}
    result = fedzmg.compare(
        "chars74k", "fedavg", preset={"centring": "image"}, settings=narrow, **options
    )
    built = result.histories["fedavg"][0].task
    assert built.preset["centring"] == "image"
    with pytest.raises(InputError, match="preset"):
        fedzmg.compare(built, "fedavg", preset={"centring": "none"}, **options)
    with pytest.raises(InputError, match="preset cannot be set for one algorithm"):
        fedzmg.compare(built, "fedavg", settings={"fedavg": {"preset": {}}}, **options)


def test_costs_of_a_card_need_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDZMG_DATA", str(tmp_path))
    costs = parsed("list", "fedavg", "--task", "cifar100", "--json")["costs"]
    assert costs["down_bytes"] == 4 * 2_214_532
    with pytest.raises(InputError, match="unknown task 'cifar10': did you mean 'cifar100'"):
        parsed("list", "fedavg", "--task", "cifar10")
    with pytest.raises(InputError, match="unknown algorithm or task 'shakespear'"):
        parsed("list", "shakespear")
