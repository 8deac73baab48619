"""From catalogued columns to a task's data, without copying what lies in the right order."""

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
``test``: all of them do both, as in the paper."""


def load(data_set: str) -> Dataset:
    """A data set of the catalog.

    Raises:
        InputError: if it is not here yet; the message says how to get it.
    """
    from fedzmg.data import catalog  # with the readers it knows, which few commands need

    return catalog.load(data_set)


def missing(data_set: str) -> str:
    """The command that brings a data set here; empty if it is here already."""
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

    They are known by the fingerprint that the catalog took when they were stored, so that half a
    gigabyte is not read again at the start of every run.
    """

    origin: str = ""
    """Fingerprint of the data set."""

    def fingerprint(self) -> str:
        """SHA-256 of the data set's own fingerprint, client borders and names."""
        digest = hashlib.sha256(self.origin.encode())
        for column in self.examples:
            digest.update(f"{column.dtype}{tuple(column.shape)}".encode())
        digest.update(self.offsets.tobytes())
        digest.update("\x1f".join(self.names).encode())
        return digest.hexdigest()


def pooled(columns: Columns, what: str) -> Examples:
    """Images and labels of all clients together, on the memory (or file) that they lie in."""
    return examples(columns.array("x"), columns.array("y"), what=what)


def by_client(columns: Columns, data_set: str, origin: str) -> FederatedData:
    """Images and labels of the clients that the file names."""
    owners = owners_of(columns, data_set)
    return Catalogued(pooled(columns, "training data"), owners.offsets, owners.names, origin)


def owners_of(columns: Columns, data_set: str) -> Owners:
    """Whose rows are whose.

    Raises:
        InputError: if the data set does not say.
    """
    if columns.owners is None:
        raise InputError(
            f"data set {data_set!r} does not say to whom its examples belong: import files that "
            "name their clients"
        )
    return columns.owners


def test_owners(
    train: Sequence[str], test: Sequence[str], counts: npt.NDArray[np.int64], selection: Selection
) -> npt.NDArray[np.int64]:
    """Whose each reporting example is: a position in ``train``, or -1.

    Args:
        train: names of the clients that train.
        test: names of the clients that the test examples belong to, in their order.
        counts: test examples of each of them.
        selection: which of the examples report.
    """
    place = {name: i for i, name in enumerate(train)}
    owners = np.repeat(np.array([place.get(name, -1) for name in test], np.int64), counts)
    return owners if selection == "test" else owners[1::2]


def selected(test: Examples, selection: Selection) -> tuple[Examples, Examples]:
    """Examples to choose hyper-parameters by, and examples to report results on.

    Every other example of a half, so that every test client has a part in both.
    """
    if selection == "test":
        return test, test
    tune, report = (Examples(test.x[i::2], test.y[i::2]) for i in (0, 1))
    return tune, examples(*report, what="the reporting half of the test data")
