"""``fedzmg.tune``: search on tuning examples that no report uses."""

from __future__ import annotations

import itertools
import signal
import statistics
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

import fedzmg
from fedzmg import InputError, Task, Trial, compare, simulate, tune
from fedzmg.cli import app
from fedzmg.experiment.progress import Silent
from fedzmg.simulation import RoundReport
from fedzmg.storage.formats import read_json

RATES = {"client.lr": [0.01, 0.1, 1.0], "server.lr": [0.3, 1.0]}


@cache
def task(name: str = "pets") -> Task:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 4)).astype(np.float32)
    y = x[:, :3].argmax(1)
    return Task.from_arrays(
        nn.Linear(4, 3), x[:30], y[:30], np.arange(30) % 5, test=(x[30:60], y[30:60]),
        tune=(x[60:], y[60:]), name=name, cohort=3, batch_size=4, rounds=4,
    )  # fmt: skip


def by_hand(algorithm: str, seed: int) -> dict[tuple[float, float], float]:
    """Scores by rates: a plain simulation each, evaluated on the tuning set."""
    chosen = task().tune
    assert chosen is not None
    own = replace(task(), test=chosen, tune=None)
    found = {}
    for client, server in itertools.product(*RATES.values()):
        trial = Trial.of(algorithm, seed=seed, client_lr=client, server_lr=server)
        [history] = simulate(own, trial, engine="sequential")
        found[client, server] = statistics.fmean(history.metrics[-2:])
    return found


def test_search_finds_what_plain_simulations_find() -> None:
    found = tune(task(), ["fedzmg", "fedadam"], RATES, last=2, engine="sequential")
    for name in ("fedzmg", "fedadam"):
        scores = by_hand(name, seed=1000)
        found_scores = {
            tuple(point["options"].values()): point["score"]
            for point in found.data["algorithms"][name]["points"]
        }
        assert found_scores == pytest.approx(scores)
        best = found.settings[name]
        assert scores[best["client.lr"], best["server.lr"]] == max(scores.values())
    assert found.data["examples"] == 30
    result = compare(
        task(), ["fedzmg", "fedadam"], seeds=1, settings=found.settings, engine="sequential"
    )
    [history] = result.histories["fedadam"]
    options = history.trial.algorithm.options()
    assert {key: options[key] for key in RATES} == found.settings["fedadam"]


def test_fixed_options_are_part_of_the_settings() -> None:
    rates = {"client.lr": np.array([0.1, 0.01])}
    fixed = {"fedavg": {"client.momentum": 0.9, "weights": "uniform"}}
    found = tune(task(), "fedavg", rates, rounds=2, settings=fixed, engine="sequential")
    assert found.settings["fedavg"].pop("client.lr") in (0.1, 0.01)
    assert found.settings["fedavg"].items() >= fixed["fedavg"].items()
    compare(task(), "fedavg", seeds=1, rounds=1, settings=found.settings, engine="sequential")


def test_printed_table_names_best_points_and_borders() -> None:
    found = tune(task(), ["fedavg"], {"client.lr": [1e-6, 1e-5]}, engine="sequential")
    best = found.settings["fedavg"]["client.lr"]
    assert repr(found) == f"<Tuned on 'pets': fedavg client.lr {best:.4g}>"
    title, _, heads, row, _, what, border = str(found).splitlines()
    assert title == "pets, 1 seed, 4 rounds"
    assert heads.split() == ["algorithm", "best", "point", "accuracy", "points"]
    score = found.data["algorithms"]["fedavg"]["best"]["score"]
    assert row.split() == ["fedavg", "client.lr", f"{best:.4g}", f"{score:.4f}", "2"]
    assert what == "accuracy: mean after the last 4 rounds, on 30 tuning examples"
    assert [border] == found.warnings
    assert border.startswith(f"the best point of fedavg lies on the border (client.lr = {best:.4g}")


def test_test_set_chooses_only_on_request() -> None:
    alone = replace(task(), tune=None)
    with pytest.raises(InputError, match="'pets' has no tuning examples"):
        tune(alone, "fedavg", {"client.lr": [0.1]})
    found = tune(alone, "fedavg", {"client.lr": [0.1]}, selection="test", engine="sequential")
    assert "on 30 test examples" in str(found)
    assert found.warnings[-1].startswith("chosen by the test set")


