from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import damaged, fuzz_tests
from hypothesis import given, settings
from hypothesis import strategies as st
from test_arrays import texts

from fedzmg.data.formats import federated_files
from fedzmg.errors import InputError


def shard(**users: tuple[list[Any], list[Any]]) -> dict[str, Any]:
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in users.items()},
    }


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_images_come_back_as_the_bytes_they_were(tmp_path: Path) -> None:
    level = np.random.default_rng(0).integers(0, 256, (5, 784))
    rows = (1 - level / 255).tolist()
    first = write(tmp_path / "1.json", {**shard(f2=(rows[:2], [5, 61])), "hierarchies": ["hsf_0"]})
    second = write(tmp_path / "2.json", shard(f1=(rows[2:3], [7]), f0=(rows[3:], [0, 1.0])))
    columns = federated_files.read_leaf([first, second])
    assert columns.array("x").dtype == np.uint8
    np.testing.assert_array_equal(columns.array("x").reshape(5, 784), 255 - level)
    assert columns.array("x").shape == (5, 28, 28)
    assert columns.array("y").tolist() == [5, 61, 7, 0, 1]
    assert columns.array("y").dtype == np.int64
    assert columns.owners is not None
    assert columns.owners.names == ("f2", "f1", "f0")
    assert columns.owners.offsets.tolist() == [0, 2, 3, 5]
    assert columns.notes == ()


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([[0.2] * 784, [0.3001] * 784], np.float32),
        ([[-1.5, 2.0, 1e30], [0, 1, 2]], np.float32),
        ([[3, 2**62], [-5, 6]], np.int64),
        ([4, 5], np.int64),
    ],
)
def test_numbers_keep_their_type(tmp_path: Path, rows: Any, dtype: Any) -> None:
    path = write(tmp_path / "a.json", shard(a=(rows[:1], [0]), b=(rows[1:], [1])))
    x = federated_files.read_leaf([path]).array("x")
    assert x.dtype == dtype
    np.testing.assert_array_equal(x.reshape(np.shape(rows)), np.array(rows, dtype))
    with pytest.raises(InputError, match="user 'a' is also in"):
        federated_files.read_leaf([path, path])


def test_plays_come_as_text(tmp_path: Path) -> None:
    lines = ["But soft, ", "ut soft, w", "Æther 🙂"]
    content = shard(ROMEO=(lines[:2], ["w", "h"]), EMPTY=([], []), JULIET=(lines[2:], ["é"]))
    columns = federated_files.read_leaf([write(tmp_path / "a.json", content)])
    assert set(columns.columns) == {"text", "next"}
    assert texts(columns, "text") == lines
    assert texts(columns, "next") == ["w", "h", "é"]
    assert columns.owners is not None
    assert columns.owners.offsets.tolist() == [0, 2, 2, 3]
    assert columns.notes == ("clients without any example: 1, the first is 'EMPTY'",)


GOOD = shard(a=([[1.0, 0.0]], [3]), b=([[0.0, 0.5], [1.0, 1.0]], [4, 5]))


def _without(*keys: str) -> dict[str, Any]:
    content = json.loads(json.dumps(GOOD))
    place = content
    for key in keys[:-1]:
        place = place[key]
    del place[keys[-1]]
    return content  # type: ignore[no-any-return]


def _x(*rows: Any) -> dict[str, Any]:
    return shard(a=([[1.0, 0.0]], [3]), b=(list(rows), [0] * len(rows)))


def _y(*labels: Any) -> dict[str, Any]:
    return shard(a=([[1.0]], [3]), b=([[1.0]] * len(labels), list(labels)))


