"""``fedzmg data`` as a user types it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from rich.console import Console

from fedzmg import cli
from fedzmg.data import catalog
from fedzmg.data.fetch import file_hash
from fedzmg.data.sources import SOURCES, Remote
from fedzmg.report.html.page import render
from fedzmg.results.reading import read
from fedzmg.terminal import downloads
from fedzmg.terminal.downloads import Downloads

ALONE = f"""
import sys, types
# Without what the package itself imports, which takes long.
module = sys.modules["fedzmg"] = types.ModuleType("fedzmg")
module.__path__ = [{str(Path(cli.__file__).parent.parent)!r}]
module = sys.modules["fedzmg.data"] = types.ModuleType("fedzmg.data")
module.__path__ = [{str(Path(catalog.__file__).parent)!r}]
"""


class Done:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def fedzmg(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> object:
    monkeypatch.setenv("FEDZMG_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("FEDZMG_MIRROR", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["fedzmg", "data", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return Done(code, *capsys.readouterr())

    return run


def write(path: Path, clients: int, rows: int) -> Path:
    with h5py.File(path, "w") as file:
        for number in range(clients):
            group = file.create_group(f"examples/w{number}")
            group["pixels"] = np.zeros((rows, 28, 28), np.float32)
            group["label"] = np.arange(rows, dtype=np.int32) % 62
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    made = [
        write(tmp_path / "chars74k_by_writer_train.h5", 55, 56),
        write(tmp_path / "chars74k_by_writer_test.h5", 55, 6),
    ]
    return [str(path) for path in made]


def test_a_set_is_imported_listed_and_removed(fedzmg, files: list[str], tmp_path: Path) -> None:
    before = fedzmg("list")
    assert before.code == 0
    for name in SOURCES:
        assert name in before.out
    assert "MiB" not in before.out
    done = fedzmg("import", "chars74k", *files)
    assert done.code == 0, done.err
    assert "chars74k train: 55 clients, 3,080 examples" in done.out
    assert "chars74k test: 55 clients, 330 examples" in done.out
    assert "note" not in done.out
    assert done.err.splitlines() == ["reading train", "reading test"]
    row = next(line for line in fedzmg("list").out.splitlines() if "chars74k" in line)
    assert "2.6 MiB" in row
    listed = json.loads(fedzmg("list", "--json").out)
    assert set(listed) == set(SOURCES)
    mine = listed["chars74k"]
    assert mine["state"] == "here"
    assert mine["counts"]["train"] == {"clients": 55, "examples": 3080}
    assert mine["fingerprint"] == catalog.load("chars74k").fingerprint
    assert listed["emnist62"]["state"] == "no: get"
    assert listed["emnist62"]["counts"]["test"] == {"clients": 3400, "examples": 77483}
    assert listed["mnist-by-writer"]["state"] == "no: import"
    assert fedzmg("path", "chars74k").out.strip() == mine["path"]
    assert fedzmg("path").out.strip() == str(tmp_path / "data")
    assert "2.6 MiB" in fedzmg("remove", "chars74k").out
    assert json.loads(fedzmg("list", "--json").out)["chars74k"]["state"] == "no: import"


def test_another_folder_can_be_named(fedzmg, files: list[str], tmp_path: Path) -> None:
    other = ["--cache", "other"]
    assert fedzmg("import", "chars74k", *files, *other).code == 0
    assert fedzmg("path", *other).out.strip() == str(tmp_path / "other")
    assert json.loads(fedzmg("list", "--json", *other).out)["chars74k"]["state"] == "here"
    assert fedzmg("path", "chars74k").code == 2
    assert fedzmg("remove", "chars74k", *other).code == 0
    assert not (tmp_path / "data" / "sets").exists()


def test_what_differs_is_printed_at_import_and_in_the_list(
    fedzmg, files: list[str], tmp_path: Path
) -> None:
    done = fedzmg("import", "emnist62", *files)
    assert "note: train: 55 clients instead of 3,400" in done.out
    assert "note: test: 330 examples instead of 77,483" in done.out
    assert "note: emnist62: train: 3,080 examples instead of 671,585" in fedzmg("list").out
    assert json.loads(fedzmg("list", "--json").out)["emnist62"]["notes"]
    record = tmp_path / "data" / "sets" / "emnist62" / "set.json"
    record.write_text("{")
    shown = fedzmg("list")
    assert shown.code == 0
    assert "damaged" in shown.out
    assert "run 'fedzmg data remove emnist62'" in shown.out
    assert fedzmg("remove", "emnist62").code == 0


def test_get_takes_a_mirror(
    fedzmg, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remotes = tuple(
        Remote(f"https://example.org/{Path(f).name}", file_hash(Path(f))) for f in files
    )
    monkeypatch.setitem(SOURCES, "chars74k", replace(SOURCES["chars74k"], remotes=remotes))
    done = fedzmg("get", "chars74k", "--mirror", str(tmp_path))
    assert done.code == 0, done.err
    assert "55 clients, 3,080 examples" in done.out
    assert "chars74k_by_writer_train.h5: " in done.err
    assert "is here already" in fedzmg("get", "chars74k").err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["get", "emnist26"], "unknown data set 'emnist26': did you mean 'emnist62'?"),
        (["get", "chars74k"], "no verified download of 'chars74k' is known: run 'fedzmg data imp"),
        (["get", "cifar100", "--mirror", "nowhere"], "nowhere/cifar-100-binary.tar.gz"),
        (["import", "chars74k", "none.h5"], "none.h5: there is no such file or folder"),
        (["import", "chars74k"], "Missing argument 'FILE...'"),
        (["import", "chars74k", "."], ". holds no file of 'chars74k': give chars74k_by_writer_tr"),
        (["path", "emnist62"], "is not here: run 'fedzmg data get emnist62', or 'fedzmg data imp"),
        (["remove", "mnist"], "data set 'mnist' is not here: nothing to remove"),
        (["lits"], "No such command 'lits'"),
        (["list", "--cache"], "requires an argument"),
        (["import", "mnist", ".", "--cache", "file"], "cannot write"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    fedzmg, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "file").write_text("")
    done = fedzmg(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1, done.err


def test_help_shows_the_verbs(fedzmg) -> None:
    shown = fedzmg("--help")
    assert shown.code == 0
    for verb in ("list", "get", "import", "remove", "path"):
        assert verb in shown.out
    assert fedzmg().out.strip() == shown.out.strip()


def test_help_imports_no_reader_and_no_catalog() -> None:
    script = ALONE + (
        "from fedzmg import cli\n"
        "heavy = {'torch', 'h5py', 'numpy', 'fedzmg.data.catalog', 'fedzmg.terminal'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_ctrl_c_leaves_nothing_half_done(files: list[str], tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(
        ALONE + "import time\n"
        "from fedzmg import cli\n"
        "from fedzmg.data import column_store\n"
        "real = column_store.save\n"
        "def late(place, *rest):\n"
        "    made = real(place, *rest)\n"
        "    print('now', flush=True)\n"
        "    time.sleep(60)\n"
        "column_store.save = late\n"
        "cli.main()\n"
    )
    environment = {**os.environ, "FEDZMG_DATA": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(slow), "data", "import", "chars74k", *files],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == ("fedzmg: interrupted; run the same command again to continue")
    left = [p for p in (tmp_path / "data").rglob("*") if p.is_file() and p.suffix != ".lock"]
    assert left == []


def test_progress_is_plain_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    out = io.StringIO()
    with Downloads(Console(file=out, width=80)) as progress:
        progress.begin("a.gz", 10 * 2**20)
        for second in range(13):
            clock[0] = second
            progress.advance(second * 2**19)
        progress.say("[not] markup")
        progress.begin("reading train", None)
    assert out.getvalue().splitlines() == [
        "a.gz: 10.0 MiB",
        "a.gz: 3.0 MiB of 10.0 MiB",
        "a.gz: 6.0 MiB of 10.0 MiB",
        "[not] markup",
        "reading train",
    ]


def test_progress_is_a_bar_in_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    with Downloads(console) as progress:
        progress.begin("[a].gz", 10 * 2**20)
        progress.advance(5 * 2**20)
        progress.begin("reading train", None)
    last = out.getvalue().splitlines()[-3:]
    assert any("[a].gz" in line and "━" in line for line in last)
    assert "reading train" in out.getvalue()
    assert "a.gz: 10.0 MiB" not in out.getvalue()
    assert downloads.LINE_SECONDS == 5


def test_a_description_says_what_made_it_and_the_page_how_to_repeat_it(
    fedzmg: Any, tmp_path: Path
) -> None:
    done = fedzmg("describe", "digits", "--as-paper", "--out", "described")
    assert done.code == 0, done.err
    kept = json.loads((tmp_path / "described" / "heterogeneity.json").read_text())
    assert kept["made"]["command"] == "fedzmg data describe digits --as-paper --out described"
    assert len(kept["clients"]) == 10
    assert kept["made"]["command"] in render(read([tmp_path / "described"]))


def test_files_of_ones_own_are_described_and_shown(fedzmg: Any, tmp_path: Path) -> None:
    from PIL import Image

    rows = "".join(f"{'north' if i % 3 else 'south'},{'ab'[i % 2]},note\n" for i in range(12))
    (tmp_path / "visits.csv").write_text("clinic,risk,remark\n" + rows)
    named = ("--client-column", "clinic", "--label-column", "risk")
    done = fedzmg("describe", "visits.csv", *named, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [row["client"] for row in found["clients"]] == ["north", "south"]
    assert (found["counts"], found["labels"]) == ([[4, 4], [2, 2]], ["a", "b"])
    assert (found["name"], found["split"], found["directory"]) == (
        "visits", None, "runs/data-visits"
    )  # fmt: skip
    dealt = ("--partition", "dirichlet", "--clients", "2")
    done = fedzmg("describe", "visits.csv", "--label-column", "risk", *dealt)
    assert "needs alpha" in done.err
    assert "--set alpha=0.1" in done.err
    for i, name in enumerate(["ann/cat/1.png", "bob/dog/2.png"]):
        (tmp_path / "photos" / name).parent.mkdir(parents=True)
        Image.new("L", (3, 3), 90 * i).save(tmp_path / "photos" / name)
    done = fedzmg("show", "photos")
    assert done.code == 0, done.err
    assert (tmp_path / "runs" / "data-photos" / "examples.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("describe", "t.csv"), "unknown column 'client'.*--label-column"),
        (("describe", "gone.csv"), "gone.csv: no such file or folder: check the path"),
        (
            ("describe", "digts"),
            "'digts' is neither a data set nor a file or folder: did you mean 'digits'",
        ),
        (("describe", "digits", "--label-column", "y"), "--label-column"),
        (("describe", "t.csv", "--split", "test"), "t.csv: a path has no splits: leave out"),
        (("show", "t.csv"), "a table has no pictures: use 'fedzmg data describe t.csv'"),
    ],
)
def test_paths_that_cannot_be_described_are_refused(
    fedzmg: Any, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "t.csv").write_text("who,label\na,1\n")
    done = fedzmg(*arguments)
    assert done.code == 2
    assert re.search(said, done.err.replace("\n", " "))


def test_a_picture_replaces_only_what_it_made(fedzmg: Any, tmp_path: Path) -> None:
    """As other commands that fill a folder: another's file is left alone."""
    for _ in range(2):
        done = fedzmg("show", "digits", "--rows", "2", "--columns", "2", "--out", "shown")
        assert (done.code, done.out.split()) == (0, ["figure", "shown/examples.png"])
    made = sorted(path.name for path in (tmp_path / "shown").iterdir())
    assert made == ["examples.png", "examples.svg", "written.json"]
    mine = tmp_path / "other" / "examples.png"
    mine.parent.mkdir()
    mine.write_text("mine")
    done = fedzmg("show", "digits", "--out", "other")
    assert (done.code, done.err) == (
        2,
        "fedzmg: error: no 'fedzmg data show' wrote other/examples.png, and one would replace it: "
        "move it away, or choose another place with --out\n",
    )
    assert mine.read_text() == "mine"
    done = fedzmg("show", "digits", "--out", "other/examples.png/below")
    assert "cannot write other/examples.png/below: Not a directory; choose another" in done.err
