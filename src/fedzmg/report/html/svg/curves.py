"""Lines with bands: large with their names at the ends, or many small ones over a grey ground."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from fedzmg.report.html.svg.axes import (
    PANEL,
    Axes,
    Limits,
    Room,
    Size,
    axes_of,
    for_both_pages,
    panel_axes,
)
from fedzmg.report.html.svg.labels import LINE, Label, Lines, beside, taller, written
from fedzmg.report.html.svg.parts import (
    COLOURS,
    HALF,
    MOST_DIRECT_LABELS,
    Frame,
    Number,
    Scale,
    dash,
    document,
    extent,
    plain,
    short,
)
from fedzmg.report.placing import moved_apart

MOST_POINTS = 300
_LEADER = 18.0
"""From the axes to the names at the ends."""
_HEAD, _FOOT = 8.0, 36.0
"""Above and below all these names."""


class Line(NamedTuple):
    """A curve, with a band around it if its lower and upper edge are given."""

    label: str
    style: int
    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None
    broke_off: bool = False


class Level(NamedTuple):
    """A horizontal line to be reached."""

    value: float
    label: str


class Ends(NamedTuple):
    """What is named at the right ends, and how."""

    lines: Sequence[Line]
    levels: Sequence[Level]
    words: tuple[Lines, ...]
    """Lines of every name."""
    room: float
    """Right of the axes."""


NO_ENDS = Ends((), (), (), 12.0)


class Drawing(NamedTuple):
    """A chart of lines."""

    markup: Markup
    named: bool
    """Whether the lines of a wide page bear their names; else they need a legend."""


def curves(
    lines: Sequence[Line],
    frame: Frame,
    *,
    levels: Sequence[Level] = (),
    number: Number = plain,
    size: Size = HALF,
    whole: bool = False,
) -> Drawing:
    """Draw lines with bands, for a wide page and for a narrow one; one of them is shown.

    Args:
        lines: what to draw; the first comes out on top.
        frame: words around it.
        levels: what is to be reached.
        number: writes a tick of the vertical axis.
        size: of the wide chart.
        whole: whether heights are counts, so that no tick lies between two of them.
    """
    drawn = [thinned(line) for line in lines if len(line.x)]
    limits = shared_limits(drawn, levels)
    ends = ends_of(drawn, levels, size)

    def chart(area: Size, name: str) -> Markup:
        shown = ends if name == "wide" else NO_ENDS
        axes = line_axes(shown, limits, number, area, whole=whole)
        parts = [
            *_inside(drawn, levels, axes.x, axes.y),
            end_labels(shown, axes.x, axes.y, area[1]),
        ]
        return axes.chart(frame, area, parts, name)

    return Drawing(for_both_pages(chart, size), named=bool(ends.lines))


def ends_of(lines: Sequence[Line], levels: Sequence[Level], size: Size) -> Ends:
    """Which names have room at the right ends: all, those of levels, or none."""
    room = size[1] - _FOOT - _HEAD
    for own in (lines, ()) if len(lines) <= MOST_DIRECT_LABELS else ((),):
        labels = [Label(line.label, bold=True) for line in own]
        labels += [Label(level.label) for level in levels]
        found = beside(labels, _LEADER, 8.0, size[0], room) if labels else None
        if found is not None:
            return Ends(own, levels, found.lines, found.room)
    return NO_ENDS


def line_axes(
    ends: Ends, limits: Limits, number: Number, size: Size, *, whole: bool = False
) -> Axes:
    """Axes of a chart of lines that leave room for the names at their ends."""
    most = 10 if size[0] > 800.0 else 6, 7
    heights = limits.low, limits.high
    across = 0.0, limits.end
    return axes_of(across, heights, number, size, Room(ends.room), most, whole=whole)


def panel(
    members: Sequence[Line],
    ground: str,
    frame: Frame,
    limits: Limits,
    *,
    levels: Sequence[Level] = (),
    number: Number = plain,
) -> Markup:
    """Draw one of many small charts; ``ground`` is the key of what :func:`background` drew."""
    axes = panel_axes(limits, number)
    parts = [
        axes.grid(PANEL[0]),
        Markup('<use href="#{}"/>').format(ground),
        *_inside([thinned(line) for line in members], levels, axes.x, axes.y),
    ]
    return document(frame, *PANEL, parts, "panel")


def background(lines: Sequence[Line], key: str, limits: Limits, number: Number = plain) -> Markup:
    """All lines in grey, once, for every panel to refer to."""
    axes = panel_axes(limits, number)
    paths = Markup("").join(
        Markup('<path class="ghost" d="{}"/>').format(line_data(line.x, line.y, axes.x, axes.y))
        for line in map(thinned, lines)
        if len(line.x)
    )
    return Markup(
        '<svg width="0" height="0" class="defs" aria-hidden="true"><defs><g id="{}">{}</g></defs>'
        "</svg>"
    ).format(key, paths)


def shared_limits(lines: Sequence[Line], levels: Sequence[Level]) -> Limits:
    """Scales on which every line, band and level fits."""
    heights = [level.value for level in levels]
    for line in lines:
        for edge in line.band or (line.y,):
            heights += edge
    longest = max((line.x for line in lines if len(line.x)), key=lambda x: x[-1])
    end = longest[-1]
    spacing = end - longest[-2] if len(longest) > 1 else 0.0
    # A thousand rounds evaluated every five end at 995: go on to the tick that a reader expects.
    return Limits(end + (spacing if spacing <= 0.02 * end else 0.0) or 1.0, *extent(heights))


def thinned(line: Line) -> Line:
    """Every so many points of a long line, and its end: no screen shows more."""
    step = -(-len(line.x) // MOST_POINTS)
    if step <= 1:
        return line
    kept = sorted({*range(0, len(line.x), step), len(line.x) - 1})
    x, y, *edges = ([own[i] for i in kept] for own in (line.x, line.y, *(line.band or ())))
    return line._replace(x=x, y=y, band=(edges[0], edges[1]) if edges else None)


def _inside(
    lines: Sequence[Line], levels: Sequence[Level], x: Scale, y: Scale
) -> list[str | Markup]:
    # The first one on top: it is the reference.
    return [
        *(_level(level, x, y) for level in levels),
        *(around(line, *line.band, x, y) for line in reversed(lines) if line.band is not None),
        *(path_of(line, x, y) for line in reversed(lines)),
    ]


def _level(level: Level, x: Scale, y: Scale) -> Markup:
    d = f"M{short(x.start)} {short(y(level.value))}H{short(x.end)}"
    return Markup('<path class="level" d="{}"><title>{}</title></path>').format(d, level.label)


def around(line: Line, low: Sequence[float], high: Sequence[float], x: Scale, y: Scale) -> Markup:
    """The band of a line."""
    d = line_data([*line.x, *reversed(line.x)], [*high, *reversed(low)], x, y)
    return Markup('<path class="band c{}" data-series="{}" d="{}Z"/>').format(
        line.style % COLOURS, line.label, d
    )


def path_of(line: Line, x: Scale, y: Scale) -> Markup:
    """The drawn line, with what a pointer over it shows."""
    colour = line.style % COLOURS
    drawn = Markup(
        '<path class="line c{}" data-series="{}" d="{}"{}><title>{}</title></path>'
    ).format(colour, line.label, line_data(line.x, line.y, x, y), dash(line.style), line.label)
    if line.broke_off:
        a, b = x(line.x[-1]), y(line.y[-1])
        cross = f"M{short(a - 4)} {short(b - 4)}l8 8m0 -8l-8 8"
        drawn += Markup('<path class="mean c{}" d="{}"/>').format(colour, cross)
    if len(line.x) == 1:
        drawn += Markup('<circle class="dot c{}" cx="{}" cy="{}" r="3"/>').format(
            colour, short(x(line.x[0])), short(y(line.y[0]))
        )
    return drawn


def end_labels(ends: Ends, x: Scale, y: Scale, height: float) -> Markup:
    """Names of lines and levels at their right ends, moved apart."""
    found = [
        (y(line.y[-1]), x(line.x[-1]), line.label, f"c{line.style % COLOURS}")
        for line in ends.lines
    ]
    found += [(y(level.value), x.end, level.label, "quiet") for level in ends.levels]
    wanted = [entry[0] - _HEAD for entry in found]
    places = moved_apart(
        wanted, LINE + 1.0, height - _FOOT - _HEAD, [taller(own) for own in ends.words]
    )
    parts = []
    for (end, start, label, colour), own, low in zip(found, ends.words, places, strict=True):
        place = low + _HEAD
        leader = f"M{short(start + 2)} {short(end)}L{short(x.end + 14)} {short(place)}"
        parts.append(Markup('<path class="leader {}" d="{}"/>').format(colour, leader))
        parts.append(written(x.end + _LEADER, place + 4.0, own, f"label {colour}", label))
    return Markup("").join(parts)


def line_data(xs: Sequence[float], ys: Sequence[float], x: Scale, y: Scale) -> str:
    """The points of a path; those that are not finite are left out."""
    points = [(x(a), y(b)) for a, b in zip(xs, ys, strict=True) if math.isfinite(b)]
    return "M" + "L".join(f"{short(a)} {short(b)}" for a, b in points)
