"""What all charts are made of: scales, ticks, axes and the document around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from fedzmg.results.formatting import MINUS

COLOURS = 7
"""Classes ``c0`` to ``c6`` of the style sheet."""
DASHES = ("", "7 3", "9 3 2 3", "2 2.5", "12 3 2 3 2 3")
MOST_DIRECT_LABELS = 8
LETTERS = 12.0
"""Size of the letters."""
CHARACTER = 6.7
"""Width of a letter, on average."""
FULL, LOW, HALF, NARROW = (1040.0, 400.0), (1040.0, 320.0), (560.0, 330.0), (360.0, 300.0)

Number = Callable[[float], str]


class Frame(NamedTuple):
    """Words that every chart needs."""

    key: str
    """Unique in the page."""
    title: str
    description: str
    xlabel: str
    ylabel: str = ""


class Scale(NamedTuple):
    """Maps values to places on the paper."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two values, at most so many.

    >>> ticks(0.0, 0.93, 6)
    [0.0, 0.2, 0.4, 0.6, 0.8]
    """
    power = math.floor(math.log10((high - low) / most))
    for factor in (1.0, 2.0, 2.5, 5.0, 10.0, 20.0, 25.0, 50.0):
        step = factor * 10.0**power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            break
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def plain(value: float) -> str:
    """A number at a tick."""
    return f"{value:,.10g}".replace("-", MINUS)


def percent(value: float) -> str:
    """A share at a tick, in percent."""
    return f"{100 * value:.6g}".replace("-", MINUS) + " %"


def extent(values: Sequence[float], margin: float = 0.05) -> tuple[float, float]:
    """The range of some values with a little room; never empty."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    room = margin * (high - low) or 0.05 * abs(high) or 0.5
    return low - room, high + room


def swatch(style: int) -> Markup:
    """A short piece of a line for a legend."""
    return Markup(
        '<svg class="swatch" viewBox="0 0 34 10" width="34" height="10" aria-hidden="true">'
        '<path class="line c{}" d="M1 5H33"{}/></svg>'
    ).format(style % COLOURS, dash(style))


def document(
    frame: Frame, width: float, height: float, parts: Sequence[str | Markup], name: str
) -> Markup:
    """A whole chart; ``name`` is ``wide``, ``narrow``, ``panel`` or ``any``."""
    key = f"{frame.key}-{name}"
    return Markup(
        '<svg class="chart {name}"{limit} viewBox="0 0 {width} {height}" role="img" '
        'aria-labelledby="{key}-t {key}-d"><title id="{key}-t">{title}</title>'
        '<desc id="{key}-d">{description}</desc>{inside}</svg>'
    ).format(
        name=name,
        # A small table of cells must not be blown up to the width of the page.
        limit=Markup(' style="max-width:{}px"').format(short(width)) if name == "any" else "",
        width=short(width),
        height=short(height),
        key=key,
        title=frame.title,
        description=frame.description,
        inside=Markup("").join(parts),
    )


def text(x: float, y: float, words: str, kind: str) -> Markup:
    """Words at a place."""
    return Markup('<text x="{}" y="{}" class="{}">{}</text>').format(
        short(x), short(y), kind, words
    )


def dash(style: int) -> Markup:
    """The dashes of a line."""
    pattern = DASHES[style % len(DASHES)]
    return Markup(' stroke-dasharray="{}"').format(pattern) if pattern else Markup("")


def short(value: float) -> str:
    """A coordinate, to a tenth of a pixel.

    >>> short(12.04), short(-0.01)
    ('12', '0')
    """
    written = f"{value:.1f}"
    return "0" if written == "-0.0" else written.removesuffix(".0")
