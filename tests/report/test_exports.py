"""Tables and figures as files: only our own are replaced, and the same results give the same."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedzmg.cli import app
from fedzmg.errors import InputError
from fedzmg.report import exports, figures, writing
from fedzmg.report.html import page
from fedzmg.results.reading import read
from fedzmg.results.study_result import study_result

Write = Callable[..., Path]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw one figure of a study, without content."""

    def rendered(chart: Any, suffix: str) -> bytes:
        return f"<svg>{suffix}</svg>".encode()

    monkeypatch.setattr(figures, "STUDY_FIGURES", {"seeds": figures.STUDY_FIGURES["seeds"]})
    monkeypatch.setattr(figures, "rendered", rendered)
    monkeypatch.setattr(page, "rendered", rendered)


@pytest.mark.usefixtures("quick")
def test_command_writes_beside_the_runs_and_leaves_them_alone(study: Path) -> None:
    before = {path: path.read_bytes() for path in study.rglob("*") if path.is_file()}
    page, listed = (study / "report" / name for name in ("report.html", "written.json"))
    for _ in range(2):
        done = CliRunner().invoke(app, ["report", str(study), "--page-only"])
        assert done.exit_code == 0, done.output
        # Runs are read, never touched; and what was written is not taken for one.
        found = {path: path.read_bytes() for path in study.rglob("*") if path.is_file()}
        assert set(found) == {*before, page, listed}
        before = {**before, page: found[page], listed: found[listed]}
        assert found == before


def test_several_studies_do_not_overwrite_each_other(
    study: Path, write_run: Write, tmp_path: Path
) -> None:
    write_run("other/a", "fedavg", 0, [0.1, 0.2, 0.3], task="plays")
    material = read([study, tmp_path / "other"])
    results = [study_result(study) for study in material.studies]
    written = [name for name, _ in exports.tables(material, results)]
    assert len(written) == len(set(written)) == 36
    assert "tables/2-plays-scores.csv" in written


