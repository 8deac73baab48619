"""A path is read in the format that its suffix tells, a table without its features."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_arrays import rows_of

from fedzmg.data import formats
from fedzmg.data.formats.tabular import read_table
from fedzmg.data.sources import SOURCES
from fedzmg.errors import InputError

HELD = {"al": [0], "zoe": [1, 0]}
READERS = sorted(
    {
        *formats.SUFFIXES.values(),
        *(form.reader for known in SOURCES.values() for form in known.forms),
        "image_folder.read_image_folder",
    }
)
ROWS = [("zoe", 1), ("al", 0), ("zoe", 0)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same three rows in every format."""
    clients, labels = ([row[i] for row in ROWS] for i in (0, 1))
    lines = [f"{client},{label},words" for client, label in ROWS]
    (tmp_path / "t.csv").write_text("\n".join(["client,label,remark", *lines]) + "\n")
    table = {"client": clients, "label": labels, "x": [1, 2, 3]}
    pq.write_table(pa.table(table), tmp_path / "t.pq")
    np.savez(tmp_path / "t.npz", x=np.zeros((3, 2)), y=labels, clients=clients)
    users = {name: {"x": [[0.5]] * len(held), "y": held} for name, held in HELD.items()}
    content = {"users": [*HELD], "num_samples": [1, 2], "user_data": users}
    (tmp_path / "t.json").write_text(json.dumps(content))
    for i, (client, label) in enumerate(ROWS):
        path = tmp_path / "photos" / client / ["cat", "dog"][label]
        path.mkdir(parents=True)
        Image.new("L", (2, 2), i).save(path / f"{i}.png")
    return tmp_path


@pytest.mark.parametrize("name", READERS)
def test_every_reader_takes_a_path_in_any_spelling(name: str, tmp_path: Path) -> None:
    """The message names the whole path, so the path was understood."""
    read = formats.reader(name)
    path = tmp_path / "not here"
    for given in (str(path), path, [str(path)], [path]):
        with pytest.raises(InputError, match=f"^{re.escape(str(path))}: no such "):
            read(given)
    for wrong in (None, 7, [None]):
        with pytest.raises(InputError, match="is not a path"):
            read(wrong)
    with pytest.raises(InputError, match="0 paths"):
        read([])


@pytest.mark.parametrize("name", ["t.csv", "t.pq", "t.npz", "t.json"])
def test_the_suffix_tells_the_format(folder: Path, name: str) -> None:
    assert rows_of(formats.read_path(str(folder / name))) == HELD


def test_folders_are_folders_of_images(folder: Path) -> None:
    columns = formats.read_path(str(folder / "photos"))
    assert rows_of(columns) == {"al": [0], "zoe": [0, 1]}  # by label
    assert columns.classes == ("cat", "dog")


@pytest.mark.parametrize("labels", ["2,0,1", "10,9,10", "b,a,b"])
def test_labels_alone_are_the_labels_of_the_whole_table(tmp_path: Path, labels: str) -> None:
    path = tmp_path / "t.csv"
    rows = zip(["z", "y", "z"], labels.split(","), strict=True)
    path.write_text("who,class,x\n" + "".join(f"{who},{label},1\n" for who, label in rows))
    alone = read_table(path, client="who", label="class", features=[])
    whole = read_table(path, client="who", label="class")
    assert list(alone.columns) == ["y"]
    assert rows_of(alone) == rows_of(whole)
    assert (alone.classes, alone.notes) == (whole.classes, whole.notes)


def test_paths_are_distinguished_from_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert all(map(formats.is_path, ("t.csv", "gone.CSV", "photos", "./photos", "a/b")))
    assert not any(map(formats.is_path, ("digits", "cifar100-tff", "photo")))
    (folder / "t.xlsx").write_bytes(b"PK")
    for name in ("t.xlsx", "gone.csv"):
        with pytest.raises(InputError, match=name):
            formats.read_path(str(folder / name))
