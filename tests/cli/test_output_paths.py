"""Directories that cannot be written are rejected before the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedzmg.cli import app
from fedzmg.errors import InputError
from fedzmg.report.writing import check_place

BELOW_A_FILE = "file/below"


def work(*_: Any, **__: Any) -> Any:
    raise AssertionError("the work has begun")


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("folder").mkdir()
    for name in (
        "diagnose.diagnose",
        "theory.run",
        "cli.data._population",
    ):
        monkeypatch.setattr(f"fedzmg.{name}", work)


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["theory", "--plot", "--out", BELOW_A_FILE], "file/below"),
        (["theory", "--plot", "--out", "file"], "file"),
        (["theory", "--html", "file/page.html"], "file"),
        (["theory", "--html", "folder"], "folder"),
        (["diagnose", "digits", "--out", BELOW_A_FILE], "file/below"),
        (["data", "describe", "digits", "--out", BELOW_A_FILE], "file/below"),
    ],
)
def test_unwritable_path_is_one_line_before_the_work(arguments: list[str], path: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, InputError), done.exception
    assert f"cannot write {path}: " in str(done.exception)
    assert "; choose " in str(done.exception)
    assert "\n" not in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["diagnose", "digits"], "diagnosis.json"),
        (["diagnose", "digits"], "diagnosis.svg"),
        (["data", "describe", "digits"], "heterogeneity.csv"),
        (["data", "describe", "digits"], "written.json"),
    ],
)
def test_foreign_file_is_left_alone(arguments: list[str], name: str) -> None:
    Path("folder", name).write_text("mine")
    done = CliRunner().invoke(app, [*arguments, "--out", "folder"])
    assert isinstance(done.exception, InputError)
    assert f"folder/{name}" in str(done.exception)
    assert Path("folder", name).read_text() == "mine"


def test_no_directory_is_made_before_the_work() -> None:
    done = CliRunner().invoke(app, ["theory", "--plot", "--out", "new/inner", "--html", "n/p.html"])
    assert isinstance(done.exception, AssertionError)
    assert sorted(path.name for path in Path().iterdir()) == ["file", "folder"]


def test_a_directory_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    # Simulated: an administrator may write anywhere.
    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(InputError, match="cannot write folder/x: Permission denied"):
        check_place(Path("folder/x"))
