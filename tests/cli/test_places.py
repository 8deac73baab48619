"""A place that cannot be written is said before the work, and nothing is left there."""

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
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("folder").mkdir()
    for name in (
        "diagnose.diagnose",
        "theory.run",
        "cli.data._population",
        "bench.measure.measure_all",
    ):
        monkeypatch.setattr(f"fedzmg.{name}", work)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["theory", "--plot", "--out", BELOW_A_FILE], "cannot write file/below: Not a directory"),
        (["theory", "--plot", "--out", "file"], "choose another place with --out"),
        (["theory", "--html", "file/page.html"], "choose another file"),
        (["theory", "--html", "folder"], "it is a directory; choose another file"),
        (["diagnose", "digits", "--out", BELOW_A_FILE], "choose another --out"),
        (
            ["bench", "mlp", "--out", "file/figures.json"],
            "cannot write file: Not a directory; choose",
        ),
        (
            ["bench", "mlp", "--out", "folder"],
            "folder: it is a directory; choose another --out, such",
        ),
        (["data", "describe", "digits", "--out", BELOW_A_FILE], "another place with --out"),
    ],
)
def test_it_is_one_line_before_the_work(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, InputError), done.exception
    assert message in str(done.exception)
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
def test_a_file_of_somebody_else_is_left_alone_before_the_work(
    arguments: list[str], name: str
) -> None:
    Path("folder", name).write_text("mine")
    done = CliRunner().invoke(app, [*arguments, "--out", "folder"])
    command = " ".join(arguments[:-1])
    assert str(done.exception) == (
        f"no 'fedzmg {command}' wrote folder/{name}, and one would replace it: move it away, or "
        "choose another place with --out"
    )
    assert Path("folder", name).read_text() == "mine"


def test_a_place_that_can_be_written_is_not_made_before_the_work() -> None:
    done = CliRunner().invoke(app, ["theory", "--plot", "--out", "new/inner", "--html", "n/p.html"])
    assert isinstance(done.exception, AssertionError)
    assert sorted(path.name for path in Path().iterdir()) == ["file", "folder"]


def test_a_directory_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another user meets it; an administrator may write anywhere."""

    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(InputError, match="cannot write folder/x: Permission denied; choose"):
        check_place(Path("folder/x"))
