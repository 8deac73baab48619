from __future__ import annotations

import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_arrays import rows_of, texts

from fedzmg.data.formats.tabular import from_dataset, from_partitions
from fedzmg.errors import InputError


class Column(list[Any]):
    """A column that is made on demand, as newer versions of ``datasets`` give it."""


class Table:
    """Stands in for ``datasets.Dataset``: names, types, and columns by name, rows by number."""

    def __init__(self, lazy: bool = True, types: Any = None, **columns: Any) -> None:
        self.columns, self.lazy = columns, lazy
        self.column_names = list(columns)
        self.features = types or {name: SimpleNamespace(dtype="string") for name in columns}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return Column(self.columns[key]) if self.lazy else self.columns[key]
        return {name: values[key] for name, values in self.columns.items()}


def picture(value: int, mode: str = "L", width: int = 3) -> Image.Image:
    return Image.new(mode, (width, 2), value if mode == "L" else (value, value + 1, value + 2))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


WRITERS = ["zoe", "al", "zoe"]
LABELS = [0, 2, 1]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    "images",
    [
        [picture(1), picture(2), picture(3)],
        [png(picture(i)) for i in (1, 2, 3)],
        [{"bytes": png(picture(i)), "path": None} for i in (1, 2, 3)],
        [np.full((2, 3), i, np.uint8) for i in (1, 2, 3)],
        [np.full((2, 3, 1), i, np.uint8) for i in (1, 2, 3)],
        torch.tensor([1, 2, 3], dtype=torch.uint8)[:, None, None].expand(3, 2, 3),
    ],
    ids=["pillow", "bytes", "struct", "arrays", "one channel", "tensor"],
)
def test_grey_images(lazy: bool, images: Any) -> None:
    table = Table(lazy, image=images, writer=WRITERS, label=LABELS)
    columns = from_dataset(table, client="writer", label="label")
    assert rows_of(columns) == {"al": [2], "zoe": [0, 1]}
    x = columns.array("x")
    assert (x.shape, x.dtype) == ((3, 2, 3), np.uint8)
    assert x[:, 0, 0].tolist() == [2, 1, 3]


@pytest.mark.parametrize(
    "images",
    [
        [picture(10, "RGB"), picture(20, "RGB")],
        [np.asarray(picture(i, "RGB")) for i in (10, 20)],
        [np.asarray(picture(i, "RGB")).transpose(2, 0, 1) for i in (10, 20)],
    ],
    ids=["pillow", "channels last", "channels first"],
)
def test_colours_come_first(images: Any) -> None:
    x = from_dataset(Table(image=images), client=None, label=None).array("x")
    assert x.shape == (2, 3, 2, 3)
    assert x[:, :, 0, 0].tolist() == [[10, 11, 12], [20, 21, 22]]


def test_numbers_and_text() -> None:
    table = Table(who=[2, 1, 2], f=[1.5, 2.5, 3.5], g=[[1, 2], [3, 4], [5, 6]], t=["a", "é", ""])
    columns = from_dataset(table, client="who", label=None, features=["f", "g"])
    assert columns.array("x").tolist() == [[2.5, 3, 4], [1.5, 1, 2], [3.5, 5, 6]]
    assert columns.array("x").dtype == np.float32
    assert columns.owners is not None
    assert columns.owners.names == ("1", "2")
    assert texts(from_dataset(table, client="who", label=None, features=["t"])) == ["é", "a", ""]


def test_class_names_are_the_datasets_own() -> None:
    types = {"label": SimpleNamespace(dtype="int64", names=["dog", "cat", "ant"])}
    table = Table(types=types, f=[1.0, 2.0, 3.0], label=LABELS)
    own = from_dataset(table, client=None, label="label")
    assert (own.array("y").tolist(), own.notes) == (LABELS, ("classes: dog, cat, ant",))
    other = from_dataset(table, client=None, label="label", classes=["ant", "cat", "dog"])
    assert (other.array("y").tolist(), other.notes) == ([2, 0, 1], ("classes: ant, cat, dog",))
    strings = from_dataset(Table(f=[1.0, 2.0], label=["y", "x"]), client=None, label="label")
    assert (strings.array("y").tolist(), strings.notes) == ([1, 0], ("classes: x, y",))
    missing = Table(types=types, f=[1.0], label=[-1])
    with pytest.raises(InputError, match="label -1 in row 0"):
        from_dataset(missing, client=None, label="label")


def test_one_dataset_for_each_client() -> None:
    parts = {
        "zoe": Table(image=[picture(1), picture(2)], label=["y", "x"]),
        "al": Table(image=[picture(3)], label=["z"]),
    }
    columns = from_partitions(parts, label="label")
    assert rows_of(columns) == {"zoe": [1, 0], "al": [2]}
    assert columns.array("x")[:, 0, 0].tolist() == [1, 2, 3]
    assert columns.notes == ("classes: x, y, z",)
    listed = from_partitions(list(parts.values()), label="label")
    assert rows_of(listed) == {"0": [1, 0], "1": [2]}
    tabled = from_partitions([Table(f=[1], g=[2]), Table(g=[4], f=[3])], label=None)
    assert tabled.array("x").tolist() == [[1, 2], [3, 4]]
    spoken = from_partitions([Table(t=["a"]), Table(t=["b", "c"])], label=None)
    assert texts(spoken) == ["a", "b", "c"]


