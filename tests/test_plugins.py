"""Algorithms, tasks and trackers from outside the package, through every command and function."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import fedzmg
from fedzmg import InputError, Trial, compare, plugins, tune
from fedzmg.aggregators import AGGREGATORS
from fedzmg.algorithms import ALGORITHMS, SGD, Average, get
from fedzmg.cli import app
from fedzmg.cli import main as command_line
from fedzmg.contract import Algorithm, AlgorithmInfo
from fedzmg.plugins import Origin
from fedzmg.report.html.page import render
from fedzmg.results.reading import read
from fedzmg.tasks import TASKS
from fedzmg.trackers import TRACKERS

SOURCE = '''
"""Plain descent, by hand."""
from dataclasses import dataclass

import numpy as np
from torch import nn

from fedzmg import Algorithm, ClientRule, Task
from fedzmg.algorithms import Average
from fedzmg.contract import AlgorithmInfo, Number, number


@dataclass(frozen=True)
class Mine(ClientRule):
    lr: Number = number(0.1, above=0, doc="learning rate")

    def step(self, context, params, scratch, grad):
        return params - self.lr * grad, scratch


ALGORITHMS = (AlgorithmInfo(Algorithm("mine", Mine(), Average()), "plain descent", "nobody"),)


def task():
    """Signs of the first of four numbers."""
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    return Task.from_arrays(
        nn.Linear(4, 2), x[:40], y[:40], np.arange(40) % 5, test=(x[40:50], y[40:50]),
        tune=(x[50:], y[50:]), cohort=3, rounds=4, batch_size=4,
    )


TASKS = (task,)
'''
STUDY = """
kind = "study"
plugins = ["../mine.py"]
task = "../mine.py:task"
rounds = 3
eval_every = 1
seeds = [0, 1]
rates = "given"
engine = "sequential"
algorithms = { mine = {}, "mine + speed" = { algorithm = "mine", client = { lr = 0.3 } } }
"""
GRID = """
kind = "grid"
plugins = ["../mine.py"]
task = "../mine.py:task"
rounds = 3
last = 2
engine = "sequential"
algorithms = ["mine", "fedavg"]
axes.client.lr = [0.1, 1.0]
"""

Command = Callable[..., str]


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process of its own for every test, and in it for every command."""
    monkeypatch.setattr(plugins, "_PLUGINS", {})
    tables: list[Any] = [AGGREGATORS, ALGORITHMS, TASKS, TRACKERS]
    before = [(dict(table.data), dict(table.origins)) for table in tables]
    yield
    for table, (data, origins) in zip(tables, before, strict=True):
        table.data, table.origins = data, origins
        vars(table).pop("installed", None)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command where mine.py is; return its output."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCE)
    Path("files").mkdir()
    Path("files/study.toml").write_text(STUDY)
    Path("files/grid.toml").write_text(GRID)

    def call(*words: str, code: int = 0) -> str:
        for table in (AGGREGATORS, ALGORITHMS, TASKS):
            for name in list(table.origins):
                del table.data[name], table.origins[name]
        plugins._PLUGINS.clear()
        done: Result = CliRunner().invoke(app, words)
        if isinstance(done.exception, InputError) and code == 2:
            assert "\n" not in str(done.exception)
            return str(done.exception)
        assert done.exit_code == code, (done.output, done.exception)
        return " ".join(done.output.split())

    return call


