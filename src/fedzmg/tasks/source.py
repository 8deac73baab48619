"""Convert catalogued columns to a task's data without copying."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Columns, Owners
from fedzmg.data.federated import Examples, FederatedData, examples
from fedzmg.errors import InputError

if TYPE_CHECKING:
    from fedzmg.data.catalog import Dataset

Selection: TypeAlias = Literal["half", "test"]
"""``half``: half of the test examples choose hyper-parameters, the other half report results.
``test``: all examples do both, as in the paper."""


def load(data_set: str) -> Dataset:
    """Load a data set of the catalog."""
    from fedzmg.data import catalog  # imports every reader, which few commands need

    return catalog.load(data_set)


def missing(data_set: str) -> str:
    """Return the command that fetches a data set; empty if it is here."""
    from fedzmg.data import catalog
    from fedzmg.data.sources import source

    if data_set in catalog.present():
        return ""
    if source(data_set).remotes:
        return f"fedzmg data get {data_set}"
    return f"fedzmg data import {data_set} FILE..."


@dataclass(frozen=True, repr=False)
class Catalogued(FederatedData):
    """Training examples exactly as the catalog holds them.

    The catalog's own fingerprint identifies them: a run need not read half a gigabyte to start.
    """

    origin: str = ""
    """Fingerprint of the data set."""

    def fingerprint(self) -> str:
        """Return the SHA-256 of the data set's own fingerprint, client offsets and names."""
        digest = hashlib.sha256(self.origin.encode())
        for column in self.examples:
            digest.update(f"{column.dtype}{tuple(column.shape)}".encode())
        digest.update(self.offsets.tobytes())
        digest.update("\x1f".join(self.names).encode())
        return digest.hexdigest()


def pooled(columns: Columns, what: str) -> Examples:
    """Return images and labels of all clients, sharing memory (or the mapped file)."""
    return examples(columns.array("x"), columns.array("y"), what=what)


def by_client(columns: Columns, data_set: str, origin: str) -> FederatedData:
    """Return images and labels of the clients that the file names."""
    owners = owners_of(columns, data_set)
    return Catalogued(pooled(columns, "training data"), owners.offsets, owners.names, origin)


def owners_of(columns: Columns, data_set: str) -> Owners:
    """Return the rows' clients."""
    if columns.owners is None:
        raise InputError(
            f"data set {data_set!r} does not name the clients of its examples: import files that do"
        )
    return columns.owners


def test_owners(
    train: Sequence[str], test: Sequence[str], counts: npt.NDArray[np.int64], selection: Selection
) -> npt.NDArray[np.int64]:
    """Return each reporting example's client: a position in ``train``, or -1."""
    position = {name: i for i, name in enumerate(train)}
    owners = np.repeat(np.array([position.get(name, -1) for name in test], np.int64), counts)
    return owners if selection == "test" else owners[1::2]


def selected(test: Examples, selection: Selection) -> tuple[Examples, Examples]:
    """Split test examples into a tuning and a reporting part.

    Halves alternate: every test client has a part in both.
    """
    if selection == "test":
        return test, test
    tune, report = (Examples(test.x[i::2], test.y[i::2]) for i in (0, 1))
    return tune, examples(*report, what="the reporting half of the test data")
