from __future__ import annotations

import io
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzzing import damaged, fuzz_tests
from hypothesis import strategies as st
from PIL import Image
from test_arrays import rows_of, texts
from torch import nn

from fedzmg import Task
from fedzmg.data.columns import Columns
from fedzmg.data.formats import common, tabular
from fedzmg.errors import InputError

CLIENT = ["b", "a", "b"]
LABEL = [2, 0, 1]


def parquet(**columns: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"client": CLIENT, "label": LABEL} | columns), file)
    return file.getvalue()


def read(folder: Path, data: bytes | str, name: str = "t.csv", **keywords: Any) -> Columns:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return tabular.read_table([path], **keywords)


def png(value: int, side: int = 3) -> bytes:
    file = io.BytesIO()
    Image.new("L", (side, 2), value).save(file, "PNG")
    return file.getvalue()


def test_numbers_of_a_csv_file(tmp_path: Path) -> None:
    columns = read(tmp_path, "f,client,label,g\n1.5,b,2,true\n-2,a,0,false\n3e2,b,1,true\n")
    assert rows_of(columns) == {"a": [0], "b": [2, 1]}
    assert columns.array("x").tolist() == [[-2.0, 0.0], [1.5, 1.0], [300.0, 1.0]]
    assert columns.array("x").dtype == np.float32
    assert columns.array("y").dtype == np.int64
    assert columns.notes == ()


def test_targets_of_a_regression_stay_as_they_are(tmp_path: Path) -> None:
    columns = read(tmp_path, "f,client,label\n1,b,2.5\n2,a,-1\n3,b,0\n")
    assert columns.array("y").tolist() == [-1.0, 2.5, 0.0]
    model = nn.Sequential(nn.Linear(1, 1), nn.Flatten(0))
    task = Task.from_columns(model, columns, test=columns, loss="squared_error", cohort=1)
    assert task.test.y.tolist() == [-1.0, 2.5, 0.0]


def test_single_precision_targets_of_a_parquet_file(tmp_path: Path) -> None:
    targets = pa.array([0.5, 1.0], pa.float32())
    pq.write_table(pa.table({"f": [1, 2], "label": targets}), tmp_path / "t.parquet")
    columns = tabular.read_table(tmp_path / "t.parquet", client=None)
    assert columns.array("y").tolist() == [0.5, 1.0]


def test_several_files_are_one_table(tmp_path: Path) -> None:
    paths = [tmp_path / "1.csv", tmp_path / "2.csv"]
    paths[0].write_text("client,label,f\n7,cat,1\n007,dog,2\n")
    paths[1].write_text("f,label,client\n2.5,ant,7\n")
    columns = tabular.read_table(paths)
    assert rows_of(columns) == {"007": [2], "7": [1, 0]}
    assert columns.array("x").tolist() == [[2.0], [1.0], [2.5]]
    paths[1].write_text("client,label,f\na,3,1\n")
    with pytest.raises(InputError, match=r"1.csv and 1 more: cannot be read"):
        tabular.read_table(paths)


def test_text_with_line_breaks_and_quotes(tmp_path: Path) -> None:
    columns = read(tmp_path, '\ufeffclient,label,text\nb,x,"Hé,\n""you"""\na,y,NA\nb,x,\n')
    assert texts(columns) == ["NA", 'Hé,\n"you"', ""]
    assert columns.array("y").tolist() == [1, 0, 0]
    assert columns.notes == ("classes: x, y",)


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"f": [1.5, 2.5, 3.5]}, [[2.5], [1.5], [3.5]]),
        ({"f": pa.array([1, 2, 3], "u1"), "g": [True, False, True]}, [[2, 0], [1, 1], [3, 1]]),
        ({"f": [[1, 2], [3, 4], [5, 6]]}, [[3, 4], [1, 2], [5, 6]]),
        (
            {"f": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float16(), 2)), "g": [7, 8, 9]},
            [[3, 4, 8], [1, 2, 7], [5, 6, 9]],
        ),
        ({"f": pa.array([1.0, 2.0, 1.0]).dictionary_encode()}, [[2], [1], [1]]),
        ({"f": [Decimal("1.25"), Decimal(2), Decimal(3)]}, [[2], [1.25], [3]]),
    ],
)  # fmt: skip
def test_numbers_of_a_parquet_file(tmp_path: Path, features: Any, expected: Any) -> None:
    columns = read(tmp_path, parquet(**features), "t.parquet")
    assert columns.array("x").tolist() == expected
    assert rows_of(columns) == {"a": [0], "b": [2, 1]}


CODED = pa.dictionary(pa.int8(), pa.string())


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), CODED])
def test_strings_of_a_parquet_file(tmp_path: Path, kind: pa.DataType) -> None:
    columns = read(
        tmp_path,
        parquet(label=pa.array(["y", "x", "y"], kind), t=pa.array(["p", "é", ""], kind)),
        classes=["y", "x", "z"],
    )
    assert texts(columns) == ["é", "p", ""]
    assert columns.array("y").tolist() == [1, 0, 0]
    assert columns.notes == ("classes: y, x, z",)


