"""Two axes with their numbers, as charts of lines and points have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from fedzmg.report.html.svg.labels import axis_names, kept_inside, more_below
from fedzmg.report.html.svg.parts import (
    CHARACTER,
    NARROW,
    Frame,
    Number,
    Scale,
    document,
    plain,
    short,
    text,
    ticks,
)

Size = tuple[float, float]

PANEL = (260.0, 170.0)
"""One of many small charts."""


class Limits(NamedTuple):
    """What charts of lines have to have room for; across they start at 0."""

    end: float
    low: float
    high: float


class Room(NamedTuple):
    """What is left free around two axes."""

    right: float
    left: float = 32.0
    """Besides the numbers."""
    below: float = 42.0
    above: float = 12.0


class Axes(NamedTuple):
    """Both scales with their ticks."""

    x: Scale
    y: Scale
    x_ticks: list[float]
    y_ticks: list[float]
    number: Number

    def grid(self, width: float) -> Markup:
        """Lines at the vertical axis' ticks, the horizontal axis, and all their numbers."""
        x, y = self.x, self.y
        parts = []
        for tick in self.y_ticks:
            d = f"M{short(x.start)} {short(y(tick))}H{short(x.end)}"
            parts.append(Markup('<path class="grid" d="{}"/>').format(d))
            parts.append(text(x.start - 6.0, y(tick) + 4.0, self.number(tick), "end"))
        for tick in self.x_ticks:
            words = plain(tick)
            parts.append(text(kept_inside(x(tick), words, width), y.start + 16.0, words, "mid"))
            d = f"M{short(x(tick))} {short(y.start)}v4"
            parts.append(Markup('<path class="axis" d="{}"/>').format(d))
        d = f"M{short(x.start)} {short(y.start)}H{short(x.end)}"
        parts.append(Markup('<path class="axis" d="{}"/>').format(d))
        return Markup("").join(parts)

    def chart(self, frame: Frame, size: Size, parts: Sequence[str | Markup], name: str) -> Markup:
        """A whole chart: grid, names beside the middles of the axes, and what is drawn."""
        across, up = ((scale.start + scale.end) / 2.0 for scale in (self.x, self.y))
        around = [self.grid(size[0]), axis_names(frame, across, up, *size)]
        height = size[1] + more_below(frame, size[0])
        return document(frame, size[0], height, [*around, *parts], name)


def axes_of(
    across: tuple[float, float],
    up: tuple[float, float],
    number: Number,
    size: Size,
    room: Room,
    most: tuple[int, int],
    *,
    whole: bool = False,
) -> Axes:
    """Lay out two axes.

    Args:
        across: lowest and highest value on the horizontal axis.
        up: the same on the vertical one.
        number: writes a tick of the vertical axis.
        size: of the chart.
        room: around the axes.
        most: ticks on each.
        whole: whether heights are counts, so that no tick lies between two of them.
    """
    y_ticks = ticks(*up, most[1])
    if whole:
        y_ticks = [tick for tick in y_ticks if tick == int(tick)] or [0.0]
    left = room.left + CHARACTER * max(len(number(tick)) for tick in y_ticks)
    x = Scale(*across, left, size[0] - room.right)
    y = Scale(*up, size[1] - room.below, room.above)
    return Axes(x, y, ticks(*across, most[0]), y_ticks, number)


def panel_axes(limits: Limits, number: Number) -> Axes:
    """Axes of small charts that share their limits."""
    room = Room(right=8.0, left=12.0, below=24.0, above=8.0)
    return axes_of((0.0, limits.end), (limits.low, limits.high), number, PANEL, room, (4, 4))


def for_both_pages(draw: Callable[[Size, str], Markup], size: Size) -> Markup:
    """A chart for a wide page and one for a narrow page; one of them is shown."""
    return draw(size, "wide") + draw(NARROW, "narrow")