def test_unwritable_place_is_one_line(study: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    out = str(tmp_path / "file")
    done = CliRunner().invoke(app, ["report", str(study), "--page-only", "--out", out])
    assert isinstance(done.exception, InputError)
    assert str(done.exception).endswith("choose another place with --out")
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "file" / "page", tmp_path / "folder"):
        with pytest.raises(InputError, match=r"^cannot write .*: .*; choose another place"):
            writing.write(place, b"page")
    assert (tmp_path / "file").read_text() == "in the way"
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_broken_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(InputError, match="No space left on device"):
        writing.write(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("quick")
def test_grid_becomes_a_heat_map_file(tmp_path: Path, grid: dict[str, Any]) -> None:
    (tmp_path / "grid.json").write_text(json.dumps(grid))
    material = read([tmp_path])
    charts = figures.draw(material, [])
    assert set(charts) == {"grid-fedzmg", "grid-heat-maps"}
    written = {name: content.decode() for name, content in exports.tables(material, [])}
    assert "| fedzmg | client.lr 0.1, server.lr 10 | 50.00 % |" in written["tables/grid.md"]
    assert "| on the border |" in written["tables/grid.md"]
    [row] = csv.DictReader(io.StringIO(written["tables/grid.csv"], newline=""))
    assert (row["client.lr"], row["score"], row["border"]) == ("0.1", "0.5", "client.lr")
    assert (row["points"], row["diverged"], row["neighbours_low"]) == ("6", "0", "0.4")
    names, *_ = exports.publish(material, [], tmp_path / "report")
    assert {name for name in names if name.startswith("figures/")} == {
        f"figures/{stem}.{suffix}" for stem in charts for suffix in ("png", "svg", "pdf")
    }
    assert list(read([tmp_path]).grids) == list(material.grids)  # not the report's own table


def names(place: Path) -> set[str]:
    return {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("quick")
def test_a_report_leaves_nothing_of_an_earlier_one(
    study: Path, write_run: Write, tmp_path: Path
) -> None:
    """Afterwards the directory is as if only the last report had been written, and one's own."""
    write_run("other/a", "fedavg", 0, [0.1, 0.2, 0.3], task="plays")
    both, one = [str(study), str(tmp_path / "other")], [str(study)]

    def report(places: list[str], out: str, *more: str) -> str:
        done = CliRunner().invoke(app, ["report", *places, "--out", str(tmp_path / out), *more])
        assert done.exit_code == 0, done.output
        return done.output

    report(one, "fresh")
    report(both, "used")
    used = tmp_path / "used"
    mine = {"notes.txt": "mine", "tables/9-mine-scores.md": "mine", "figures/curves.txt": "mine"}
    for name, text in mine.items():
        (used / name).write_text(text)
    before = names(used)

    output = report(one, "used")
    assert names(used) == names(tmp_path / "fresh") | set(mine)
    gone = len(before - names(used))
    assert f"{gone} files of an earlier report there are removed" in output
    for name in names(tmp_path / "fresh"):
        assert (used / name).read_bytes() == (tmp_path / "fresh" / name).read_bytes(), name
    assert all((used / name).read_text() == text for name, text in mine.items())

    report(one, "used", "--page-only")
    assert names(used) == {"report.html", "written.json", *mine}
    assert not list((tmp_path / "used" / "figures").glob("*.png"))
    report(one, "fresh", "--page-only")
    assert names(tmp_path / "fresh") == {"report.html", "written.json"}


def test_tables_and_links_are_not_replaced_either(tmp_path: Path) -> None:
    (tmp_path / "page").symlink_to(tmp_path / "nowhere")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.md").write_text("mine")
    with pytest.raises(InputError, match=r"no report wrote .*page"):
        writing.replace_files(tmp_path, {"new": b"1", "page": b"2", "tables/a.md": b"3"})
    assert names(tmp_path) == {"tables/a.md"}


@pytest.mark.parametrize("listed", ["{", "[]", '{"report": "a"}', '{"report": [1]}'])
def test_a_list_of_somebody_else_is_left_alone(tmp_path: Path, listed: str) -> None:
    (tmp_path / writing.LIST).write_text(listed)
    with pytest.raises(InputError, match=r"written\.json"):
        writing.replace_files(tmp_path, {"a": b"1"})
    assert names(tmp_path) == {writing.LIST}
    assert (tmp_path / writing.LIST).read_text() == listed


@pytest.mark.parametrize("listed", [
    '{"report": ["../mine"]}', '{"report": ["PLACE"]}', '{"report": ["link/mine"]}',
    '{"report": ["linked"]}',
])  # fmt: skip
def test_whatever_a_list_says_nothing_elsewhere_is_removed(tmp_path: Path, listed: str) -> None:
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.write_text("mine")
    out.mkdir()
    (out / "link").symlink_to(tmp_path, target_is_directory=True)
    (out / "linked").symlink_to(mine)
    (out / writing.LIST).write_text(listed.replace("PLACE", mine.as_posix()))
    assert writing.replace_files(out, {"a/b": b"c"}) == []
    assert mine.read_text() == (out / "linked").read_text() == "mine"
    assert writing.replace_files(out, {}) == ["a/b"]
    assert not (out / "a").exists()


def stage(out: Path, writer: str, **files: Any) -> None:
    with writing.staged(out, writer) as folder:
        for name, text in files.items():
            (folder / name).write_text(text)


def test_commands_in_one_directory_keep_to_their_own_files(tmp_path: Path) -> None:
    stage(tmp_path, "theory", a="1", b="1")
    stage(tmp_path, "theory", a="2")
    assert [(tmp_path / name).read_text() for name in "ab"] == ["2", "1"], "nothing is removed"
    stage(tmp_path, "diagnose", c="3")
    with pytest.raises(InputError, match=r"no 'fedzmg diagnose' wrote .*b, and one would replace"):
        stage(tmp_path, "diagnose", b="mine", c="4")
    assert [(tmp_path / name).read_text() for name in "abc"] == ["2", "1", "3"]
    # A report neither replaces nor removes them, and they do not touch the report.
    with pytest.raises(InputError, match=r"no report wrote .*a, and one would replace it"):
        writing.replace_files(tmp_path, {"a": b"5"})
    writing.replace_files(tmp_path, {"page": b"6"})
    stage(tmp_path, "diagnose", c="7")
    assert writing.replace_files(tmp_path, {"other": b"8"}) == ["page"]
    assert names(tmp_path) == {"a", "b", "c", "other", writing.LIST}


def test_what_fails_while_it_is_made_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        stage(tmp_path / "out", "theory", a="1", b=None)
    stage(tmp_path / "out", "theory")
    assert list(tmp_path.iterdir()) == []


def test_what_ends_halfway_is_known_to_the_next_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, content: bytes, remedy: str = "") -> None:
        if path.name == "second":
            raise KeyboardInterrupt
        real(path, content)

    real = writing.write
    monkeypatch.setattr(writing, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        writing.replace_files(tmp_path, {"first": b"1", "second": b"2"})
    assert names(tmp_path) == {"first", writing.LIST}
    writing.replace_files(tmp_path, {"third": b"3"})
    assert names(tmp_path) == {"third", writing.LIST}


STARTS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def hashes(place: Path) -> dict[str, str]:
    return {
        path.relative_to(place).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize("files", [False, True])
def test_another_process_place_and_day_give_the_same_bytes(
    write_run: Any, grid: dict[str, Any], tmp_path: Path, files: bool
) -> None:
    for name in ("fedzmg", "fedavg"):
        for seed in range(2):
            tops = [0.1 * seed, 0.5, 0.5, 0.5, 0.6]
            write_run(f"study/{name}/seed-{seed}", name, seed, tops, task="mnist-by-writer")
    here, arguments = tmp_path / "here", ["report", str(tmp_path / "study")]
    if files:
        (tmp_path / "grid").mkdir()
        (tmp_path / "grid" / "grid.json").write_text(json.dumps(grid))
        arguments.append(str(tmp_path / "grid"))
    else:
        arguments.append("--page-only")
    done = CliRunner().invoke(app, [*arguments, "--out", str(here)])
    assert done.exit_code == 0, done.output
    found = hashes(here)
    stems = ("curves", "differences", "traffic", "seeds", "grid-fedzmg", "grid-heat-maps")
    assert {name for name in found if name.startswith("figures/")} == {
        f"figures/{stem}.{suffix}" for stem in stems for suffix in STARTS if files
    }
    for suffix, start in STARTS.items() if files else ():
        assert (here / "figures" / f"seeds.{suffix}").read_bytes().startswith(start)

    # Other hashes of strings, another day, and somebody's own taste.
    settings = tmp_path / "matplotlibrc"
    settings.write_text("axes.titlesize: 30\nlines.linewidth: 9\n")
    away = tmp_path / "away"
    away.mkdir()
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "SOURCE_DATE_EPOCH": "86400",
        "TZ": "Asia/Tokyo",
        "MATPLOTLIBRC": str(settings),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    # A figure needs no window, and so nothing that may open one.
    program = (
        "import sys\nfrom fedzmg.cli import main\ntry:\n    main()\n"
        "finally:\n    assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program, *arguments, "--out", "there"],
        cwd=away, env=environment, check=True, capture_output=True,
    )  # fmt: skip
    assert hashes(away / "there") == found
