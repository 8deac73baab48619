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
def test_nothing_is_lost_from_the_help(path: tuple[str, ...]) -> None:
    shown = printed(path)
    assert " ." not in shown.replace(" ...", "")
    for one in COMMANDS[path].params:
        said = " ".join((one.help or "").split())
        assert said, one.name
        assert said in shown  # what looks like markup is not there
        assert "default" not in said  # said in a way of its own, below
        if isinstance(one.show_default, str):
            assert f"[default: ({one.show_default})]" in shown
        elif isinstance(one.default, str | int | float) and not isinstance(one.default, bool):
            assert f"[default: {one.default}]" in shown


def test_defaults_in_words_are_there_at_all() -> None:
    assert len(COMMANDS) > 15
    assert "[default: (a fifth of --along)]" in printed(("diagnose",))
    assert "[default: (0)]" in printed(("run",))
    assert "[default: (all)]" in printed(("theory",))
    assert printed(("run",)).count("[default: (auto)]") == 2
    assert "(mlp on a CPU; cifar100, emnist62, shakespeare on a GPU)" in printed(("bench",))
    assert "two runs, studies or grids" in printed(("diff",))
    assert "studies, grids, what 'fedzmg data describe' wrote" in printed(("report",))
