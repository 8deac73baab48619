"""What commands say besides their results."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedzmg.cli import output


def test_a_place_is_one_line_with_every_character(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    path = Path("runs") / "[bold]" / ("long-" * 40)
    output.place("figure", path)
    output.place("", path, err=True)
    shown = capsys.readouterr()
    assert shown.out == f"figure  {path}\n"
    assert shown.err == f"        {path}\n"


def test_notes_are_apart_from_results(capsys: pytest.CaptureFixture[str]) -> None:
    output.say("first", "second")
    output.say()
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "fedzmg: first\nfedzmg: second\n")
