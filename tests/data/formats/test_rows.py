"""What readers share: where files are, said in any way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedzmg.data.columns import Columns
from fedzmg.data.formats import (
    arrays,
    cifar,
    emnist_mat,
    idx,
    image_folder,
    leaf_json,
    tabular,
    tff_h5,
)
from fedzmg.data.formats.rows import as_paths
from fedzmg.errors import InputError

READERS: dict[str, Callable[[Any], Columns]] = {
    "arrays": arrays.read_arrays,
    "cifar binary": cifar.read_cifar_binary,
    "cifar python": cifar.read_cifar_python,
    "emnist_mat": partial(emnist_mat.read_mat, split="train"),
    "idx": idx.read_idx,
    "image_folder": image_folder.read_image_folder,
    "leaf_json": leaf_json.read_leaf,
    "tabular": tabular.read_table,
    "tff_h5": tff_h5.read_h5,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("spelled", [str, Path, lambda path: [path], lambda path: [Path(path)]])
def test_every_reader_takes_a_path_in_any_spelling(
    reader: str, spelled: Callable[[str], Any], tmp_path: Path
) -> None:
    """That the message names the whole path shows that the path was understood."""
    path = str(tmp_path / "not here")
    with pytest.raises(InputError) as caught:
        READERS[reader](spelled(path))
    assert str(caught.value).startswith(f"{path}: no such ")


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_path_is_refused(reader: str) -> None:
    for wrong in (None, 7, [None], {"x": 1}.values()):
        with pytest.raises(InputError, match="is not a path"):
            READERS[reader](wrong)


def test_a_string_is_one_path() -> None:
    assert as_paths("ab") == [Path("ab")]
    assert as_paths(["a", Path("b")]) == [Path("a"), Path("b")]
    with pytest.raises(InputError, match="no file is given"):
        as_paths([])
