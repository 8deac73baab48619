"""Every way to the terminal, with text that would take it over."""

from __future__ import annotations

import ast
import io
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedzmg
from conftest import write_study
from fedzmg.errors import InputError
from fedzmg.evaluation import ACCURACY
from fedzmg.models.layout import warn_once
from fedzmg.report import figures
from fedzmg.results import reading
from fedzmg.results.study_result import study_result
from fedzmg.simulation import Trial
from fedzmg.terminal.live import Display, Downloads
from fedzmg.terminal.render import Terminal, print_line, print_text
from fedzmg.trackers import Tracking

EVIL = "[red]\x1b]0;t\x07\x1b[2J\r\x08\x9b31m\x85\u202e\u2066\ud800\x7f\u200f[link=file:///]x"
"""Escape sequences, C0 and C1 controls, carriage return, bell, bidi controls, a lone surrogate."""


def raw(text: str) -> set[str]:
    return {c for c in text if c not in "\n\xa0" and not c.isprintable()}


def test_text_of_any_kind_is_printed_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = io.StringIO()
    console = Terminal(
        file=out, width=100, force_terminal=True, color_system=None, legacy_windows=False
    )
    trial = SimpleNamespace(name=EVIL, seed=0, algorithm=Trial.of("fedavg", 0).algorithm)
    other = SimpleNamespace(name="b", seed=0, algorithm=Trial.of("fedavg", 0).algorithm)
    record = SimpleNamespace(
        round=1, metric=0.5, train_loss=1.0, diverged=False, rejected=(), flagged=()
    )
    simulation = SimpleNamespace(
        trials=[trial, other], stopped_trials=frozenset(), task=SimpleNamespace(metric=ACCURACY)
    )
    display = Display(console, EVIL, {EVIL: 1})
    display.begin(EVIL, 3, 1)
    display.advance(SimpleNamespace(round=1, records=[record, record], simulation=simulation))
    for shown in (EVIL, display._view()):
        console.print(shown)
    display.say(EVIL)
    console.say(EVIL)
    downloads = Downloads(Terminal(file=out, width=100))
    downloads.begin(EVIL, 10)
    downloads.advance(5)
    downloads.say(EVIL)
    print_line(EVIL)
    print_line(EVIL, err=True)
    print_text(EVIL)
    printed = capsys.readouterr()
    text = out.getvalue() + printed.out + printed.err
    assert raw(text) == set()
    assert text.count("[red]") >= 9
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_once(EVIL)
    assert raw(str(caught[0].message) + str(InputError(EVIL))) == set()


def strings(values: Any) -> Any:
    """Add hostile text to every text but names of formats."""
    if isinstance(values, dict):
        return {key: strings(value) for key, value in values.items()}
    if isinstance(values, list):
        return [strings(value) for value in values]
    return values + EVIL if isinstance(values, str) else values


def test_results_of_a_stranger_are_shown_without_control_characters(
    tmp_path: Path,
    fedzmg: Callable[..., Any],
    grid: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(figures, "draw", lambda *_: {})  # which takes long
    top = write_study(tmp_path / "study")
    word = json.dumps(EVIL.encode(errors="ignore").decode())
    lines = [
        'task = "digits"', "rounds = 10", "seeds = [0, 1, 2]", f"label = {word}",
        "[algorithms.fedzmg]", f"label = {word}", "[algorithms.fedavg]",
    ]  # fmt: skip
    (top / "study.toml").write_text("\n".join(lines).replace("\x7f", ""))
    for path in top.rglob("manifest.json"):
        path.write_text(json.dumps(strings(json.loads(path.read_text())) | {"metric": EVIL}))
    owner = dict.fromkeys(("user", "host", "process", "machine", "token"), EVIL)
    owner |= {"pid": 1, "started": 1.0, "heartbeat": 1.0}
    (top / "lock.json").write_text(json.dumps(owner))
    stopped = {"format": 1, "round": 2, "why": "diverged", "words": EVIL}
    (top / "fedavg/seed-0/stopped.json").write_text(json.dumps(stopped))
    (top / "grid").mkdir()
    (top / "grid/grid.json").write_text(json.dumps(grid | {"label": EVIL, "metric": EVIL}))
    strange = tmp_path / f"x{EVIL.encode(errors='ignore').decode().replace('/', '')}"
    strange.mkdir()
    for command in (
        ["watch", f"{top}", "--once"], ["watch", f"{top}"], ["watch", f"{top}", "--once", "--json"],
        ["diff", f"{top}/fedavg", f"{top}/fedzmg"], ["report", f"{top}", "--page-only"],
        ["keep", f"{top}", "--out", f"{strange}"], ["keep", f"{top}", "--out", f"{strange}"],
        ["report", f"{strange}", "--page-only"], ["verify", f"{strange}"], ["export", f"{strange}"],
        ["run", EVIL], ["study", f"{EVIL}.toml"], ["list", EVIL], ["report", EVIL],
        ["run", "digits", "--set", f"{EVIL}={EVIL}"], ["run", "digits", "--track", EVIL],
        ["data", "path", EVIL], [EVIL],
    ):  # fmt: skip
        done = fedzmg(*command)
        assert raw(done.out + done.err) == set(), command
        assert done.code in (0, 1, 2)
    result = study_result(reading.read([top]).studies[0])
    assert raw(str(result) + repr(result)) == set()


def test_failures_of_servers_and_trackers_are_shown_without_control_characters(
    tmp_path: Path,
) -> None:
    class Broken:
        def start(self, run: object) -> None:
            raise ValueError(EVIL)

    out = io.StringIO()
    display = Display(Terminal(file=out, width=100), "accuracy")
    with Tracking({EVIL: Broken}, tmp_path, display) as tracking:
        tracking.say(EVIL)
    assert raw(out.getvalue()) == set()


def printing(path: Path) -> Iterator[str]:
    """Name the calls of a module that print by themselves."""
    text = path.read_text(encoding="utf-8")
    if not any(word in text for word in ("print(", "Console(", "echo(", "warn(", "sys.std")):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("print", "Console", "typer.echo", "click.echo", "warnings.warn") or (
                name.startswith(("sys.stdout.", "sys.stderr.")) and "reconfigure" not in name
            ):
                yield name


def test_everything_is_printed_in_one_module() -> None:
    root = Path(fedzmg.__file__).parent
    found = {
        path.relative_to(root).as_posix(): sorted(names)
        for path in sorted(root.rglob("*.py"))
        if (names := set(printing(path)))
    }
    assert found == {
        "__main__.py": ["print"],  # a fixed text, before anything is imported
        "api.py": ["print"],
        "models/layout.py": ["warnings.warn"],
        "terminal/render.py": ["typer.echo"],
    }
