"""A row of dots per label: values of runs, or a mean with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from fedzmg.report.html.svg.axes import for_both_pages
from fedzmg.report.html.svg.labels import (
    LINE,
    Label,
    beside,
    fitted,
    kept_inside,
    more_below,
    name_below,
    written,
)
from fedzmg.report.html.svg.parts import (
    CHARACTER,
    COLOURS,
    HALF,
    MOST_DIRECT_LABELS,
    Frame,
    Number,
    Scale,
    document,
    extent,
    plain,
    short,
    text,
    ticks,
)

_GAP = 10.0
"""Between labels and axes."""


class Dots(NamedTuple):
    """A row of values, each with a name; ``centre`` and ``interval`` are marked."""

    label: str
    style: int
    values: Sequence[tuple[str, float]]
    centre: float | None
    interval: tuple[float, float] | None = None
    note: str = ""
    strong: bool = False


def rows(
    dots: Sequence[Dots],
    frame: Frame,
    *,
    number: Number = plain,
    paired: bool = False,
    zero: bool = False,
) -> Markup:
    """Draw one row of dots per label.

    Args:
        dots: the rows from top to bottom.
        frame: words around it.
        number: writes a tick.
        paired: connect the dots of the same name.
        zero: mark zero with a line.
    """
    return for_both_pages(
        lambda size, name: _chart(dots, frame, number, paired, zero, size[0], name), HALF
    )


def _chart(
    dots: Sequence[Dots],
    frame: Frame,
    number: Number,
    paired: bool,
    zero: bool,
    width: float,
    name: str,
) -> Markup:
    few = len(dots) <= MOST_DIRECT_LABELS
    labels = [Label(one.label) for one in dots]
    # A narrow page has no room beside the dots, nor has a wide one for very long labels: there
    # they stand above their row.
    fit = beside(labels, _GAP, 12.0, width) if name == "wide" else None
    noted = 14.0 + CHARACTER * max(len(one.note) for one in dots)
    wide = fit is not None
    if fit is not None:
        left, words = fit.room, fit.lines
    else:
        left = 14.0
        words = tuple(fitted(one.label, width - left - noted) for one in dots)
    lines = max(map(len, words))
    if wide:
        pitch = max(34.0 if few else 20.0, LINE * lines + 6.0)
    else:
        pitch = (44.0 if few else 32.0) + LINE * (lines - 1)
    height = 14.0 + pitch * len(dots) + 44.0
    # Notes stand above their row with the labels, unless the line at zero would cross them.
    right = max(18.0, noted if wide or zero else 0.0)
    values = [value for one in dots for _, value in one.values]
    values += [one.centre for one in dots if one.centre is not None]
    values += [end for one in dots if one.interval for end in one.interval]
    low, high = extent([*values, 0.0] if zero else values)
    x = Scale(low, high, left, width - right)
    bottom = height - 44.0
    shift = 0.0 if wide else 8.0 + LINE * (lines - 1) / 2.0
    level = [14.0 + pitch * (i + 0.5) for i in range(len(dots))]
    parts = []
    for tick in ticks(low, high, 6 if name == "wide" else 4):
        d = f"M{short(x(tick))} 10V{short(bottom)}"
        parts.append(Markup('<path class="grid" d="{}"/>').format(d))
        words_below = number(tick)
        middle = kept_inside(x(tick), words_below, width)
        parts.append(text(middle, bottom + 17.0, words_below, "mid"))
    if zero:
        d = f"M{short(x(0.0))} 8V{short(bottom)}"
        parts.append(Markup('<path class="zero" d="{}"/>').format(d))
    if paired:
        parts += _pairs(dots, x, [place + shift for place in level])
    for one, own, place in zip(dots, words, level, strict=True):
        # A label above its row ends right above the dots, however many lines it has.
        middle = place + 4.0 if wide else place + shift - 14.0 - LINE * (len(own) - 1) / 2.0
        label = (
            written(left - _GAP, middle, own, "end")
            if wide
            else written(x.start, middle, own, "start")
        )
        parts.append(_row(one, x, place + shift, label, middle, width))
    parts.append(name_below(frame, (x.start + x.end) / 2.0, width, height - 8.0))
    return document(frame, width, height + more_below(frame, width), parts, name)


def _pairs(dots: Sequence[Dots], x: Scale, level: Sequence[float]) -> list[Markup]:
    """A thin line through the dots of every name."""
    parts = []
    for name in dict.fromkeys(name for one in dots for name, _ in one.values):
        found = [
            (x(value), place)
            for one, place in zip(dots, level, strict=True)
            for own, value in one.values
            if own == name
        ]
        points = " ".join(f"{short(a)},{short(b)}" for a, b in found)
        parts.append(Markup('<polyline class="pair" points="{}"/>').format(points))
    return parts


def _row(
    one: Dots, x: Scale, centre: float, label: Markup, beside_label: float, width: float
) -> Markup:
    colour = f"c{one.style % COLOURS}"
    parts = [label]
    if one.note:
        parts.append(text(width - 4.0, beside_label, one.note, "end quiet"))
    if one.interval is not None:
        low, high = (short(x(end)) for end in one.interval)
        tall = short(centre - 4)
        ends = f"M{low} {short(centre)}H{high}M{low} {tall}v8M{high} {tall}v8"
        parts.append(Markup('<path class="whisker {}" d="{}"/>').format(colour, ends))
    if one.centre is not None and one.interval is None:
        d = f"M{short(x(one.centre))} {short(centre - 9)}v18"
        parts.append(Markup('<path class="mean {}" d="{}"/>').format(colour, d))
    for name, value in one.values:
        parts.append(
            Markup('<circle class="dot {}" cx="{}" cy="{}" r="4"><title>{}</title></circle>')
            .format(colour, short(x(value)), short(centre), name)
        )  # fmt: skip
    if one.centre is not None and one.interval is not None:
        parts.append(
            Markup('<circle class="{} {}" cx="{}" cy="{}" r="5"/>').format(
                "full" if one.strong else "hollow", colour, short(x(one.centre)), short(centre)
            )
        )
    return Markup('<g data-series="{}">{}</g>').format(one.label, Markup("").join(parts))
