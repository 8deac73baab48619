"""Labels that would cover each other, moved apart."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean


def moved_apart(wanted: Sequence[float], gap: float, room: float) -> list[float]:
    """Return the heights nearest to the wanted ones that keep a gap and stay within the room.

    Least squares: labels that would touch form a group around the mean of their wanted heights.

    >>> moved_apart([100.0, 100.0, 20.0], 12.0, 300.0)
    [94.0, 106.0, 20.0]
    """
    gap = min(gap, room / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # With the gaps taken out, the heights need only be in order, which is isotonic regression.
    groups: list[list[float]] = []
    for rank, i in enumerate(order):
        groups.append([wanted[i] - rank * gap])
        while len(groups) > 1 and fmean(groups[-2]) >= fmean(groups[-1]):
            touching = groups.pop()
            groups[-1].extend(touching)
    levels = [level for group in groups for level in [fmean(group)] * len(group)]
    highest = room - (len(wanted) - 1) * gap
    placed = [0.0] * len(wanted)
    for rank, (i, level) in enumerate(zip(order, levels, strict=True)):
        placed[i] = min(max(level, 0.0), highest) + rank * gap
    return placed
