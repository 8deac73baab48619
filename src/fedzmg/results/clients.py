"""What a run directory holds about single clients."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedzmg.storage import client_metrics as clients_file


class Clients(NamedTuple):
    """How the models of one run did on each client's own examples."""

    part: str
    """Which examples: ``test`` or ``training``."""
    population: int
    """Clients that hold such examples; more than are listed where these are a sample."""
    examples: NDArray[np.int64]
    rounds: NDArray[np.int64]
    metric: NDArray[np.float64]
    """Evaluations x clients."""


def read_clients(directory: Path) -> Clients | None:
    """Read what a run kept of single clients; None if it kept nothing.

    Raises:
        InputError: if the file is damaged.
    """
    table = clients_file.read_clients(directory)
    if table is None:
        return None
    return Clients(table.part, table.population, table.examples, table.rounds, table.metric)
