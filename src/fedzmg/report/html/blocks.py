"""Parts of a page; the template draws each with the macro named like its class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from markupsafe import Markup

from fedzmg.report.figures.style import Chart
from fedzmg.report.html.inline_svg import inline_svg
from fedzmg.report.tables.table import Table


class Picture(NamedTuple):
    """A figure with its words."""

    title: str
    caption: str
    warning: str
    svg: Markup
    wide: bool


class Pictures(NamedTuple):
    """Figures side by side as far as there is room."""

    pictures: tuple[Picture, ...]


class Tile(NamedTuple):
    """A number that stands out."""

    head: str
    value: str
    note: str


class Tiles(NamedTuple):
    """A row of tiles."""

    tiles: tuple[Tile, ...]


class TableBlock(NamedTuple):
    """A table, open or folded."""

    table: Table
    title: str = ""
    folded: bool = False


class Pairs(NamedTuple):
    """Names and values."""

    title: str
    pairs: tuple[tuple[str, str], ...]
    long: bool = False


class Notes(NamedTuple):
    """A list of remarks."""

    lead: str
    notes: tuple[str, ...]


class Text(NamedTuple):
    """A paragraph with a CSS class."""

    text: str
    style: str = ""


class Commands(NamedTuple):
    """Lines for a terminal, folded if there are many."""

    title: str
    lines: tuple[str, ...]


Block: TypeAlias = Pictures | Tiles | TableBlock | Pairs | Notes | Text | Commands


class Section(NamedTuple):
    """A part of the page with an anchor."""

    key: str
    title: str
    facts: str
    blocks: tuple[Block, ...]


def arranged(pictures: Iterable[Picture]) -> Pictures:
    """Arrange figures in rows of two; the last of an odd number gets a row of its own."""
    found = list(pictures)
    narrow = [i for i, one in enumerate(found) if not one.wide]
    if len(narrow) % 2:
        found[narrow[-1]] = found[narrow[-1]]._replace(wide=True)
    return Pictures(tuple(found))


def picture(chart: Chart, key: str, caption: str | None = None, warning: str = "") -> Picture:
    """Embed a figure; ``key`` keeps its identifiers apart from those of other figures."""
    wide = float(chart.get_figwidth()) > 7.5
    words = chart.caption if caption is None else caption
    return Picture(chart.title, words, warning, inline_svg(chart, key), wide)
