"""Points, with their names where these fit."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from fedzmg.report.html.svg.axes import Room, Size, axes_of, for_both_pages
from fedzmg.report.html.svg.labels import LINE, ONE_LINE, written
from fedzmg.report.html.svg.parts import HALF, LETTERS, Frame, Number, extent, plain, short
from fedzmg.report.lettering import folded, widest

Point = tuple[str, float, float]


def scatter(
    points: Sequence[Point],
    frame: Frame,
    *,
    number: Number = plain,
    named: bool = False,
    size: Size = HALF,
) -> Markup:
    """Draw points; ``named`` ones bear their names where these do not cover each other."""
    across, up = extent([point[1] for point in points]), extent([point[2] for point in points])
    room = Room(right=90.0 if named else 14.0)

    def chart(area: Size, name: str) -> Markup:
        axes = axes_of(across, up, number, area, room, (10 if area[0] > 800.0 else 5, 6))
        x, y = axes.x, axes.y
        parts = [
            Markup('<circle class="dot c0" cx="{}" cy="{}" r="{}"><title>{}</title></circle>')
            .format(short(x(a)), short(y(b)), 4 if named else 3, label)
            for label, a, b in points
        ]  # fmt: skip
        if named:
            parts += _names(
                [(label, x(a), y(b)) for label, a, b in points], x.start, area[0], y.start
            )
        return axes.chart(frame, area, parts, name)

    return for_both_pages(chart, size)


def _names(points: Sequence[Point], left: float, right: float, foot: float) -> list[Markup]:
    """Names right of their points, or left where the chart ends.

    One that would cover another name or a point, or has room on neither side, is left out.
    """
    taken = [(a - 4.0, b - 4.0, a + 4.0, b + 4.0) for _, a, b in points]
    parts = []
    for label, a, b in points:
        lines = folded(label, ONE_LINE * right, LETTERS)
        width, half = widest(lines, LETTERS), 6.0 + LINE * (len(lines) - 1) / 2.0
        if a + 10.0 + width <= right:
            place, kind, box = a + 8.0, "start", (a + 6.0, b - half, a + 8.0 + width, b + half)
        else:
            place, kind, box = a - 8.0, "end", (a - 8.0 - width, b - half, a - 6.0, b + half)
        outside = box[0] < left or box[1] < 0.0 or box[3] > foot
        if not outside and not any(
            box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
            for other in taken
        ):
            taken.append(box)
            parts.append(written(place, b + 4.0, lines, kind))
    return parts