def manifest(directory: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(Path(directory, "manifest.json").read_text())
    return facts


def test_plugin_file_through_every_command(run: Command) -> None:
    own = ("--plugin", "mine.py")
    assert "nobody; mine.py" in run("list", *own)
    assert "client.lr" in run("list", "mine", *own)
    assert "5" in run("list", "mine.py:task")
    assert "2 algorithms" in run("validate", "files/study.toml")

    fast = ("--set", "engine=sequential")
    run("run", "mine.py:task", *own, "--algorithm", "mine", "--out", "run", *fast)
    origin = {"file": "mine.py", "sha256": plugins.load("mine.py").origin.sha256}
    assert manifest("run")["plugins"] == {"mine": origin, "mine.py:task": origin}
    alike = run("compare", "mine.py:task", *own, "--algorithms", "mine,fedavg", "--seeds", "1",
                "--engine", "sequential", "--out", "compared", "--json")  # fmt: skip
    scores = json.loads(alike[alike.index("{") :])["algorithms"]
    assert scores["mine"]["final"] == scores["fedavg"]["final"]  # the same equations

    # Stopped after every round, and continued by the same command.
    slow = ("study", "files/study.toml", "--out", "study", "--max-minutes", "1e-9")
    assert run(*slow, code=75)
    run("study", "files/study.toml", "--out", "study")
    run("grid", "files/grid.toml", "--out", "grid")
    assert (manifest("grid/fedavg")["plugins"]).keys() == {"mine.py:task"}
    tuned = run("tune", "mine.py:task", *own, "--algorithms", "mine", "--axis", "client.lr=0.1,1",
                "--rounds", "2", "--out", "tuned", *fast)  # fmt: skip
    assert "border" in tuned
    assert "fedzmg compare mine.py:task --algorithms mine --plugin mine.py --set" in tuned

    run("diff", "study/mine/seed-0", "study/mine/seed-0")
    run("diff", "study/mine/seed-0", "study/mine-+-speed/seed-0", code=1)
    for directory in ("run", "study", "grid", "compared"):
        assert "bit for bit" in run("verify", directory, "--rounds", "2", *own)
    page = render(read([Path("study"), Path("grid"), Path("run")]), drawn={})
    assert f"mine.py, {origin['sha256']}" in page
    run("export", "run")
    run("diagnose", "run", *own, "--drifting", "0", "--out", "diagnosis")


def test_aggregator_of_a_plugin_is_recorded_and_its_changes_are_noticed(run: Command) -> None:
    source = """
from dataclasses import dataclass
from fedzmg import Aggregator

@dataclass(frozen=True)
class FirstOnly(Aggregator):
    def aggregate(self, rows, state):
        return rows.deltas[0], state

AGGREGATORS = (FirstOnly%s,)
"""
    Path("merge.py").write_text(source % "")
    words = ("run", "mine.py:task", "--set", "federation.aggregator=first_only", "--out", "run")
    own = ("--plugin", "merge.py")
    assert "FirstOnly(...)" in run(*words, *own, code=2)
    Path("merge.py").write_text(source % "()")
    assert "'first_only'" in run(*words, code=2)
    run(*words, *own)
    assert manifest("run")["plugins"]["first_only"]["file"] == "merge.py"
    more = ("--plugin", "mine.py", "--rounds", "1")
    assert "'first_only'" in run("verify", "run", *more, code=2)
    assert "bit for bit" in run("verify", "run", *own, *more)
    Path("merge.py").write_text(source % "()" + "# another file")
    assert "merge.py" in run("verify", "run", *own, *more)


def test_results_never_load_code(run: Command) -> None:
    run("study", "files/study.toml", "--out", "study")
    run("grid", "files/grid.toml", "--out", "grid")
    Path("mine.py").write_text("raise AssertionError")
    one = "study/mine/seed-0"
    for command in (
        ("study", "study/study.toml", "--out", "study"),
        ("grid", "grid/grid.toml", "--out", "grid"),
        ("run", f"{one}/spec.toml", "--out", one),
        ("verify", "study"),
        ("verify", "grid"),
        ("diagnose", one),
    ):
        assert "--plugin mine.py" in run(*command, code=2)
    for line, wanted in (('plugins = ["mine.py"]', "--plugin mine.py"), ("", "--plugin")):
        for name in ("study", "grid"):
            path = Path(name, f"{name}.toml")
            path.write_text(f"{line}\n{path.read_text()}")
            assert wanted in run(name, str(path), code=2)
    run("watch", "study", "--once")
    run("keep", "study")
    render(read([Path("study")]), drawn={})


def test_changed_code_is_noticed(run: Command) -> None:
    own = ("--plugin", "mine.py")
    run("study", "files/study.toml", "--out", "study")
    first = ("study/mine/seed-0/spec.toml", "--out", "study/mine/seed-0")
    Path("mine.py").write_text(SOURCE + "\n# Nothing changes.\n")
    for command in (("verify", "study"), ("study", "study/study.toml", "--out", "study")):
        assert run(*command, *own).count("mine.py: the file has changed") == 1
    Path("mine.py").write_text(SOURCE.replace("- self.lr", "- 2 * self.lr"))
    assert "the file has changed" in run("run", *first, *own)
    assert "the file has changed" in run("verify", "study", *own, code=1)
    # Code of a module beside the file counts as the file's.
    Path("helper.py").write_text("RATE = 0.1")
    Path("mine.py").write_text(f"from helper import RATE\n{SOURCE}")
    before = plugins.load("mine.py").origin
    Path("helper.py").write_text("RATE = 0.2")
    del sys.modules["helper"]
    assert plugins.load("mine.py").origin.sha256 != before.sha256
    del sys.modules["helper"]


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("import sys; sys.exit(0)", "__main__"),
        ("ALGORITHMS = 3", "ALGORITHMS = 3"),
        ("ALGORITHMS = (3,)", "expected an Algorithm"),
        ("TASKS = (3,)", "expected a Task"),
        ("\nimport fedzmg\nfedzmg.Algorithm('x', 3, 3)", "line 3.*client = 3"),
        ("from fedzmg.algorithms import ALGORITHMS as A\n"
         "from fedzmg import Algorithm\n"
         "other = A['mfl'].algorithm\n"
         "ALGORITHMS = (Algorithm('fedavg', other.client, other.server),)",
         "'fedavg' exists already"),
    ],
)  # fmt: skip
def test_unusable_plugins_are_one_line(run: Command, source: str, wanted: str) -> None:
    Path("bad.py").write_text(source)
    message = run("list", "--plugin", "bad.py", code=2)
    assert wanted.split(".*")[0] in message
    assert "bad.py" in message


