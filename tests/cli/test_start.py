"""The start of a command, while libraries load, and its messages."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

import pytest

import fedzmg
import fedzmg.cli
from fedzmg.__main__ import main
from fedzmg.cli import common

Hook = Callable[[Callable[[], None]], None]
LINE = "\nfedzmg: interrupted before anything was done\n"


class Loading(MetaPathFinder):
    """Something happens while the commands are being loaded."""

    def __init__(self, happening: Callable[[], None]) -> None:
        self.happening = happening

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if name == "fedzmg.cli":
            self.happening()


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def press_in_torch() -> None:
    """While the body of torch runs, which would take the exception for an error of its own."""
    body = "try:\n    press()\nexcept BaseException:\n    raise ImportError('swallowed')"
    exec(compile(body, "torch.py", "exec"), {"__name__": "torch", "press": press})


def fail() -> None:
    raise ImportError("no such library")


@pytest.fixture
def while_loading(monkeypatch: pytest.MonkeyPatch) -> Hook:
    def hook(happening: Callable[[], None]) -> None:
        monkeypatch.delitem(sys.modules, "fedzmg.cli")
        monkeypatch.setattr(fedzmg, "cli", fedzmg.cli)  # is put back, too
        monkeypatch.setattr(sys, "meta_path", [Loading(happening), *sys.meta_path])

    return hook


def test_ctrl_c_while_torch_loads_ends_at_once(
    while_loading: Hook,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    while_loading(press_in_torch)
    with pytest.raises(ImportError):  # only here, where the process lives on
        main()
    assert codes == [130]
    assert capsys.readouterr().err == LINE


def test_ctrl_c_while_libraries_load_is_one_line(
    while_loading: Hook, capsys: pytest.CaptureFixture[str]
) -> None:
    while_loading(press)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130
    assert capsys.readouterr().err == LINE
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_missing_library_is_not_an_interruption(while_loading: Hook) -> None:
    while_loading(fail)
    with pytest.raises(ImportError, match="no such library"):
        main()


def test_an_ignored_signal_stays_ignored(
    while_loading: Hook,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    while_loading(press)
    monkeypatch.setattr(sys, "argv", ["fedzmg", "--version"])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().out.startswith("fedzmg ")


def test_a_path_is_one_line_with_every_character(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    path = Path("runs") / "[bold]" / ("long-" * 40)
    common.print_path("figure", path)
    common.print_path("", path, err=True)
    shown = capsys.readouterr()
    assert shown.out == f"figure  {path}\n"
    assert shown.err == f"        {path}\n"


def test_notes_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    common.say("first", "second")
    common.say()
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "fedzmg: first\nfedzmg: second\n")
