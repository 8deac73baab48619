"""``fedzmg data`` as a user types it."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from pydantic_core import PydanticSerializationError

from fedzmg.data import catalog
from fedzmg.data.sources import SOURCES, Remote
from fedzmg.report.html.page import render
from fedzmg.results.reading import read
from fedzmg.storage.formats import file_sha256
from fedzmg.terminal.live import Downloads
from fedzmg.terminal.render import Terminal


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


def test_a_set_is_imported_listed_and_removed(
    fedzmg: Any, files: list[str], tmp_path: Path
) -> None:
    before = fedzmg("data", "list")
    assert before.code == 0
    for name in SOURCES:
        assert name in before.out
    assert "MiB" not in before.out
    done = fedzmg("data", "import", "chars74k", *files)
    assert done.code == 0, done.err
    assert "chars74k train: 55 clients, 3,080 examples" in done.out
    assert "chars74k test: 55 clients, 330 examples" in done.out
    assert "note" not in done.out
    assert done.err.splitlines() == ["reading train", "reading test"]
    row = next(line for line in fedzmg("data", "list").out.splitlines() if "chars74k" in line)
    assert "2.6 MiB" in row
    listed = json.loads(fedzmg("data", "list", "--json").out)
    assert set(listed) == set(SOURCES)
    mine = listed["chars74k"]
    assert mine["state"] == "here"
    assert mine["counts"]["train"] == {"clients": 55, "examples": 3080}
    assert mine["fingerprint"] == catalog.load("chars74k").fingerprint
    assert listed["emnist62"]["state"] == "no: get"
    assert listed["emnist62"]["counts"]["test"] == {"clients": 3400, "examples": 77483}
    assert listed["mnist-by-writer"]["state"] == "no: import"
    assert fedzmg("data", "path", "chars74k").out.strip() == mine["path"]
    assert fedzmg("data", "path").out.strip() == str(tmp_path / "data")
    assert "2.6 MiB" in fedzmg("data", "remove", "chars74k").out
    assert json.loads(fedzmg("data", "list", "--json").out)["chars74k"]["state"] == "no: import"


def test_another_folder_can_be_named(fedzmg: Any, files: list[str], tmp_path: Path) -> None:
    other = ["--cache", "other"]
    assert fedzmg("data", "import", "chars74k", *files, *other).code == 0
    assert fedzmg("data", "path", *other).out.strip() == str(tmp_path / "other")
    assert json.loads(fedzmg("data", "list", "--json", *other).out)["chars74k"]["state"] == "here"
    assert fedzmg("data", "path", "chars74k").code == 2
    assert fedzmg("data", "remove", "chars74k", *other).code == 0
    assert not (tmp_path / "data" / "sets").exists()


def test_differences_are_printed_at_import_and_in_the_list(
    fedzmg: Any, files: list[str], tmp_path: Path
) -> None:
    done = fedzmg("data", "import", "emnist62", *files)
    assert "note: train: 55 clients instead of 3,400" in done.out
    assert "note: test: 330 examples instead of 77,483" in done.out
    assert "note: emnist62: train: 3,080 examples instead of 671,585" in fedzmg("data", "list").out
    assert json.loads(fedzmg("data", "list", "--json").out)["emnist62"]["notes"]
    record = tmp_path / "data" / "sets" / "emnist62" / "set.json"
    record.write_text("{")
    shown = fedzmg("data", "list")
    assert shown.code == 0
    assert "damaged" in shown.out
    assert "run 'fedzmg data remove emnist62'" in shown.out
    assert fedzmg("data", "remove", "emnist62").code == 0


def test_get_takes_a_mirror(
    fedzmg: Any, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remotes = tuple(
        Remote(f"https://example.org/{Path(f).name}", file_sha256(Path(f))) for f in files
    )
    monkeypatch.setitem(SOURCES, "chars74k", replace(SOURCES["chars74k"], remotes=remotes))
    done = fedzmg("data", "get", "chars74k", "--mirror", str(tmp_path))
    assert done.code == 0, done.err
    assert "55 clients, 3,080 examples" in done.out
    assert "chars74k_by_writer_train.h5: " in done.err
    assert "is here already" in fedzmg("data", "get", "chars74k").err


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        PydanticSerializationError("calling function: KeyboardInterrupt: "),
    ],
)
def test_ctrl_c_leaves_nothing_half_done(
    fedzmg: Any,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    def press(_: Downloads, label: str, total: int | None) -> None:
        if label == "reading test":
            raise error

    monkeypatch.setattr(Downloads, "begin", press)
    done = fedzmg("data", "import", "chars74k", *files)
    assert done.code == 130
    assert done.err.splitlines() == [
        "",
        "fedzmg: interrupted; run the same command again to continue",
    ]
    left = [p for p in (tmp_path / "data").rglob("*") if p.is_file() and p.suffix != ".lock"]
    assert left == []


def test_progress_is_plain_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    out = io.StringIO()
    with Downloads(Terminal(file=out, width=80)) as progress:
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
    console = Terminal(file=out, force_terminal=True, width=100, color_system=None)
    with Downloads(console) as progress:
        progress.begin("[a].gz", 10 * 2**20)
        progress.advance(5 * 2**20)
        progress.begin("reading train", None)
    last = out.getvalue().splitlines()[-3:]
    assert any("[a].gz" in line and "━" in line for line in last)
    assert "reading train" in out.getvalue()
    assert "a.gz: 10.0 MiB" not in out.getvalue()


def test_description_and_page_name_the_command(fedzmg: Any, tmp_path: Path) -> None:
    done = fedzmg("data", "describe", "digits", "--as-paper", "--out", "described")
    assert done.code == 0, done.err
    kept = json.loads((tmp_path / "described" / "heterogeneity.json").read_text())
    assert kept["made"]["command"] == "fedzmg data describe digits --as-paper --out described"
    assert len(kept["clients"]) == 10
    assert kept["made"]["command"] in render(read([tmp_path / "described"]))


def test_own_files_are_described_and_shown(fedzmg: Any, tmp_path: Path) -> None:
    from PIL import Image

    rows = "".join(f"{'north' if i % 3 else 'south'},{'ab'[i % 2]},note\n" for i in range(12))
    (tmp_path / "visits.csv").write_text("clinic,risk,remark\n" + rows)
    named = ("--client-column", "clinic", "--label-column", "risk")
    done = fedzmg("data", "describe", "visits.csv", *named, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [row["client"] for row in found["clients"]] == ["north", "south"]
    assert (found["counts"], found["labels"]) == ([[4, 4], [2, 2]], ["a", "b"])
    assert (found["name"], found["split"], found["directory"]) == (
        "visits", None, "runs/data-visits"
    )  # fmt: skip
    dealt = ("--partition", "dirichlet", "--clients", "2")
    done = fedzmg("data", "describe", "visits.csv", "--label-column", "risk", *dealt)
    assert "needs alpha" in done.err
    assert "--set alpha=0.1" in done.err
    for i, name in enumerate(["ann/cat/1.png", "bob/dog/2.png"]):
        (tmp_path / "photos" / name).parent.mkdir(parents=True)
        Image.new("L", (3, 3), 90 * i).save(tmp_path / "photos" / name)
    done = fedzmg("data", "show", "photos")
    assert done.code == 0, done.err
    assert (tmp_path / "runs" / "data-photos" / "examples.png").is_file()


def test_picture_does_not_replace_a_foreign_file(fedzmg: Any, tmp_path: Path) -> None:
    mine = tmp_path / "other" / "examples.png"
    mine.parent.mkdir()
    mine.write_text("mine")
    done = fedzmg("data", "show", "digits", "--out", "other")
    assert done.code == 2
    assert "'fedzmg data show'" in done.err
    assert "other/examples.png" in done.err
    assert mine.read_text() == "mine"
