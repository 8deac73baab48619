"""Labels that would cover each other, moved apart."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean


def moved_apart(
    wanted: Sequence[float], gap: float, room: float, taller: Sequence[float] | None = None
) -> list[float]:
    """Return the heights nearest to the wanted ones that keep a gap and stay within the room.

    Least squares: labels that would touch form a group around the mean of their wanted heights.

    Args:
        wanted: where the middles of the labels should be.
        gap: between the middles of two labels of one line.
        room: from 0 to the highest middle of a label of one line.
        taller: by how much each label is taller than one line.

    >>> moved_apart([100.0, 100.0, 20.0], 12.0, 300.0)
    [94.0, 106.0, 20.0]
    >>> moved_apart([100.0, 100.0], 12.0, 300.0, [10.0, 0.0])
    [91.5, 108.5]
    """
    extra = [0.0] * len(wanted) if taller is None else taller
    gap = min(gap, max(0.0, room - sum(extra)) / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # From the lower edge of the first label to the middle of each, if all of them touch.
    offsets, below = [], 0.0
    for rank, i in enumerate(order):
        offsets.append(rank * gap + below + extra[i] / 2.0)
        below += extra[i]
    # With the gaps taken out, the heights need only be in order, which is isotonic regression.
    groups: list[list[float]] = []
    for offset, i in zip(offsets, order, strict=True):
        groups.append([wanted[i] - offset])
        while len(groups) > 1 and fmean(groups[-2]) >= fmean(groups[-1]):
            touching = groups.pop()
            groups[-1].extend(touching)
    levels = [level for group in groups for level in [fmean(group)] * len(group)]
    highest = room - (len(wanted) - 1) * gap - below
    placed = [0.0] * len(wanted)
    for i, offset, level in zip(order, offsets, levels, strict=True):
        placed[i] = min(max(level, 0.0), highest) + offset
    return placed
