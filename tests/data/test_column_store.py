from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fedzmg
from fedzmg.data import columns as column_store
from fedzmg.data.columns import Array, Columns, Owners, Strings
from fedzmg.errors import InputError

ALONE = f"""
import sys, types
for name in ("fedzmg", "fedzmg.data"):  # without the packages' own imports, which take long
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [{str(Path(fedzmg.__file__).parent)!r} + name[6:].replace(".", "/")]
"""


@pytest.fixture(autouse=True)
def _without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def images() -> Columns:
    columns = {"x": np.arange(96, dtype=np.uint8).reshape(6, 4, 4), "y": np.arange(6) % 3}
    return Columns(columns, Owners(("ann", "b/ö"), np.array([0, 2, 6])), ("one note",))


def strings(texts: list[str]) -> Strings:
    parts = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, parts)]).astype(np.int64)
    return Strings(np.frombuffer(b"".join(parts), np.uint8).copy(), offsets)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    fingerprint = column_store.save_columns(tmp_path / "s", images())
    loaded = column_store.load_columns(tmp_path / "s")
    assert fingerprint == column_store.fingerprint(loaded)
    np.testing.assert_array_equal(loaded.array("x").ravel(), np.arange(96))
    np.testing.assert_array_equal(loaded.array("y"), [0, 1, 2, 0, 1, 2])
    assert loaded.array("x").dtype == np.uint8
    assert loaded.owners is not None
    assert loaded.owners.names == ("ann", "b/ö")
    np.testing.assert_array_equal(loaded.owners.offsets, [0, 2, 6])
    assert loaded.notes == ("one note",)
    loaded.array("x")[:] = 9  # does not change the file
    np.testing.assert_array_equal(
        column_store.load_columns(tmp_path / "s").array("x").ravel(), range(96)
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == [
        "clients.npy", "column.x.npy", "column.y.npy", "meta.json",
    ]  # fmt: skip


@settings(max_examples=12)
@given(
    st.lists(st.text("ab é\n🙂\0", max_size=8), max_size=6),
    hnp.arrays(
        st.sampled_from(["u1", "<i8", "<f4", ">i4", "?", "S3"]),
        hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4),
    ),
)
def test_any_columns_come_back_with_the_same_fingerprint(
    texts: list[str], values: npt.NDArray[np.generic]
) -> None:
    made = [
        Columns({"text": strings([t.encode(errors="ignore").decode() for t in texts])}),
        Columns({"v": values}, Owners(("only",), np.array([0, len(values)]))),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for number, columns in enumerate(made):
            place = Path(folder) / str(number)
            column_store.save_columns(place, columns)
            loaded = column_store.load_columns(place)
            assert column_store.fingerprint(loaded) == column_store.fingerprint(columns)
            for name, column in columns.columns.items():
                if not isinstance(column, Strings):
                    assert loaded.array(name).dtype == column.dtype
                    assert loaded.array(name).tobytes() == column.tobytes()


def test_the_fingerprint_sees_values_types_names_borders_and_clients() -> None:
    def one(x: Array, name: str = "x", clients: tuple[str, ...] = ("a", "b"), at: int = 1) -> str:
        owners = Owners(clients, np.array([0, at, len(x)]))
        return column_store.fingerprint(Columns({name: x}, owners))

    x = np.arange(4)
    different = [
        one(x), one(x + 1), one(x.astype(np.int32)), one(x.reshape(4, 1)), one(x, "y"),
        one(x, clients=("a", "c")), one(x, at=2), column_store.fingerprint(Columns({"x": x})),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
    assert one(x) == one(np.arange(8)[::2] // 2)


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files the POSIX way")
def test_a_file_that_the_system_does_not_let_grow_is_one_line(tmp_path: Path) -> None:
    script = (
        ALONE
        + f"""
import resource
from pathlib import Path
import numpy as np
from fedzmg.data import columns as column_store
from fedzmg.data.columns import Columns
from fedzmg.errors import InputError

resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))

try:
    column_store.save_columns(Path({str(tmp_path)!r}) / "s", Columns({{"x": np.ones(2**22)}}))
except InputError as error:
    print(error)
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"cannot write {tmp_path / 's'}: No space left")


def edit(directory: Path, **values: object) -> None:
    path = directory / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_damaged_store_is_refused_with_a_remedy(tmp_path: Path) -> None:
    def save(name: str) -> Path:
        columns = {**images().columns, "t": strings(list("abcdef"))}
        column_store.save_columns(tmp_path / name, Columns(columns, images().owners))
        return tmp_path / name

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1])

    cut(save("cut") / "column.x.npy")
    cut(save("meta") / "meta.json")
    (save("gone") / "column.y.npy").unlink()
    (save("none") / "meta.json").unlink()
    edit(save("newer"), format=2)
    edit(save("rows"), rows=7)
    edit(save("fewer"), clients=["ann"])
    edit(save("twice"), clients=["ann", "ann"])
    (save("list") / "meta.json").write_text("[]")
    np.save(save("pickle") / "column.y.npy", np.array([{}] * 6), allow_pickle=True)
    np.save(save("order") / "clients.npy", np.array([0, 9, 6]))
    np.save(save("letters") / "column.t.offsets.npy", np.array([0, 1, 2, 99, 4, 5, 6]))
    (save("noise") / "column.x.npy").write_bytes(b"\x00" * 300)
    for place in sorted(tmp_path.iterdir()):
        with pytest.raises(InputError) as caught:
            column_store.load_columns(place)
        message = str(caught.value)
        assert message.startswith(f"stored data {place} is damaged ("), place
        assert message.endswith("run 'fedzmg data import' or 'fedzmg data get' again")
        assert "\n" not in message


def test_names_and_types_that_cannot_be_stored_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"column '\.\./x' cannot be stored"):
        column_store.save_columns(tmp_path / "s", Columns({"../x": np.arange(2)}))
    with pytest.raises(InputError, match="column 'x'"):
        column_store.save_columns(tmp_path / "t", Columns({"x": np.array([{}, {}])}))
