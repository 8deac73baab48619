"""The file of a run directory with metric and loss on single clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from fedzmg.errors import InputError
from fedzmg.storage.files import write_atomic
from fedzmg.storage.formats import RESTORE

CLIENTS = "clients.safetensors"
FORMAT = 1


class ClientTable(NamedTuple):
    """Metric and loss on each client's own examples, by round."""

    part: Literal["test", "training"]
    """Kind of examples that are evaluated."""
    population: int
    """Number of clients with such examples; those listed may be a sample."""
    clients: NDArray[np.int64]
    examples: NDArray[np.int64]
    rounds: NDArray[np.int64]
    metric: NDArray[np.float64]
    """Evaluations x clients."""
    loss: NDArray[np.float64]


def write_clients(directory: Path, table: ClientTable) -> None:
    """Write the file atomically."""
    tensors: dict[str, NDArray[Any]] = {
        "client": table.clients.astype(np.int32),
        "examples": table.examples.astype(np.int32),
        "round": table.rounds.astype(np.int32),
        "metric": table.metric,
        "loss": table.loss,
    }
    facts = {"format": str(FORMAT), "part": table.part, "population": str(table.population)}
    write_atomic(directory / CLIENTS, safetensors.numpy.save(tensors, facts))


def read_clients(directory: Path) -> ClientTable | None:
    """Read the file; None if the run never evaluated single clients."""
    path = directory / CLIENTS
    if not path.is_file():
        return None
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            facts, metric, loss = (
                file.metadata(),
                file.get_tensor("metric"),
                file.get_tensor("loss"),
            )
            clients, examples, rounds = (
                file.get_tensor(name).astype(np.int64) for name in ("client", "examples", "round")
            )
        facts = facts["part"], int(facts["population"])
        found = ClientTable(*facts, clients, examples, rounds, metric, loss)
        shape = len(found.rounds), len(found.clients)
        same = len(found.examples) == len(found.clients)
        if not same or not metric.size or {metric.shape, loss.shape} != {shape}:
            raise ValueError(f"a table of shape {metric.shape}")
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read ({error}): {RESTORE}") from None
    return found
