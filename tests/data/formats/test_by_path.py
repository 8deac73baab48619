"""A path is read as what its name says, and a table's labels without its other columns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_arrays import rows_of

from fedzmg.data.formats import by_path, tabular
from fedzmg.errors import InputError

HELD = {"al": [0], "zoe": [1, 0]}
ROWS = [("zoe", 1), ("al", 0), ("zoe", 0)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same three rows in every form."""
    clients, labels = ([row[i] for row in ROWS] for i in (0, 1))
    lines = [f"{client},{label},words" for client, label in ROWS]
    (tmp_path / "t.csv").write_text("\n".join(["client,label,remark", *lines]) + "\n")
    pq.write_table(
        pa.table({"client": clients, "label": labels, "x": [1, 2, 3]}), tmp_path / "t.pq"
    )
    np.savez(tmp_path / "t.npz", x=np.zeros((3, 2)), y=labels, clients=clients)
    users = {name: {"x": [[0.5]] * len(held), "y": held} for name, held in HELD.items()}
    counts = [len(held) for held in HELD.values()]
    content = {"users": [*HELD], "num_samples": counts, "user_data": users}
    (tmp_path / "t.json").write_text(json.dumps(content))
    for i, (client, label) in enumerate(ROWS):
        place = tmp_path / "photos" / client / ["cat", "dog"][label]
        place.mkdir(parents=True)
        Image.new("L", (2, 2), i).save(place / f"{i}.png")
    return tmp_path


@pytest.mark.parametrize("name", ["t.csv", "t.pq", "t.npz", "t.json"])
def test_the_name_says_how_to_read_a_file(folder: Path, name: str) -> None:
    assert rows_of(by_path.read(str(folder / name))) == HELD


def test_folders_are_folders_of_images(folder: Path) -> None:
    columns = by_path.read(str(folder / "photos"))
    assert rows_of(columns) == {"al": [0], "zoe": [0, 1]}  # by label
    assert columns.classes == ("cat", "dog")


@pytest.mark.parametrize("labels", ["2,0,1", "10,9,10", "b,a,b"])
def test_labels_alone_are_the_labels_of_the_whole_table(tmp_path: Path, labels: str) -> None:
    path = tmp_path / "t.csv"
    rows = zip(["z", "y", "z"], labels.split(","), strict=True)
    path.write_text("who,class,x\n" + "".join(f"{who},{label},1\n" for who, label in rows))
    alone = tabular.read_labels(path, client="who", label="class")
    whole = tabular.read(path, client="who", label="class")
    assert rows_of(alone) == rows_of(whole)
    assert (alone.classes, alone.notes) == (whole.classes, whole.notes)
    assert tabular.read_labels(path, client=None, label="class").owners is None


def test_what_is_a_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name in ("t.csv", "gone.CSV", "photos", "./photos", "a/b"):
        assert by_path.is_path(name)
    for name in ("digits", "cifar100-tff", "photo"):
        assert not by_path.is_path(name)


def test_what_cannot_be_read_is_refused_in_one_line(folder: Path) -> None:
    (folder / "t.xlsx").write_bytes(b"PK")
    for name, said in {
        "t.xlsx": r"what is it\? give a folder of images, or a file named \.csv",
        "gone.csv": "gone.csv: no such file or folder",
    }.items():
        with pytest.raises(InputError, match=said) as caught:
            by_path.read(str(folder / name))
        assert "\n" not in str(caught.value)