def test_no_settings_if_all_points_diverged() -> None:
    found = tune(task(), "fedavg", {"client.lr": [1e38]}, engine="sequential")
    assert "every point of fedavg diverged" in str(found)
    with pytest.raises(InputError, match="every point of fedavg diverged: search smaller learning"):
        _ = found.settings


class Press(Silent):
    """A user who presses Ctrl-C after the second round."""

    def advance(self, report: RoundReport) -> None:
        if report.round == 2:
            signal.raise_signal(signal.SIGINT)


def test_search_in_a_directory_continues_and_is_reported(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"algorithms": "fedavg", "engine": "sequential"}
    asked["axes"] = {"client.lr": [0.1, 1.0]}
    with pytest.raises(KeyboardInterrupt, match="nothing was kept: no out= was given"):
        tune(task(), progress=Press(), **asked)
    kept = tmp_path / "search"
    with pytest.raises(KeyboardInterrupt, match="nothing is lost, make the same call again"):
        tune(task(), progress=Press(), out=kept, **asked)
    watched = CliRunner().invoke(app, ["watch", str(kept)], env={"COLUMNS": "200"})
    assert "make the same call of fedzmg.tune again to continue" in watched.stdout
    found = tune(task(), out=kept, **asked)
    assert found == tune(task(), out=kept, **asked) == tune(task(), **asked)
    assert read_json(kept / "grid.json", spec=kept / "grid.toml") == found.data
    done = CliRunner().invoke(
        app, ["report", str(kept), "--out", str(tmp_path / "page"), "--page-only"]
    )
    assert done.exit_code == 0, done.output
    assert "client.lr" in (tmp_path / "page" / "report.html").read_text()
    done = CliRunner().invoke(app, ["grid", str(kept / "grid.toml")])
    assert str(done.exception).endswith("call fedzmg.tune(task, ..., out=DIR)")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"axes": {}}, "axes is empty"),
        ({"axes": {"client.lr": 0.1}}, "axes = {'client.lr': 0.1}: expected numbers by option"),
        ({"axes": {"client.l": [0.1]}}, "unknown axis 'client.l': did you mean 'client.lr'?"),
        ({"seeds": 0}, "seeds = 0"),
        ({"rounds": 0}, "rounds = 0: expected at least 1"),
        ({"last": 9}, "last = 9: expected 1 to 4, the rounds"),
        ({"settings": {"fedavg": {"client.lr": 1.0}}}, "fedavg: client.lr is both fixed and an"),
        ({"algorithms": "fedavgg"}, "unknown algorithm 'fedavgg'"),
    ],
)
def test_arguments_are_checked(given: dict[str, Any], message: str) -> None:
    asked = {"algorithms": "fedavg", "axes": {"client.lr": [0.1]}, **given}
    with pytest.raises(InputError) as caught:
        tune(task(), **asked)
    assert str(caught.value).startswith(message)


def test_untuned_learning_rates_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"seeds": 1, "rounds": 1, "engine": "sequential"}
    compare(task(), ["fedzmg", "fedavg"], settings={"fedavg": {"client.lr": 0.1}}, **given)
    assert capsys.readouterr().err.startswith("fedzmg: fedzmg: default learning rates, not tuned")
    compare("quadratic", ["fedavg"], **given)
    assert "not tuned for quadratic" in capsys.readouterr().err
    compare(task(), ["fedavg"], settings={"fedavg": {"client.lr": 0.1}}, **given)
    compare("digits", ["fedzmg"], **given)
    compare(replace(task(), options={"fedavg": {"client.lr": 0.1}}), ["fedavg"], **given)
    assert capsys.readouterr().err == ""


def test_presets_are_tuned_by_name() -> None:
    found = fedzmg.tune(
        "digits", "fedavg", {"client.lr": [0.01, 0.1]}, rounds=1, engine="sequential",
        preset={"partition_seed": 3},
    )  # fmt: skip
    assert found.data["preset"]["partition_seed"] == 3
