"""Spreads over time: a line in the middle of a band that need not be symmetric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from fedzmg.report.html.svg.axes import PANEL, Limits, Size, for_both_pages, panel_axes
from fedzmg.report.html.svg.curves import (
    NO_ENDS,
    Drawing,
    Line,
    around,
    end_labels,
    ends_of,
    line_axes,
    path_of,
)
from fedzmg.report.html.svg.parts import HALF, Frame, Number, document, extent, plain


class Band(NamedTuple):
    """A line and what lies around it."""

    line: Line
    low: Sequence[float]
    high: Sequence[float]


def limits_of(found: Sequence[Band]) -> Limits:
    """Room for all of these."""
    heights = [value for band in found for value in (*band.low, *band.high)]
    return Limits(max(band.line.x[-1] for band in found) or 1.0, *extent(heights))


def bands(
    found: Sequence[Band],
    frame: Frame,
    *,
    number: Number = plain,
    size: Size = HALF,
) -> Drawing:
    """Draw lines with bands, for a wide page and for a narrow one; the first comes out on top."""
    limits, lines = limits_of(found), [band.line for band in found]
    ends = ends_of(lines, (), size)

    def chart(area: Size, name: str) -> Markup:
        shown = ends if name == "wide" else NO_ENDS
        axes = line_axes(shown, limits, number, area)
        parts = [
            *(around(band.line, band.low, band.high, axes.x, axes.y) for band in reversed(found)),
            *(path_of(line, axes.x, axes.y) for line in reversed(lines)),
            end_labels(shown, axes.x, axes.y, area[1]),
        ]
        return axes.chart(frame, area, parts, name)

    return Drawing(for_both_pages(chart, size), named=bool(ends.lines))


def panel(band: Band, frame: Frame, limits: Limits, *, number: Number = plain) -> Markup:
    """Draw one of many small charts on the same scales."""
    axes, line = panel_axes(limits, number), band.line
    drawn = around(line, band.low, band.high, axes.x, axes.y)
    parts = [axes.grid(PANEL[0]), drawn, path_of(line, axes.x, axes.y)]
    return document(frame, *PANEL, parts, "panel")
