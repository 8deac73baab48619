"""Parts of a page, and figures as SVG that is embedded in it.

Colours of a figure become custom properties of the page, so that it follows light and dark mode.
Identifiers get a prefix, and series get the attributes that the page's script reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from fedzmg.report.figures.style import COLOURS, GHOST, GRID, INK, PAPER, QUIET_INK, Chart, rendered
from fedzmg.report.tables.table import Table

_NAMES = {INK: "ink", QUIET_INK: "quiet", GRID: "faint", GHOST: "ghost", PAPER: "paper"}
_NAMES |= {colour: f"c{i}" for i, colour in enumerate(COLOURS)}
_DROPPED = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", re.DOTALL)


class Block(NamedTuple):
    """A part of a section, drawn by the template; none if it is empty."""

    kind: str
    """``commands``, ``notes``, ``pairs``, ``pictures``, ``table``, ``text`` or ``tiles``."""
    content: Any
    title: str = ""
    style: str = ""
    """CSS class."""
    folded: bool = False


class Section(NamedTuple):
    """A part of the page with an anchor."""

    key: str
    title: str
    facts: str
    blocks: Iterable[Block]


class Picture(NamedTuple):
    """A figure with its words."""

    title: str
    caption: str
    warning: str
    svg: Markup
    wide: bool


def table_block(table: Table, title: str = "", *, folded: bool = False) -> Block:
    """Show a table below its title."""
    return Block("table", table, title or table.title, folded=folded)


def picture(chart: Chart, key: str) -> Picture:
    """Embed a figure; ``key`` keeps its identifiers apart from those of other figures."""
    wide = float(chart.get_figwidth()) > 7.5
    return Picture(chart.title, chart.caption, "", _inline_svg(chart, key), wide)


def _inline_svg(chart: Chart, key: str) -> Markup:
    """Return a figure as an SVG element without its title, which the page shows as a heading."""
    text = _DROPPED.sub("", rendered(chart, "svg").decode()).replace("xlink:href", "href")
    referenced = set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", text))

    def identifier(found: re.Match[str]) -> str:
        name = found[1]
        if name not in chart.series:
            used = f' id="{key}-{name}"' if name in referenced else ""
            return ' class="heading"' if name == "heading" else used
        label, points, legend = chart.series[name]
        own = f' data-series="{escape(label)}"' + " data-legend" * legend
        return own + (f' data-points="{"&#10;".join(map(escape, points))}"' if points else "")

    def tag(found: re.Match[str]) -> str:
        """Rewrite one tag; text between tags stays as it is."""
        own = re.sub("|".join(_NAMES), lambda colour: f"var(--{_NAMES[colour[0]]})", found[0])
        own = re.sub(r"(\d+\.\d\d)\d+", r"\1", own)
        own = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 var(--font)", own)
        own = re.sub(r"(url\(|href=\")#", rf"\1#{key}-", own)
        return re.sub(r' id="([^"]*)"', identifier, own)

    text = re.sub(r"<[^>]+>", tag, text)
    width, height = 72.0 * chart.get_figwidth(), 72.0 * chart.get_figheight()
    top = height - 72.0 * chart.heading.get_window_extent().y0 / chart.dpi
    opening = (
        f'<svg class="chart" role="img" aria-label="{escape(chart.title)}" '
        f'viewBox="0 {top:.0f} {width:.0f} {height - top:.0f}" '
        f'style="max-width:{width / 10:.0f}rem">'
    )
    text = re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)
    return Markup(re.sub(r"\s*\n\s*(?=<)", "", text).strip())