REFUSED: dict[str, tuple[Any, str]] = {
    "no users": (_without("users"), "'users'"),
    "no x": (_without("user_data", "b", "x"), "user 'b': .*'x'"),
    "user without data": (_without("user_data", "b"), "1 user_data"),
    "data without user": ({**GOOD, "users": ["a"], "num_samples": [1]}, "1 users"),
    "user no text": ({**GOOD, "users": ["a", 7]}, "users: 7 in row 1"),
    "user twice": ({**GOOD, "users": ["a", "a"]}, "2 users"),
    "user repeated": ({**GOOD, "users": ["a", "a", "b"], "num_samples": [1, 1, 2]}, "3 users"),
    "wrong count": ({**GOOD, "num_samples": [1, 3]}, "user 'b': .*num_samples 3"),
    "ragged": (_x([1.0, 0.0], [1.0]), "user 'b'"),
    "nested": (_x([[1.0], [0.0]]), r"user 'b': x: has shape \(1, 2, 1\)"),
    "other width": (_x([1.0, 0.0, 0.0]), r"user 'b': has .*shape \(3,\)"),
    "text for numbers": (_x("words"), "user 'b': has .*text"),
    "NaN": (_x([1.0, 0.0], [float("nan"), 0.0]), "user 'b': x: row 1"),
    "overflow": (json.dumps(_x([1.0, 7.25])).replace("7.25", "1e999"), "user 'b': x: row 0"),
    "beyond float32": (_x([1.0, 1e39]), "user 'b': x: row 0"),
    "beyond 64 bits": (_x([1, 2**64]), "user 'b': x"),
    "long number": (json.dumps(GOOD).replace("0.5", "9" * 5000), "cannot be read .*digits"),
    "fraction for a label": (_y(1, 2.5), "user 'b': labels hold 2.5 in row 1"),
    "label as text": (_y("3"), "user 'b': label '3'"),
    "half a character": (shard(a=(["fine", "\udc00"], ["a", "b"])), "user 'a': x: .*row 1"),
    "nobody": (shard(), "no client has an example"),
    "deep": ("[" * 200_000, "cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_content_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, message = REFUSED[case]
    path = write(tmp_path / "bad.json", content)
    with pytest.raises(InputError, match=message) as caught:
        federated_files.read_leaf([path])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_cut_off_shards_and_other_encodings_are_refused(tmp_path: Path) -> None:
    whole = json.dumps(GOOD)
    path = tmp_path / "a.json"
    for data in [
        *(whole[:end].encode() for end in range(0, len(whole), 5)),
        whole.encode("utf-16"),
    ]:
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"a\.json: cannot be read"):
            federated_files.read_leaf([path])
    path.write_bytes(whole.encode("utf-8-sig"))
    assert federated_files.read_leaf([path]).rows == 3


numbers = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(width=32, allow_nan=False, allow_infinity=False)
)


@settings(max_examples=25)
@given(st.data(), st.integers(1, 4))
def test_any_numbers_survive(tmp_path_factory: Any, data: st.DataObject, width: int) -> None:
    row = st.lists(numbers, min_size=width, max_size=width)
    rows = data.draw(st.lists(st.lists(row, max_size=3), min_size=1, max_size=4))
    users = {f"u{i}": (x, list(range(len(x)))) for i, x in enumerate(rows)}
    flat = [row for x in rows for row in x]
    path = write(tmp_path_factory.getbasetemp() / "any.json", shard(**users))
    if not flat:
        with pytest.raises(InputError, match="no client has an example"):
            federated_files.read_leaf([path])
        return
    x = federated_files.read_leaf([path]).array("x")
    if x.dtype == np.uint8:
        np.testing.assert_allclose(x / 255, np.array(flat, float), atol=1e-3 / 255)
    else:
        np.testing.assert_array_equal(x, np.array(flat).astype(x.dtype))


SMALL = [
    json.dumps(GOOD).encode(),
    json.dumps(
        shard(a=(["to be", "o be "], [" ", "o"]), b=(["é"], ["\n"])), ensure_ascii=False
    ).encode(),
    json.dumps(shard(a=([[1, 2]], [3]), b=([], []))).encode(),
]
WORDS = [b"NaN", b"1e999", b"null", b"{}", b"[]", b'"\\ud800"', b"-1", b"1" + b"0" * 30, b"true"]


@st.composite
def misworded(draw: st.DrawFn) -> bytes:
    """Valid JSON most of the time, with another value somewhere."""
    data = draw(st.sampled_from(SMALL))
    starts = [i for i, byte in enumerate(data) if byte in b' [{:,"0123456789']
    start = draw(st.sampled_from(starts))
    end = start + draw(st.integers(0, 6))
    return data[: start + 1] + draw(st.sampled_from(WORDS)) + data[end:]


test_damaged_files, test_many_damaged_files = fuzz_tests(
    federated_files.read_leaf, st.one_of(damaged(*SMALL), misworded()), 60, 4000
)
