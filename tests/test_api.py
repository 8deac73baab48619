"""``simulate`` and ``compare`` in scripts: results, and one line for every mistake."""

from __future__ import annotations

import json
import signal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

import fedzmg
from fedzmg import Algorithm, InputError, Task, Trial, compare, simulate
from fedzmg.algorithms import SGD, Average, get
from fedzmg.cli import app
from fedzmg.experiment.progress import Silent
from fedzmg.results.reading import read
from fedzmg.results.study_result import study_result
from fedzmg.simulation import RoundReport
from fedzmg.storage.formats import read_json

MINE = Algorithm("mine", SGD(), Average())


@cache
def task() -> Task:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4)), rng.integers(0, 3, 12)
    return Task.from_arrays(
        nn.Linear(4, 3), x, y, np.arange(12) % 3, test=(x, y), cohort=2, batch_size=4, rounds=2
    )


def rejected(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(InputError) as error:
        function(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


COMPARE = {"algorithms": ["fedavg"]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simulate(task(), ["fedzmg"]), "'fedzmg'.*Trial.of"),
        (lambda: simulate(task(), MINE), r"'mine'.*Trial\(algorithm, seed=0\)"),
        (lambda: simulate(task(), [Trial(MINE), MINE]), "'mine'"),
        (lambda: simulate(task(), None), "None"),
        (lambda: simulate(task(), [Trial]), "class .*Trial'"),
        (lambda: simulate(task(), []), "at least one"),
        (lambda: simulate("digits", Trial(MINE)), r"tasks.get\('digits'\)"),
        (lambda: simulate(Task, Trial(MINE)), "class .*Task'"),
        (lambda: simulate(task().model.module, Trial(MINE)), "Linear"),
        (lambda: fedzmg.tasks.get(3), "'3'"),
        (lambda: fedzmg.algorithms.get(["x"]), "unknown algorithm"),
        (lambda: Trial.of("fedzmg", lr=0.1), "'lr'.*'client_lr' or 'server_lr'"),
        (lambda: Trial.of("fedzmg", client_momentun=0.9), "'client_momentum'"),
        (lambda: Trial.of("fedzmg", client_lr=-1.0), "client_lr: lr = -1.0"),
        (lambda: Trial.of("fedper", parts_personal=1), "parts_personal: personal = 1"),
        (lambda: compare(None), "NoneType"),
        (lambda: compare(nn.Linear(2, 2)), "Linear"),
        (lambda: compare(task(), 3), "algorithms = 3"),
        (lambda: compare(task(), {"x": 3}), "algorithms: 3"),
        (lambda: compare(task(), {"x": ("fedavg", 3)}), "x: 3"),
        (lambda: compare(task(), {"x": ("fedavg", {"lr": 1})}), "'lr'.*'client.lr'"),
        (lambda: compare(task(), [get("fedavg").with_options({"client.lr": 3.0})]), "'fedavg'"),
        (lambda: fedzmg.register(3), r"register\(3\)"),
        (lambda: compare(task(), [SGD()]), "SGD"),
        (lambda: compare(task(), ["fedavg", "fedavgg"]), "'fedavgg'.*did you mean"),
        (lambda: compare(task(), **COMPARE, seeds=2.0), "seeds = 2.0"),
        (lambda: compare(task(), **COMPARE, seeds="3"), "seeds = '3'"),
        (lambda: compare(task(), **COMPARE, seeds=["a"]), r"seeds = \['a'\]"),
        (lambda: compare(task(), **COMPARE, seeds=0), "seeds = "),
        (lambda: compare(task(), **COMPARE, seeds=[1, 1]), "seeds = "),
        (lambda: compare(task(), ["fedavg", "fedavg"]), "fedavg|each once"),
        (lambda: compare(task(), **COMPARE, settings={"fedavg": 0.1}), "settings = .*0.1"),
        (lambda: compare(task(), **COMPARE, settings={"fedavg": {1: 0.1}}), "{1: 0.1}"),
        (lambda: compare(task(), **COMPARE, settings=["fedavg"]), r"settings = \['fedavg'\]"),
        (lambda: compare(task(), **COMPARE, settings={"fedavg": {"lr": 1}}), "'lr'.*'client.lr'"),
    ],
)
def test_wrong_arguments_are_one_line_with_the_value(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_names_and_seeds_may_be_any_sequence() -> None:
    result = compare(task(), ("fedavg",), seeds=np.arange(2), engine="sequential")
    assert [h.trial.seed for h in result.histories["fedavg"]] == [0, 1]


def test_histories_of_an_own_algorithm_are_compared() -> None:
    """An algorithm equal to FedAvg has no difference from it."""
    own = Algorithm("mine", SGD(lr=0.1), Average())
    histories = {
        name: simulate(task(), [Trial(a, seed) for seed in range(2)], engine="sequential")
        for name, a in {"fedavg": fedzmg.algorithms.get("fedavg"), "mine": own}.items()
    }
    reference, mine = fedzmg.StudyResult.from_histories(histories).scores
    assert mine.finals == reference.finals
    assert mine.test is not None
    assert mine.test.mean_difference == 0


def test_histories_of_other_seeds_are_rejected() -> None:
    """Tests are paired by seed."""
    made = simulate(task(), [Trial.of("fedavg", seed) for seed in range(2)], engine="sequential")
    for others in (made[::-1], made[:1]):
        message = rejected(fedzmg.StudyResult.from_histories, {"a": made, "b": others})
        assert "b has the seeds [" in message
    for none in ({}, {"a": []}):
        assert "at least one" in rejected(fedzmg.StudyResult.from_histories, none)


class Press(Silent):
    """A user who presses Ctrl-C while the first round is shown."""

    def begin(self, label: str, rounds: int, done: int) -> None:
        self.pressed = False

    def advance(self, report: RoundReport) -> None:
        if not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)


