"""Clients whose uploads were rejected or flagged, summed up over rounds."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedzmg.results.formatting import count_text, few_text


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


def unusual_points(entry: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Any]]:
    """Yield point and client of unusual uploads in an algorithm's entry of a ``grid.json``."""
    for point in entry["points"]:
        yield from ((point, client) for client in point.get("unusual", ()))


def grid_warning(name: str, entry: Mapping[str, Any]) -> str:
    """Name the clients with unusual uploads in an algorithm's grid; empty if there are none."""
    found = list(unusual_points(entry))
    if not found:
        return ""
    best = entry["best"] and entry["best"]["options"]
    flagged = [(point, one) for point, one in found if one["action"] == "flagged"]
    shown = flagged or found
    clients = list(dict.fromkeys(one["client"] for _, one in shown))
    action = "flagged" if flagged else "rejected"
    number = len({id(point) for point, _ in shown})
    chosen = ", including the best" * any(point["options"] == best for point, _ in shown)
    worst = max((one for _, one in shown), key=lambda one: one["ratio"] or math.inf)
    who = f"uploads of {count_text(len(clients), 'client')} ({few_text(clients)})"
    where = f"{number} of {len(entry['points'])} points of {name}{chosen}"
    remedy = "; federation.guard = true rejects such updates" * bool(flagged)
    largest = f"{ratio_text(worst['ratio'])} in round {worst['round']}"
    return f"{who} were {action} in {where} (largest: {largest}){remedy}"


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
