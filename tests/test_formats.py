"""Readers of our own files: damaged ones are rejected in one line, crashes leave whole lines."""

from __future__ import annotations

import gzip
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedzmg.errors import InputError
from fedzmg.experiment.grids.score import read_rows
from fedzmg.experiment.run_directory import RunDirectory
from fedzmg.results.diff import read
from fedzmg.results.runs import read_log
from fedzmg.storage.formats import flat, json_nulls, json_words, log_lines, read_json, read_toml

ROWS = [{"round": r, "loss": [0.5 * r, r], "words": 'a "}" b'} for r in (1, 2, 3, 4)]
LINES = [json.dumps(row).encode() for row in ROWS]


def written(content: bytes) -> Path:
    handle, name = tempfile.mkstemp()
    os.write(handle, content)
    os.close(handle)
    return Path(name)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, len(LINES[0]))), max_size=6))
def test_only_whole_lines_are_read_after_crashes(crashes: list[tuple[int, int]]) -> None:
    """Any number of broken attempts may precede a line."""
    parts = []
    for i, line in enumerate(LINES):
        parts += [line[:cut] for at, cut in crashes if at == i and not line[:cut].endswith(b"}")]
        parts.append(line)
    for content in (
        b"\n".join(parts),
        b"\n".join([*parts, LINES[0][:9]]),
        b"\n".join(parts) + b"\n",
    ):
        path = written(content)
        try:
            assert log_lines(path, dict) == ROWS
        finally:
            path.unlink()


def test_compressed_and_missing_logs(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert log_lines(path, dict) == []
    path.with_name("metrics.jsonl.gz").write_bytes(gzip.compress(b"\n".join(LINES)))
    assert log_lines(path, dict) == ROWS


@pytest.mark.parametrize("rest", [[b'{"round": 1, "trial": 0}', b""], [b""]], ids=["first", "last"])
@pytest.mark.parametrize("bad", [b'{"round": oops}', b'{"wrong": 1}', b'{"round": {}}', b"}"])
def test_every_reader_of_logs_names_the_same_line(
    tmp_path: Path, bad: bytes, rest: list[bytes]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([bad, *rest]))
    (tmp_path / "spec.toml").write_text('task = "x"\n')
    readers: list[Callable[[], Any]] = [
        lambda: read_log(path),
        lambda: RunDirectory(tmp_path).records(),
        lambda: read_rows(path),
        lambda: list(read(tmp_path)),
    ]
    for reader in readers:
        with pytest.raises(
            InputError, match=r"metrics\.jsonl, line 1 is damaged: restore"
        ) as caught:
            reader()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("TOML", b"a = oops\n", r"not valid TOML \(.*line 1.*\): correct or restore it$"),
        ("TOML", b'a = "\xff"', r"not valid TOML \(.*utf-8.*\): correct or restore it$"),
        ("TOML", b"a = " + b"[" * 20_000, "not valid TOML"),
        ("TOML", None, "No such file or directory"),
        ("JSON", b"{", r"not valid JSON \(.*line 1.*\): make it again$"),
        ("JSON", b'{"a": "\xff"}', r"not valid JSON \(.*utf-8.*\): make it again$"),
        ("JSON", b"[" * 200_000, "not valid JSON .*: make it again$"),
        ("JSON", b"[1]", "JSON object: make it again$"),
        ("JSON", None, "No such file or directory"),
    ],
)
def test_bad_files_are_one_line(
    tmp_path: Path, kind: str, content: bytes | None, words: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        read_toml(path) if kind == "TOML" else read_json(path, "make it again")
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


KEYS = st.text("abc", min_size=1, max_size=3)
TABLES = st.recursive(
    st.dictionaries(KEYS, st.integers()),
    lambda inner: st.dictionaries(KEYS, st.integers() | inner),
    max_leaves=8,
)


@settings(max_examples=40)
@given(TABLES)
def test_flat_names_find_their_values(table: dict[str, Any]) -> None:
    def at(name: str) -> Any:
        found: Any = table
        for part in name.split("."):
            found = found[part]
        return found

    def leaves(value: Any) -> int:
        return sum(map(leaves, value.values())) if isinstance(value, dict) else 1

    def bare(value: dict[str, Any]) -> int:
        return sum((bare(v) if v else 1) for v in value.values() if isinstance(v, dict))

    found = flat(table)
    assert all(at(name) == value for name, value in found.items())
    assert len(found) == leaves(table)
    kept = flat(table, keep_empty=True)
    assert found == {name: value for name, value in kept.items() if value != {}}
    assert len(kept) - len(found) == bare(table)


@given(
    st.recursive(
        st.floats() | st.integers() | st.none() | st.booleans(),
        lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
        max_leaves=6,
    )
)
def test_strict_json_and_words_round_trip(value: Any) -> None:
    def back(found: Any) -> Any:
        if isinstance(found, dict):
            return {key: back(inner) for key, inner in found.items()}
        if isinstance(found, list):
            return [back(inner) for inner in found]
        return float(found) if isinstance(found, str) else found

    def finite(found: Any) -> Any:
        if isinstance(found, dict):
            return {key: finite(inner) for key, inner in found.items()}
        if isinstance(found, list):
            return [finite(inner) for inner in found]
        return None if isinstance(found, float) and not math.isfinite(found) else found

    words = json.loads(json.dumps(json_words(value), allow_nan=False))
    assert repr(back(words)) == repr(value)
    nulls = json.loads(json.dumps(json_nulls(value), allow_nan=False))
    assert repr(nulls) == repr(finite(value))
