"""The printed help of every command."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fedzmg.cli import app


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


@functools.cache
def printed(path: tuple[str, ...]) -> str:
    done = CliRunner(env={"COLUMNS": "240", "TERM": "dumb"}).invoke(app, [*path, "--help"])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_is_complete(path: tuple[str, ...]) -> None:
    shown = printed(path)
    assert " ." not in shown.replace(" ...", "")
    for one in COMMANDS[path].params:
        text = " ".join((one.help or "").split())
        assert text, one.name
        assert text in shown  # no part is taken for markup
        assert "default" not in text  # shown by typer
        if isinstance(one.show_default, str):
            assert f"[default: ({one.show_default})]" in shown
        elif isinstance(one.default, str | int | float) and not isinstance(one.default, bool):
            assert f"[default: {one.default}]" in shown


def test_defaults_in_words_are_shown() -> None:
    assert len(COMMANDS) == 30
    assert "[default: (a fifth of --along)]" in printed(("diagnose",))
    assert printed(("run",)).count("[default: (auto)]") == 2
