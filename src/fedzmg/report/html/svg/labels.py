"""Labels of a chart: how wide they are, folded where they are long, and the room they take.

Every chart asks here, so that no label leaves its chart, however long it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from fedzmg.report.html.svg.parts import CHARACTER, LETTERS, Frame, short
from fedzmg.report.lettering import folded, width_of

LINE = 13.0
"""From one line of a label to the next."""
ONE_LINE = 1.0 / 3.0
"""Labels that take more than this share of a chart are folded."""
MOST = 0.4
"""Labels that take more than this share, even folded, do not stand beside their chart."""
MOST_LINES = 3
_MARGIN = 2.0

Lines = tuple[str, ...]


class Label(NamedTuple):
    """Words, and how they are set."""

    words: str
    bold: bool = False


class Beside(NamedTuple):
    """Labels beside a chart."""

    lines: tuple[Lines, ...]
    """Those of every label."""
    room: float
    """From the axes to the edge of the chart."""


def beside(
    labels: Sequence[Label], gap: float, margin: float, width: float, height: float | None = None
) -> Beside | None:
    """Fit labels beside a chart.

    Args:
        labels: from any side.
        gap: between the axes and the labels.
        margin: between labels of usual letters and the edge of the chart.
        width: of the whole chart.
        height: what is there for all of them, if they stand one above the other.

    Returns:
        Their lines, and the room to leave; None if they would leave the chart too little.
    """
    limit = ONE_LINE * width - gap - _MARGIN
    lines = tuple(folded(one.words, limit, LETTERS, bold=one.bold) for one in labels)
    # Letters of usual width with a margin, or what these take where that is more.
    room = gap + max(
        max(CHARACTER * len(line) + margin, width_of(line, LETTERS, bold=one.bold) + _MARGIN)
        for one, own in zip(labels, lines, strict=True)
        for line in own
    )
    if room > MOST * width or max(map(len, lines)) > MOST_LINES:
        return None
    if height is not None and sum(map(tall, lines)) > height:
        return None
    return Beside(lines, room)


def fitted(words: str, room: float) -> Lines:
    """Words that have a given room and may be cut if nothing else helps."""
    return folded(words, room, LETTERS, cut=True)


def axis_names(frame: Frame, across: float, down: float, width: float, height: float) -> Markup:
    """Names of both axes; ``across`` and ``down`` are where the middles of the axes are."""
    upright = kept_inside(down, frame.ylabel, height)
    return name_below(frame, across, width, height - 7.0) + Markup(
        '<text transform="{}" class="mid name">{}</text>'
    ).format(f"translate(12 {short(upright)}) rotate(-90)", frame.ylabel)


def name_below(frame: Frame, middle: float, width: float, foot: float) -> Markup:
    """The name of the horizontal axis; what has no room in one line goes on below ``foot``."""
    lines = fitted(frame.xlabel, width - 2 * _MARGIN)
    middle = kept_inside(middle, max(lines, key=_length), width)
    return written(middle, foot + more_below(frame, width) / 2.0, lines, "mid name")


def more_below(frame: Frame, width: float) -> float:
    """By how much a chart has to be higher for the name of its horizontal axis."""
    return LINE * (len(fitted(frame.xlabel, width - 2 * _MARGIN)) - 1)


def kept_inside(middle: float, line: str, room: float) -> float:
    """Where the middle of a line has to be, as near as possible, to have room."""
    half = min(_length(line) + 2 * _MARGIN, room) / 2.0
    return min(max(middle, half), room - half)


def _length(line: str) -> float:
    return width_of(line, LETTERS)


def tall(lines: Lines) -> float:
    """Height of a label with what keeps it from the next."""
    return LINE + 1.0 + taller(lines)


def taller(lines: Lines) -> float:
    """By how much a label is taller than one of one line; the lines of one belong together."""
    return LINE * (len(lines) - 1) + (3.0 if len(lines) > 1 else 0.0)


def written(x: float, middle: float, lines: Lines, kind: str, series: str = "") -> Markup:
    """A label whose lines are about a height; ``series`` is what it belongs to."""
    first = middle - LINE * (len(lines) - 1) / 2.0
    words: str | Markup = lines[0]
    if len(lines) > 1:
        words = Markup("").join(
            Markup('<tspan x="{}" y="{}">{}</tspan>').format(short(x), short(first + LINE * i), one)
            for i, one in enumerate(lines)
        )
    return Markup('<text x="{}" y="{}" class="{}"{}>{}</text>').format(
        short(x), short(first), kind,
        Markup(' data-series="{}"').format(series) if series else "", words,
    )  # fmt: skip
