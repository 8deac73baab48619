"""Clients whose uploads were rejected or flagged, summed up over rounds."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class UnusualClient(NamedTuple):
    """A client with uploads that are not finite, or outliers of their cohorts."""

    name: str
    rounds: tuple[int, ...]  # rounds of these uploads, ascending
    rejected: int
    flagged: int  # outliers that were merged
    ratio: float  # largest norm over the cohort's median; of flagged uploads, if there are any
    worst: int

    def __str__(self) -> str:
        """Describe the largest update and what happened to all of them."""
        fates = ["rejected"] * (self.rejected > 0) + ["flagged"] * (self.flagged > 0)
        often = f" in {len(self.rounds)} rounds" * (len(self.rounds) > 1)
        remedy = "; federation.guard = true rejects such updates" * (self.flagged > 0)
        what = f"{' or '.join(fates)}{often}{remedy}"
        return f"client {self.name}: update {ratio_text(self.ratio)} in round {self.worst} ({what})"


def ratio_text(ratio: float | None) -> str:
    """Format the size of an update; None and infinity are not finite."""
    finite = ratio is not None and math.isfinite(ratio)
    return f"{ratio:.2g} x the median" if finite else "not finite"


def unusual_clients(rounds: Iterable[tuple[int, Any, Any]]) -> tuple[UnusualClient, ...]:
    """Sum up (round, rejected, flagged) by client with its ratio: flagged first, then by size."""
    found: dict[str, list[tuple[bool, float, int]]] = defaultdict(list)
    for round_, *both in rounds:
        for is_flagged, clients in enumerate(both):
            for name, ratio in clients:
                found[str(name)].append((bool(is_flagged), float(ratio), -round_))
    summed = [_summed(name, uploads) for name, uploads in found.items()]
    return tuple(sorted(summed, key=lambda one: (not one.flagged, -one.ratio, one.name)))


def _summed(name: str, uploads: Sequence[tuple[bool, float, int]]) -> UnusualClient:
    _, ratio, worst = max(uploads)
    flagged = sum(is_flagged for is_flagged, *_ in uploads)
    rounds = sorted({-round_ for *_, round_ in uploads})
    return UnusualClient(name, tuple(rounds), len(uploads) - flagged, flagged, ratio, -worst)
