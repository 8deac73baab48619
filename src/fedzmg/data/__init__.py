"""Federated data: columns with client offsets, partitions, and the batch plan of a round."""

from fedzmg.data.columns import Columns
from fedzmg.data.federated import Examples, FederatedData
from fedzmg.data.partition import (
    PARTITIONS,
    dirichlet,
    dirichlet_by_label,
    hold_out,
    iid,
    natural,
    pachinko,
    quantity,
    shards,
)
from fedzmg.data.plan import Batching

__all__ = [
    "PARTITIONS", "Batching", "Columns", "Examples", "FederatedData", "dirichlet",
    "dirichlet_by_label", "hold_out", "iid", "natural", "pachinko", "quantity", "shards",
]  # fmt: skip
