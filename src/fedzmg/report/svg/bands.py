"""Spreads over time: a line in the middle of a band that need not be symmetric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from fedzmg.report.svg.curves import Line, end_labels, line_data, path_of
from fedzmg.report.svg.parts import (
    CHARACTER,
    COLOURS,
    HALF,
    MOST_DIRECT_LABELS,
    NARROW,
    Frame,
    Number,
    Scale,
    axis_names,
    document,
    extent,
    grid,
    plain,
    ticks,
)

_PANEL = (260.0, 170.0)


class Band(NamedTuple):
    """A line and what lies around it."""

    line: Line
    low: Sequence[float]
    high: Sequence[float]


class Limits(NamedTuple):
    """What a chart has to have room for; across it starts at 0."""

    end: float
    low: float
    high: float

    @classmethod
    def of(cls, found: Sequence[Band]) -> Limits:
        """Room for all of these."""
        heights = [value for band in found for value in (*band.low, *band.high)]
        return cls(max(band.line.x[-1] for band in found) or 1.0, *extent(heights))


def bands(
    found: Sequence[Band],
    frame: Frame,
    *,
    number: Number = plain,
    size: tuple[float, float] = HALF,
) -> Markup:
    """Draw lines with bands, for a wide page and for a narrow one; the first comes out on top."""
    limits = Limits.of(found)
    return Markup("").join(
        _chart(found, frame, limits, number, area, name)
        for area, name in ((size, "wide"), (NARROW, "narrow"))
    )


def panel(band: Band, frame: Frame, limits: Limits, *, number: Number = plain) -> Markup:
    """Draw one of many small charts on the same scales."""
    x, y, x_ticks, y_ticks = _scales(limits, number, _PANEL, (12.0, 8.0, 24.0, 8.0), (4, 4))
    parts = [grid(x, y, x_ticks, y_ticks, number), _around(band, x, y), path_of(band.line, x, y)]
    return document(frame, *_PANEL, parts, "panel")


def _chart(
    found: Sequence[Band],
    frame: Frame,
    limits: Limits,
    number: Number,
    size: tuple[float, float],
    name: str,
) -> Markup:
    width, height = size
    lines = [band.line for band in found]
    direct = name == "wide" and len(lines) <= MOST_DIRECT_LABELS
    longest = 26.0 + CHARACTER * max(len(line.label) for line in lines)
    right = min(longest, 0.4 * width) if direct else 12.0
    room, most = (32.0, right, 42.0, 12.0), (10 if width > 800.0 else 6, 7)
    x, y, x_ticks, y_ticks = _scales(limits, number, size, room, most)
    parts = [
        grid(x, y, x_ticks, y_ticks, number),
        axis_names(frame, (x.start + x.end) / 2.0, (y.start + y.end) / 2.0, height),
        *(_around(band, x, y) for band in reversed(found)),
        *(path_of(line, x, y) for line in reversed(lines)),
    ]
    if direct:
        parts.append(end_labels(lines, (), x, y, height - 36.0))
    return document(frame, width, height, parts, name)


def _scales(
    limits: Limits,
    number: Number,
    size: tuple[float, float],
    room: tuple[float, float, float, float],
    most: tuple[int, int],
) -> tuple[Scale, Scale, list[float], list[float]]:
    """Both scales with their ticks; ``room`` is left of the numbers, right, below and above."""
    left, right, below, above = room
    y_ticks = ticks(limits.low, limits.high, most[1])
    left += CHARACTER * max(len(number(tick)) for tick in y_ticks)
    x = Scale(0.0, limits.end, left, size[0] - right)
    y = Scale(limits.low, limits.high, size[1] - below, above)
    return x, y, ticks(0.0, limits.end, most[0]), y_ticks


def _around(band: Band, x: Scale, y: Scale) -> Markup:
    line = band.line
    d = line_data([*line.x, *reversed(line.x)], [*band.high, *reversed(band.low)], x, y)
    return Markup('<path class="band c{}" data-series="{}" d="{}Z"/>').format(
        line.style % COLOURS, line.label, d
    )
