"""Columns are shown without their contents."""

from __future__ import annotations

import numpy as np

from fedzmg.data.columns import Columns, Owners
from fedzmg.data.federated import FederatedData
from fedzmg.data.formats.rows import pack


def test_what_is_printed_is_short() -> None:
    columns = Columns(
        {"x": np.zeros((3, 28, 28), np.uint8), "y": np.zeros(3, np.int64)},
        Owners(("a", "b"), np.array([0, 1, 3])),
        classes=("no", "yes"),
    )
    assert repr(columns) == (
        "<Columns: 3 rows of 2 clients; x 28 x 28 uint8, y int64; 2 named classes>"
    )
    assert repr(columns.owners) == "<Owners: 2 clients of 3 rows>"
    assert repr(pack(["to", "be", "or"], "here")) == "<Strings: 3 in 6 bytes>"
    data = FederatedData.from_arrays(np.zeros((3, 2), np.float32), [0, 1, 0], ["u", "v", "u"])
    assert repr(data) == "<FederatedData: 3 examples of 2 clients; x 2 float32, y int64>"
    assert repr(data.examples) == "<Examples: 3 of x 2 float32, y int64>"
