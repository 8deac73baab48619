"""Rows of the table of algorithms."""

from __future__ import annotations

from dataclasses import dataclass

from fedzmg.contract import Algorithm


@dataclass(frozen=True)
class AlgorithmInfo:
    """An algorithm with its defaults, and what a user wants to know about it.

    Traffic and state are declared here in multiples of the model and checked against what is
    counted in a run. Scalars (steps, rounds, losses, learning rates) are left out.
    """

    algorithm: Algorithm
    summary: str
    source: str
    """Authors and year."""
    family: str = "others"
    """Row of the README's table that names it."""
    down: float = 1
    """Sent to each client of a cohort, every round."""
    up: float = 1
    """Sent back."""
    client_keeps: float = 0
    """Kept between rounds by every client that has taken part."""
    server_keeps: float = 0
    """Kept by the server besides the model."""
    inferred: str = ""
    """Parts that we inferred because no source could be read; shown wherever results are."""
    about: str = ""
    """Equations and remarks: the docstring of its module, which the table fills in."""
