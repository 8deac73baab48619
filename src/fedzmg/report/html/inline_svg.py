"""A figure's SVG, prepared for embedding in a page.

Colours become custom properties of the page, so that the figure follows light and dark mode.
Identifiers get a prefix, and series get the attributes that the page's script reads.
"""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from fedzmg.report.figures.style import COLOURS, GHOST, GRID, INK, PAPER, QUIET_INK, Chart, rendered

_PROPERTIES = {
    INK: "var(--ink)",
    QUIET_INK: "var(--quiet)",
    GRID: "var(--faint)",
    GHOST: "var(--ghost)",
    PAPER: "var(--paper)",
    **{colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)},
}
_COLOUR = re.compile("|".join(_PROPERTIES))
_DROPPED = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", re.DOTALL)
_NUMBER = re.compile(r"(\d+\.\d\d)\d+")
_FONT = re.compile(r"(font: [^;\"]*?px) [^;\"]*")


def inline_svg(chart: Chart, key: str) -> Markup:
    """Return a figure as an SVG element without its title, which the page shows as a heading.

    Args:
        chart: the figure.
        key: prefix of all identifiers, unique on the page.
    """
    text = _DROPPED.sub("", rendered(chart, "svg").decode())
    used = set(re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", text))
    referenced = {name for pair in used for name in pair if name}

    def tag(found: re.Match[str]) -> str:
        """Rewrite one tag; text between tags stays as it is."""
        own = _COLOUR.sub(lambda colour: _PROPERTIES[colour[0]], found[0])
        own = _NUMBER.sub(r"\1", own)
        own = _FONT.sub(r"\1 var(--font)", own)
        own = re.sub(r"url\(#|href=\"#", lambda start: f"{start[0]}{key}-", own)
        own = own.replace("xlink:href", "href")
        return re.sub(r' id="([^"]*)"', identifier, own)

    def identifier(found: re.Match[str]) -> str:
        name = found[1]
        if name == "heading":
            return ' class="heading"'
        if name in chart.series:
            series = chart.series[name]
            own = f' data-series="{escape(series.label)}"'
            own += " data-legend" if series.legend else ""
            if series.points:
                points = "&#10;".join(map(escape, series.points))
                own += f' data-points="{points}"'
            return own
        return f' id="{key}-{name}"' if name in referenced else ""

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
