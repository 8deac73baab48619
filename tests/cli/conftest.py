"""Commands as a user types them, in this process, which has loaded everything already."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fedzmg.cli import main


class Done(NamedTuple):
    """Result of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def fedzmg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run a command in an empty directory, as wide as a terminal that shows whole tables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("FEDZMG_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("FEDZMG_MIRROR", raising=False)

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["fedzmg", *arguments])
        capsys.readouterr()
        code: str | int | None = 0
        try:
            main()
        except SystemExit as left:
            code = left.code
        assert isinstance(code, int)
        return Done(code, *capsys.readouterr())

    return run
