from __future__ import annotations

import io
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image
from test_arrays import rows_of, texts

from fedzmg.data.formats.tabular import from_dataset, from_partitions
from fedzmg.errors import InputError


def table(types: Any = None, **columns: Any) -> Any:
    """Make a dataset of Hugging Face."""
    made = datasets.Dataset.from_dict(columns)
    return made if types is None else made.cast(datasets.Features({**made.features, **types}))


def picture(value: int, mode: str = "L", width: int = 5) -> Image.Image:
    return Image.new(mode, (width, 2), value if mode == "L" else (value, value + 1, value + 2))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


WRITERS = ["zoe", "al", "zoe"]
LABELS = [0, 2, 1]


@pytest.mark.parametrize("form", [None, "numpy", "torch"])
@pytest.mark.parametrize(
    "images",
    [
        [picture(1), picture(2), picture(3)],
        [png(picture(i)) for i in (1, 2, 3)],
        [{"bytes": png(picture(i)), "path": None} for i in (1, 2, 3)],
        [np.full((2, 5), i, np.uint8) for i in (1, 2, 3)],
        [np.full((2, 5, 1), i, np.uint8) for i in (1, 2, 3)],
    ],
    ids=["pillow", "bytes", "struct", "arrays", "one channel"],
)
def test_grey_images(form: Any, images: Any) -> None:
    made = table(image=images, writer=WRITERS, label=LABELS).with_format(form)
    columns = from_dataset(made, client="writer", label="label")
    assert rows_of(columns) == {"al": [2], "zoe": [0, 1]}
    x = columns.array("x")
    assert (x.shape, x.dtype) == ((3, 2, 5), np.uint8)
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
    x = from_dataset(table(image=images), client=None, label=None).array("x")
    assert x.shape == (2, 3, 2, 5)
    assert x[:, :, 0, 0].tolist() == [[10, 11, 12], [20, 21, 22]]


def test_numbers_and_text() -> None:
    made = table(who=[2, 1, 2], f=[1.5, 2.5, 3.5], g=[[1, 2], [3, 4], [5, 6]], t=["a", "é", ""])
    columns = from_dataset(made, client="who", label=None, features=["f", "g"])
    assert columns.array("x").tolist() == [[2.5, 3, 4], [1.5, 1, 2], [3.5, 5, 6]]
    assert columns.array("x").dtype == np.float32
    assert columns.owners is not None
    assert columns.owners.names == ("1", "2")
    assert texts(from_dataset(made, client="who", label=None, features=["t"])) == ["é", "a", ""]


def test_class_names_are_the_datasets_own() -> None:
    types = {"label": datasets.ClassLabel(names=["dog", "cat", "ant"])}
    made = table(types, f=[1.0, 2.0, 3.0], label=LABELS)
    own = from_dataset(made, client=None, label="label")
    assert (own.array("y").tolist(), own.notes) == (LABELS, ("classes: dog, cat, ant",))
    other = from_dataset(made, client=None, label="label", classes=["ant", "cat", "dog"])
    assert (other.array("y").tolist(), other.notes) == ([2, 0, 1], ("classes: ant, cat, dog",))
    strings = from_dataset(table(f=[1.0, 2.0], label=["y", "x"]), client=None, label="label")
    assert (strings.array("y").tolist(), strings.notes) == ([1, 0], ("classes: x, y",))
    missing = table(types, f=[1.0], label=[-1])
    with pytest.raises(InputError, match="label -1 in row 0"):
        from_dataset(missing, client=None, label="label")


