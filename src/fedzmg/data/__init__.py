"""Federated data: columns with client offsets, partitions, and the batch plan of a round."""

from __future__ import annotations

from fedzmg.data.federated import Examples, FederatedData
from fedzmg.data.partition import PARTITIONS, dirichlet, iid
from fedzmg.data.plan import Batching

__all__ = ["PARTITIONS", "Batching", "Examples", "FederatedData", "dirichlet", "iid"]