@pytest.mark.parametrize("wrap", [False, True])
def test_packed_images_of_a_parquet_file(tmp_path: Path, wrap: bool) -> None:
    images = [png(1), png(2), png(3)]
    column = [{"bytes": image, "path": None} for image in images] if wrap else images
    x = read(tmp_path, parquet(image=column)).array("x")
    assert (x.shape, x.dtype) == ((3, 2, 3), np.uint8)
    assert x[:, 0, 0].tolist() == [2, 1, 3]
    colour = read(tmp_path, parquet(image=column), grey=False, size=(5, 5)).array("x")
    assert colour.shape == (3, 3, 5, 5)


def test_columns_are_chosen_by_name(tmp_path: Path) -> None:
    table = "who,what,f,g,note\nb,1,5,6,hi\n"
    columns = read(tmp_path, table, client="who", label="what", features=["g", "f"])
    assert columns.array("x").tolist() == [[6.0, 5.0]]
    nobody = read(tmp_path, table, client=None, label=None, features=["note"])
    assert (nobody.owners, list(nobody.columns)) == (None, ["text"])


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ("", "0 columns: .*first line"),
        ("client,label,f\n", "holds no row"),
        ("clients,label,f\na,0,1\n", "unknown column 'client': did you mean 'clients'"),
        ("client,label,f,f\na,0,1,2\n", "4 columns"),
        ("client,label,f\na,0,1\nb,1,\n", "column 'f': .*row 1 has no value"),
        ("client,label,f\na,0,1\nb,1,inf\n", "column 'f': row 1"),
        ("client,label,f\na,0,1\n,0,1\n", "client id in row 1 is empty"),
        ("client,label,f\na,0,1\nb,-1,1\n", "label -1 in row 1"),
        ("client,label,f,g\na,0,1,2\nb,0,x,2\n", "column 'f'"),
        ("client,label,f\na,2020-01-01,0\n", "labels are datetime64"),
        ("client,label,f\na,0,1\nb,0\n", "Expected 3 columns, got 2"),
        (b"client,label,t\na,0,\xff\n", "column 't' is not UTF-8"),
        (b"\x1f\x8b\x08", "unpack it first"),
    ],
)
def test_csv_that_does_not_fit_is_refused(tmp_path: Path, table: Any, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        read(tmp_path, table)
    assert str(tmp_path / "t.csv") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"f": [1.0, None, 3.0]}, "column 'f': .*row 1 has no value"),
        ({"f": [1.0, 2.0, np.nan]}, "column 'f': row 2 holds NaN"),
        ({"f": [[1, 2], [3], [4, 5]]}, r"lengths \[1, 2\]"),
        ({"f": [[[1]], [[2]], [[3]]]}, "column 'f'"),
        ({"f": ["1", "2", "3"], "g": [1, 2, 3]}, "column 'f'"),
        ({"f": [{"bytes": None, "path": "i.png"}] * 3}, "column 'f': .*row 0"),
        ({"f": [{"a": 1}] * 3}, r"column 'f': .*struct<a: int64>; store its fields as columns"),
        ({"f": [png(1), png(2), b"no"]}, "column 'f', row 2: cannot be read"),
        ({"f": [png(1), png(2), png(3, 4)]}, r"column 'f', row 2: has shape \(2, 4\)"),
        ({"f": [1, 2, 3], "client": [1.5, 2.0, 3.0]}, "client ids hold 1.5 in row 0"),
        ({"f": [1, 2, 3], "a\nb": [1, 2, 3]}, "4 columns"),
    ],
)  # fmt: skip
def test_parquet_that_does_not_fit_is_refused(tmp_path: Path, changes: Any, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        read(tmp_path, parquet(**changes), "t.parquet")
    assert str(tmp_path / "t.parquet") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path, parquet(f=[1, 2, 3])[:-20], "t.parquet")
    with pytest.raises(InputError, match="'label'"):
        read(tmp_path, "client,label,f\na,0,1\n", features=["f", "label"])
    wide = ",".join(f"c{i}" for i in range(300))
    with pytest.raises(InputError, match="'cleint': did you mean 'client'") as caught:
        read(tmp_path, f"{wide},client,label\n", client="cleint")
    assert len(str(caught.value)) < 500
    with pytest.raises(InputError, match="100001 columns"):
        read(tmp_path, "," * 100_000)


def test_rows_and_strings_that_repeat_too_often_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "_SMALL", 2**20)
    many = np.zeros(10**6, np.int8)
    with pytest.raises(InputError, match="archive bomb"):
        read(tmp_path, parquet(client=many, label=many, f=many))
    once = pa.DictionaryArray.from_arrays(many[:4000].astype(np.int32), ["x" * 10_000])
    bomb = parquet(client=many[:4000], label=many[:4000], t=once)
    with pytest.raises(InputError, match="archive bomb"):
        read(tmp_path, bomb)


PARQUET = [
    parquet(f=[1.0, 2.0, 3.0], g=[[1, 2], [3, 4], [5, 6]]),
    parquet(label=["x", "y", "x"], t=["hello", "you", ""]),
    parquet(image=[{"bytes": png(1), "path": "a"}] * 3),
]
CSV = [b"client,label,f,g\nb,1,2.5,3\na,0,3,4\n", b'client,label,t\na,x,"p ""q"\nr"\nb,y,abc\n']
DAMAGED = st.one_of(damaged(*PARQUET), damaged(*CSV))


test_damaged_files, test_many_damaged_files = fuzz_tests(tabular.read_table, DAMAGED, 40, 5000)