def test_one_dataset_for_each_client() -> None:
    parts = {
        "zoe": table(image=[picture(1), picture(2)], label=["y", "x"]),
        "al": table(image=[picture(3)], label=["z"]),
    }
    columns = from_partitions(parts, label="label")
    assert rows_of(columns) == {"zoe": [1, 0], "al": [2]}
    assert columns.array("x")[:, 0, 0].tolist() == [1, 2, 3]
    assert columns.notes == ("classes: x, y, z",)
    listed = from_partitions(list(parts.values()), label="label")
    assert rows_of(listed) == {"0": [1, 0], "1": [2]}
    tabled = from_partitions([table(f=[1], g=[2]), table(g=[4], f=[3])], label=None)
    assert tabled.array("x").tolist() == [[1, 2], [3, 4]]
    spoken = from_partitions([table(t=["a"]), table(t=["b", "c"])], label=None)
    assert texts(spoken) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"train": 1}, "dict"),
        (datasets.DatasetDict(train=table(f=[1]), test=table(f=[1])), "choose one split"),
        (table(f=[1]).to_iterable_dataset(), "stream"),
        (table(client=[], label=[], f=[]), "with rows"),
        (table(clients=["a"], label=[1], f=[1]), "unknown column 'client': did you mean 'clients'"),
        (table(client=["a", None], label=[1, 2], f=[1, 2]), "client ids: None in row 1"),
        (table(client=["a", "b"], label=[1, 2], f=[1, None]), "column 'f'"),
        (table(client=["a"], label=[1], f=["x"], g=[1]), "column 'f'"),
        (
            table(
                {"f": datasets.Image()},
                client=["a", "b"],
                label=[1, 2],
                f=[{"bytes": png(picture(1))[:size], "path": None} for size in (999, 50)],
            ),
            "column 'f', row 1: cannot be read",
        ),
        (
            table(client=["a", "b"], label=[1, 2], f=[picture(1), picture(1, width=4)]),
            r"row 1: has shape \(2, 4\)",
        ),
        (
            table(client=["a", "b"], label=[1, 2], f=[np.zeros((2, 2)), np.zeros((2, 3))]),
            "column 'f'",
        ),
    ],
)
def test_datasets_that_do_not_fit_are_refused(given: Any, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        from_dataset(given, client="client", label="label")
    assert "\n" not in str(caught.value)


def test_partitions_that_do_not_fit_are_refused() -> None:
    named = {"label": datasets.ClassLabel(names=["a", "b"])}
    for parts, match in {
        (): "no partition is given",
        (table(f=[1], label=[1]), table(f=[], label=[])): "client '1'",
        (table(f=[1], label=[1]), table(g=[1], label=[1])): "client '1': unknown column 'f'",
        (table(f=[1], label=[1]), table(f=[1], label=["a"])): "labels: 1 in row 0",
        (table(f=[1], label=[1]), table(f=[1], types=named, label=[1])): "labels: 1 in row 0",
        (table(f=[1], label=[1]), table(f=[[1, 2]], label=[1])): "column 'f'",
    }.items():
        with pytest.raises(InputError, match=match):
            from_partitions(parts, label="label")


def test_formats_features_and_shards() -> None:
    types = datasets.Features(
        image=datasets.Image(),
        label=datasets.ClassLabel(names=["dog", "cat"]),
        writer=datasets.Value("string"),
        vector=datasets.Sequence(datasets.Value("float32"), length=2),
    )
    whole = datasets.Dataset.from_dict(
        {
            "image": [picture(i, "RGB") for i in (10, 20, 30)],
            "label": [0, 1, 1],
            "writer": WRITERS,
            "vector": [[1, 2], [3, 4], [5, 6]],
        },
        features=types,
    )
    for made in (whole, whole.with_format("numpy"), whole.with_format("torch")):
        columns = from_dataset(made, client="writer", label="label", features=["image"])
        assert rows_of(columns) == {"al": [1], "zoe": [0, 1]}
        assert columns.array("x")[:, :, 0, 0].tolist() == [[20, 21, 22], [10, 11, 12], [30, 31, 32]]
        assert columns.notes == ("classes: dog, cat",)
        vectors = from_dataset(made, client="writer", label="label", features=["vector"])
        assert vectors.array("x").tolist() == [[3, 4], [1, 2], [5, 6]]
    packed = whole.cast_column("image", datasets.Image(decode=False))
    assert from_dataset(packed, client="writer", label="label", features=["image"]).rows == 3
    parts = [whole.shard(2, i, contiguous=True) for i in range(2)]  # as partitions of flwr-datasets
    assert rows_of(from_partitions(parts, label="label", features=["image"])) == {
        "0": [0, 1],
        "1": [1],
    }
    splits = datasets.DatasetDict({"one": parts[0], "two": parts[1]})
    named = from_partitions(splits, label="label", features=["vector"])
    assert rows_of(named) == {"one": [0, 1], "two": [1]}
    text = datasets.Dataset.from_dict({"t": ["a", "é"], "c": [1, 0]})
    assert texts(from_dataset(text, client="c", label=None)) == ["é", "a"]