def test_missing_and_doubled_plugins_are_one_line(run: Command) -> None:
    os.mkfifo("pipe.py")
    for words in (
        ("--plugin", "none.py"),
        ("--plugin", "pipe.py"),
        ("--plugin", "files/study.toml"),
        ("mine.py:nothing",),
    ):
        assert words[-1].split(":")[0] in run("list", *words, code=2)
    Path("files/mine.py").write_text(SOURCE)
    assert "same name" in run("list", "--plugin", "mine.py", "--plugin", "files/mine.py", code=2)


def test_traceback_of_a_plugin_is_kept(
    run: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.py").write_text("def task():\n    return open('nothing')\nlost = 1 / 0")
    for words in (["list", "--plugin", "bad.py"], ["run", "good.py:task"]):
        Path("good.py").write_text("def task():\n    return open('nothing')")
        monkeypatch.setattr(sys, "argv", ["fedzmg", *words])
        with pytest.raises(SystemExit) as ended:
            command_line()
        assert ended.value.code == 1
        first, *others = capsys.readouterr().err.splitlines()
        assert words[-1] in first
        assert others[0].startswith("Traceback")
        assert any(name in others[-1] for name in ("ZeroDivisionError", "FileNotFoundError"))


def test_installed_packages_are_imported_when_they_are_named(
    run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("site/own-1.0.dist-info").mkdir(parents=True)
    Path("site/own_rules.py").write_text(SOURCE)
    Path("site/own_broken.py").write_text("raise AssertionError")
    Path("site/own-1.0.dist-info/METADATA").write_text("Name: own\nVersion: 1.0\n")
    Path("site/own-1.0.dist-info/entry_points.txt").write_text(
        "[fedzmg.algorithms]\nfedown = own_rules:ALGORITHMS_\nbroken = own_broken:x\n"
        "[fedzmg.tasks]\nowntask = own_rules:task\n[fedzmg.trackers]\nowntracker = own_rules:Mine\n"
    )
    Path("site/own_rules.py").write_text(f"{SOURCE}\nALGORITHMS_ = ALGORITHMS[0].algorithm\n")
    monkeypatch.syspath_prepend("site")
    for table in (ALGORITHMS, TASKS, TRACKERS):
        vars(table).pop("installed", None)
    listed = run("list")
    for name in ("fedown", "broken", "owntask", "owntracker", "own 1.0"):
        assert name in listed
    assert "own_rules" not in sys.modules
    run("run", "owntask", "--algorithm", "fedown", "--set", "engine=sequential", "--out", "run")
    assert "own_broken" not in sys.modules
    recorded = manifest("run")["plugins"]
    assert recorded.keys() == {"fedown", "owntask"}
    assert recorded["fedown"]["distribution"] == "own 1.0"
    assert "own 1.0, own_rules.py" in run("list", "fedown")
    assert TRACKERS.look_up("owntracker").make is vars(sys.modules["own_rules"])["Mine"]
    del sys.modules["own_rules"]


@dataclass(frozen=True)
class Half(SGD):  # type: ignore[misc]
    """Half a step."""


def test_functions_take_objects_and_variants(run: Command, tmp_path: Path) -> None:
    task = replace(fedzmg.tasks.get("mine.py:task"), options={"fedavg": {"client.lr": 0.3}})
    own = Algorithm("half", Half(lr=0.05), Average())
    variants = {
        "own": own,
        "described": AlgorithmInfo(own, "half", "nobody"),
        "fedavg + momentum": ("fedavg", {"client.momentum": 0.9, "weights": "uniform"}),
        "mine faster": (own, {"client.lr": 0.2}),
        "plain": "fedavg",
    }
    fast: dict[str, Any] = {"rounds": 2, "engine": "sequential", "device": "cpu"}
    result = compare(task, variants, seeds=1, out=tmp_path / "out", **fast)
    options = {name: found[0].trial.algorithm for name, found in result.histories.items()}
    assert list(options) == list(variants)
    assert [options[n].client.lr for n in ("own", "described", "mine faster")] == [0.05, 0.05, 0.2]
    assert options["fedavg + momentum"].client.momentum == 0.9
    assert options["fedavg + momentum"].weights == "uniform"
    assert options["plain"].client.lr == 0.3
    assert "described" not in ALGORITHMS
    # The same call reads what is there; a mixed list and a search take objects, too.
    again = compare(task, variants, seeds=1, out=tmp_path / "out", **fast)
    assert again.histories["own"][0].records == result.histories["own"][0].records
    mixed = compare(task, ["mfl", own, get("fedavg")], seeds=1, **fast)
    assert list(mixed.histories) == ["mfl", "half", "fedavg"]
    assert mixed.histories["fedavg"][0].trial.algorithm == get("fedavg")
    found = tune(task, {"own": own, "fedavg": "fedavg"}, {"client.lr": [0.1, 0.2]}, **fast)
    assert set(found.settings) == {"own", "fedavg"}
    assert Trial.of(own, 3, client_lr=0.5).algorithm.client.lr == 0.5
    with pytest.raises(InputError, match=r"'described'.*--plugin test_plugins"):
        fedzmg.verify(tmp_path / "out")


def test_register_adds_a_name_once(tmp_path: Path) -> None:
    own = Algorithm("half", Half(), Average())
    fedzmg.register(own)
    fedzmg.register(AlgorithmInfo(own, "the same again", ""))
    assert ALGORITHMS.origins["half"] == Origin.of(Path(__file__))
    assert Trial.of("half").algorithm == own
    for other in (replace(own, client=Half(lr=0.3)), replace(own, name="fedavg")):
        with pytest.raises(InputError, match="exists already"):
            fedzmg.register(other)
    task = replace(fedzmg.tasks.get("digits"), name="my digits")
    fedzmg.register(task)
    assert fedzmg.tasks.get("my digits").fingerprint() == task.fingerprint()
    (tmp_path / "mine.py").write_text(SOURCE)
    fedzmg.register(tmp_path / "mine.py")
    # An edited file replaces what it defined, as in a notebook.
    (tmp_path / "mine.py").write_text(SOURCE.replace("0.1", "0.7"))
    fedzmg.register(str(tmp_path / "mine.py"))
    assert get("mine").options()["client.lr"] == 0.7
    assert fedzmg.tasks.get(f"{tmp_path}/mine.py:task").protocol.cohort == 3
