"""What the table of algorithms says about each of them."""

from __future__ import annotations

from dataclasses import dataclass

from fedzmg.contract import Algorithm


@dataclass(frozen=True)
class AlgorithmInfo:
    """One row: the algorithm with its defaults, and what a user wants to know about it.

    Traffic and state are declared here in multiples of the model and checked against what is
    counted in a run; scalars (steps, rounds, losses, rates) are left out.
    """

    algorithm: Algorithm
    summary: str
    source: str
    """Authors and year."""
    about: str | None
    """Equations and remarks: the ``__doc__`` of the module that defines it."""
    down: float = 1
    """Travels to each client of a cohort, every round."""
    up: float = 1
    """Travels back."""
    client_keeps: float = 0
    """Kept by every client that has taken part, between rounds."""
    server_keeps: float = 0
    """Kept by the server besides the model."""
    inferred: str = ""
    """What is our inference because no source could be read; shown wherever results are."""
