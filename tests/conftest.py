"""Settings of all tests: one thread, fixed randomness, no GPU; and a runner of commands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings

from fedzmg.cli import main

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
torch.set_num_threads(1)
# A background job of a shell ignores Ctrl-C, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of GPUs where there is none; warnings of their compilers change often."""
    absent = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(absent)
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def pytest_runtest_setup() -> None:
    """Weights that a test leaves to torch do not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _without_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are promised on CPUs; only tests marked ``gpu`` see a GPU."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("fedzmg.simulation.training.has_gpu", lambda: False)


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


@pytest.fixture
def forget_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process of its own for plugin files."""
    from fedzmg import plugins
    from fedzmg.aggregators import AGGREGATORS
    from fedzmg.algorithms import ALGORITHMS
    from fedzmg.tasks import TASKS

    monkeypatch.setattr(plugins, "_PLUGINS", {})
    tables: list[Any] = [AGGREGATORS, ALGORITHMS, TASKS]
    before = [(dict(table.data), dict(table.origins)) for table in tables]
    yield
    for table, (data, origins) in zip(tables, before, strict=True):
        table.data, table.origins = data, origins
