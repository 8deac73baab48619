"""``fedzmg check`` and ``fedzmg new``: the template works as written, and bad input is one line."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedzmg import InputError, testing
from fedzmg.cli import app
from fedzmg.cli.extending import load_algorithms


def invoke(*words: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, words)


QUICK = {name: testing.PROPERTIES[name] for name in ("options", "numbers", "zero gradients")}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forget_plugins: None) -> None:
    """All properties take seconds; they are tested where they belong."""
    monkeypatch.setattr(testing, "PROPERTIES", QUICK)
    monkeypatch.chdir(tmp_path)


def test_template_passes_its_tests_and_linter_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("new", "algorithm", "my_rule").exit_code == 0
    before = {path.name: path.read_text() for path in Path().iterdir()}
    assert set(before) == {"my_rule.py", "test_my_rule.py"}
    [info] = load_algorithms("my_rule.py")
    assert repr(info.algorithm.client) == "MyRuleClient(lr=0.1, mu=0.01)"  # type: ignore[union-attr]
    monkeypatch.syspath_prepend(str(Path.cwd()))
    tests = runpy.run_path("test_my_rule.py")
    tests["test_algorithm_keeps_the_contract"](info)
    tests["test_two_rounds_agree_with_numpy"]()
    monkeypatch.delitem(sys.modules, "my_rule")
    ruff = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))
    if Path(ruff).exists():
        for words in (["check", "--extend-select", "I,D2,B,UP"], ["format", "--check"]):
            subprocess.run([ruff, *words, "--isolated", "--no-cache", "."], check=True)
    again = invoke("new", "algorithm", "my_rule")
    assert isinstance(again.exception, InputError)
    assert "my_rule.py exists" in str(again.exception)
    assert {path.name: path.read_text() for path in Path().glob("*.py")} == before


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["Mine"], "Mine"), (["my-rule"], "my-rule"), (["class"], "class"), (["fedavg"], "fedavg"),
        (["random"], "random"), (["mine", "--out", "mine.txt"], "mine.txt"),
        (["mine", "--out", "torch.py"], "torch.py"),
    ],
)  # fmt: skip
def test_unusable_names_are_refused(words: list[str], value: str) -> None:
    found = invoke("new", "algorithm", *words)
    assert isinstance(found.exception, InputError)
    assert value in str(found.exception)
    assert list(Path().iterdir()) == []


def test_check_prints_a_table_and_its_exit_code_tells_the_result() -> None:
    invoke("new", "algorithm", "mine", "--out", "sub/other.py")
    path = Path("sub/other.py")
    good = invoke("check", str(path))
    assert good.exit_code == 0
    assert "mine: 3 of 3 properties hold" in good.output
    shown = json.loads(invoke("check", "fedavg", "--json").output)["algorithms"]
    assert [one["algorithm"] for one in shown] == ["fedavg"]
    path.write_text(path.read_text().replace("number(0.01, low=0, doc=", "float(0.01) or str("))
    bad = invoke("check", str(path), "--algorithm", "mine")
    assert bad.exit_code == 1
    assert "FAILED" in bad.output
    assert "client.mu" in bad.output


MINE = """
from fedzmg import Algorithm
from fedzmg.algorithms import SGD, Average
ALGORITHMS = (Algorithm("mine", SGD(), Average()),)
"""


@pytest.mark.parametrize(
    ("text", "words", "value"),
    [
        ("", [], "ALGORITHMS"), ("ALGORITHMS = (1,)", [], "1"), (None, [], "mine.py"),
        ("1 / 0", [], "ZeroDivisionError"), ("def", [], "SyntaxError"),
        (MINE, ["--algorithm", "mne"], "'mine'"),
    ],
)  # fmt: skip
def test_unusable_files_are_one_line(text: str | None, words: list[str], value: str) -> None:
    if text is not None:
        Path("mine.py").write_text(text)
    found = invoke("check", "mine.py", *words)
    assert isinstance(found.exception, InputError)
    assert value in str(found.exception)


def test_unknown_name_suggests_another() -> None:
    assert "'fedavg'" in str(invoke("check", "fedavgg").exception)