def interrupted(**given: Any) -> KeyboardInterrupt:
    try:
        compare(task(), ["fedavg"], seeds=1, rounds=5, progress=Press(), **given)
    except Exception:
        raise AssertionError("'except Exception' would catch it") from None
    except KeyboardInterrupt as error:
        return error
    raise AssertionError("it was not interrupted")


def test_ctrl_c_ends_a_sweep(tmp_path: Path) -> None:
    assert "round 1 of 5; nothing was kept" in str(interrupted())
    assert "round 1 of 5; nothing is lost" in str(interrupted(out=tmp_path))
    watched = CliRunner().invoke(app, ["watch", str(tmp_path)], env={"COLUMNS": "200"})
    assert "fedzmg.compare" in watched.stdout
    whole = compare(task(), ["fedavg"], seeds=1, rounds=5, out=tmp_path)
    assert whole.histories["fedavg"][0].rounds == [1, 2, 3, 4, 5]


def test_printed_results_are_short(tmp_path: Path) -> None:
    result = compare(task(), ["fedzmg", "fedavg"], seeds=2, out=tmp_path, engine="sequential")
    finals = [row.mean for row in result.scores]
    assert repr(result) == (
        f"<StudyResult on 'custom', 2 paired seeds, 2 rounds: fedzmg {finals[0]:.4g}, "
        f"fedavg {finals[1]:.4g}>"
    )
    _, _, _, *rows = str(result).splitlines()
    assert rows[0].split()[:2] == ["fedzmg", f"{finals[0]:.4f}"]
    assert rows[1].split()[:2] == ["fedavg", f"{finals[1]:.4f}"]
    history = result.histories["fedavg"][0]
    assert f"{history.metrics[-1]:.4g}" in repr(history)


def test_comparison_is_kept_as_a_study(tmp_path: Path) -> None:
    given: dict[str, Any] = {"seeds": 2, "out": tmp_path, "engine": "sequential"}
    whole = compare(task(), ["fedzmg", "fedavg"], **given)
    plan, kept = tmp_path / "study.toml", tmp_path / "study.json"
    assert read_json(kept) == json.loads(json.dumps(whole.as_dict()))
    before = plan.read_bytes(), kept.read_bytes()
    part = compare(task(), ["fedavg"], **given)
    assert list(part.histories) == ["fedavg"]
    assert (plan.read_bytes(), kept.read_bytes()) == before
    # Runs read from disk give the same result.
    read_back = study_result(read([tmp_path]).studies[0]).as_dict()
    assert _without_facts(read_back) == _without_facts(whole.as_dict())
    written = CliRunner().invoke(app, ["report", str(tmp_path), "--page-only"])
    assert written.exit_code == 0, written.output
    other = {"fedavg": {"client.lr": 0.5}}
    assert "client.lr" in rejected(compare, task(), ["fedzmg", "fedavg"], settings=other, **given)
    more = compare(task(), ["fedzmg", "fedavg", "mfl"], **{**given, "seeds": 3})
    assert list(json.loads(kept.read_text())["algorithms"]) == ["fedzmg", "fedavg", "mfl"]
    assert [h.rounds for h in more.histories["mfl"]] == [[1, 2]] * 3
    plan.write_text("{}")
    assert str(plan) in rejected(compare, task(), ["fedavg"], **given)


def _without_facts(data: dict[str, Any]) -> Any:
    """Leave out what only one of disk and memory knows."""
    kept = {key: value for key, value in data.items() if key not in ("rates", "precision")}
    return json.loads(json.dumps(kept))


def test_progress_is_shown_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"settings": {"fedavg": {"client.lr": 0.1}}, "engine": "sequential"}
    compare(task(), ["fedavg"], seeds=1, **given)
    assert capfd.readouterr() == ("", "")
    compare(task(), ["fedavg"], seeds=1, progress=True, **given)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("fedavg: round 2 of 2, best accuracy")


def test_runs_of_an_own_task_are_verified_in_python(tmp_path: Path) -> None:
    settings = {"fedavg": {"client.lr": 0.1}}
    compare(task(), ["fedavg"], seeds=1, settings=settings, out=tmp_path, engine="sequential")
    done = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert str(done.exception).endswith("call fedzmg.verify(DIR, task=task)")
    [verdict] = fedzmg.verify(str(tmp_path), task=task())
    assert verdict.reproduced
    assert verdict.rounds == 2