class Truncated(Column):
    """Row 1 cannot be made."""

    def __iter__(self) -> Iterator[Any]:
        yield self[0]
        raise OSError("image file is truncated")


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"train": 1}, "dict"),
        (SimpleNamespace(column_names={"train": ["f"], "test": ["f"]}), "choose one split"),
        (SimpleNamespace(column_names=["f"], __getitem__=list), "stream"),
        (Table(client=[], label=[], f=[]), "with rows"),
        (Table(clients=["a"], label=[1], f=[1]), "unknown column 'client': did you mean 'clients'"),
        (Table(client=["a", None], label=[1, 2], f=[1, 2]), "client ids: None in row 1"),
        (Table(client=["a", "b"], label=[1, 2], f=[1, None]), "column 'f'"),
        (Table(client=["a"], label=[1], f=["x"], g=[1]), "column 'f'"),
        (
            Table(False, client=["a", "b"], label=[1, 2], f=Truncated([picture(1), picture(2)])),
            r"column 'f', row 1: cannot be read \(image file is truncated\)",
        ),
        (
            Table(client=["a", "b"], label=[1, 2], f=[picture(1), picture(1, width=4)]),
            r"row 1: has shape \(2, 4\)",
        ),
        (
            Table(client=["a", "b"], label=[1, 2], f=[np.zeros((2, 2)), np.zeros((2, 3))]),
            "column 'f'",
        ),
    ],
)
def test_datasets_that_do_not_fit_are_refused(table: Any, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        from_dataset(table, client="client", label="label")
    assert "\n" not in str(caught.value)


def test_partitions_that_do_not_fit_are_refused() -> None:
    named = {"label": SimpleNamespace(names=["a", "b"])}
    for parts, match in {
        (): "no partition is given",
        (Table(f=[1], label=[1]), Table(f=[], label=[])): "client '1'",
        (Table(f=[1], label=[1]), Table(g=[1], label=[1])): "client '1': unknown column 'f'",
        (Table(f=[1], label=[1]), Table(f=[1], label=["a"])): "labels: 1 in row 0",
        (Table(f=[1], label=[1]), Table(f=[1], label=[1], types=named)): "labels: 1 in row 0",
        (Table(f=[1], label=[1]), Table(f=[[1, 2]], label=[1])): "column 'f'",
    }.items():
        with pytest.raises(InputError, match=match):
            from_partitions(parts, label="label")


@pytest.mark.slow
def test_datasets_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    types = datasets.Features(
        image=datasets.Image(),
        label=datasets.ClassLabel(names=["dog", "cat"]),
        writer=datasets.Value("string"),
        vector=datasets.Sequence(datasets.Value("float32"), length=2),
    )
    table = datasets.Dataset.from_dict(
        {
            "image": [picture(i, "RGB") for i in (10, 20, 30)],
            "label": [0, 1, 1],
            "writer": WRITERS,
            "vector": [[1, 2], [3, 4], [5, 6]],
        },
        features=types,
    )
    for made in (table, table.with_format("numpy"), table.with_format("torch")):
        columns = from_dataset(made, client="writer", label="label", features=["image"])
        assert rows_of(columns) == {"al": [1], "zoe": [0, 1]}
        assert columns.array("x")[:, :, 0, 0].tolist() == [[20, 21, 22], [10, 11, 12], [30, 31, 32]]
        assert columns.notes == ("classes: dog, cat",)
        vectors = from_dataset(made, client="writer", label="label", features=["vector"])
        assert vectors.array("x").tolist() == [[3, 4], [1, 2], [5, 6]]
    packed = table.cast_column("image", datasets.Image(decode=False))
    assert from_dataset(packed, client="writer", label="label", features=["image"]).rows == 3
    parts = [table.shard(2, i, contiguous=True) for i in range(2)]  # as partitions of flwr-datasets
    assert rows_of(from_partitions(parts, label="label", features=["image"])) == {
        "0": [0, 1],
        "1": [1],
    }
    splits = datasets.DatasetDict({"one": parts[0], "two": parts[1]})
    named = from_partitions(splits, label="label", features=["vector"])
    assert rows_of(named) == {"one": [0, 1], "two": [1]}
    with pytest.raises(InputError, match="split"):
        from_dataset(splits, client="writer", label="label")
    with pytest.raises(InputError, match="stream"):
        from_dataset(table.to_iterable_dataset(), client="writer", label="label")
    text = datasets.Dataset.from_dict({"t": ["a", "é"], "c": [1, 0]})
    assert texts(from_dataset(text, client="c", label=None)) == ["é", "a"]
