"""Points, with their names where these fit."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from fedzmg.report.svg.parts import (
    CHARACTER,
    HALF,
    NARROW,
    Frame,
    Number,
    Scale,
    axis_names,
    document,
    extent,
    grid,
    plain,
    short,
    text,
    ticks,
)

Point = tuple[str, float, float]


def scatter(
    points: Sequence[Point],
    frame: Frame,
    *,
    number: Number = plain,
    named: bool = False,
    size: tuple[float, float] = HALF,
) -> Markup:
    """Draw points; ``named`` ones bear their names where these do not cover each other."""
    x_low, x_high = extent([point[1] for point in points])
    y_low, y_high = extent([point[2] for point in points])
    y_ticks = ticks(y_low, y_high, 6)
    left = 32.0 + CHARACTER * max(len(number(tick)) for tick in y_ticks)
    out = []
    for (width, height), name in ((size, "wide"), (NARROW, "narrow")):
        x = Scale(x_low, x_high, left, width - (90.0 if named else 14.0))
        y = Scale(y_low, y_high, height - 42.0, 12.0)
        parts = [
            grid(x, y, ticks(x_low, x_high, 10 if width > 800.0 else 5), y_ticks, number),
            axis_names(frame, (x.start + x.end) / 2.0, (y.start + y.end) / 2.0, height),
        ]
        parts += [
            Markup('<circle class="dot c0" cx="{}" cy="{}" r="{}"><title>{}</title></circle>')
            .format(short(x(a)), short(y(b)), 4 if named else 3, label)
            for label, a, b in points
        ]  # fmt: skip
        if named:
            parts += _names([(label, x(a), y(b)) for label, a, b in points])
        out.append(document(frame, width, height, parts, name))
    return Markup("").join(out)


def _names(points: Sequence[Point]) -> list[Markup]:
    """Names right of their points; one that would cover another name or point is left out."""
    taken = [(a - 4.0, b - 4.0, a + 4.0, b + 4.0) for _, a, b in points]
    parts = []
    for label, a, b in points:
        box = (a + 6.0, b - 6.0, a + 8.0 + CHARACTER * len(label), b + 6.0)
        if not any(
            box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
            for other in taken
        ):
            taken.append(box)
            parts.append(text(a + 8.0, b + 4.0, label, "start"))
    return parts
