"""What a page is put together from; every block is drawn by the macro of its ``kind``.

The macros are in ``templates/parts.html.jinja``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

from markupsafe import Markup

from fedzmg.report.tables.sheet import Sheet
from fedzmg.results.study_result import StudyResult


class LegendItem(NamedTuple):
    """A line of a legend."""

    swatch: Markup
    label: str


class Chart(NamedTuple):
    """A figure with its words."""

    key: str
    title: str
    lead: str
    """A sentence under the title."""
    drawing: Markup
    legend: tuple[LegendItem, ...] = ()
    always: bool = False
    """Whether the legend is needed on a wide page, too."""
    wide: bool = False
    """Whether it takes the whole width of the page."""


@dataclass(frozen=True)
class Charts:
    """Figures side by side, as far as there is room."""

    charts: tuple[Chart, ...]
    kind: ClassVar[str] = "charts"


class Panel(NamedTuple):
    """One of many small charts."""

    title: str
    drawing: Markup
    legend: tuple[LegendItem, ...]


@dataclass(frozen=True)
class Panels:
    """Many small charts."""

    title: str
    lead: str
    background: Markup
    panels: tuple[Panel, ...]
    kind: ClassVar[str] = "panels"


class Tile(NamedTuple):
    """A number worth standing out."""

    head: str
    value: str
    note: str


@dataclass(frozen=True)
class Tiles:
    """A row of them."""

    tiles: tuple[Tile, ...]
    kind: ClassVar[str] = "tiles"


@dataclass(frozen=True)
class Table:
    """A table, open or folded."""

    sheet: Sheet
    title: str = ""
    """What stands over it; by default the sheet's own title."""
    folded: bool = False
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Pairs:
    """Names and values."""

    title: str
    pairs: tuple[tuple[str, str], ...]
    long: bool = False
    """Whether values need room."""
    kind: ClassVar[str] = "pairs"


@dataclass(frozen=True)
class Notes:
    """Remarks."""

    lead: str
    notes: tuple[str, ...]
    kind: ClassVar[str] = "notes"


@dataclass(frozen=True)
class Commands:
    """Lines for a terminal; folded if they are many."""

    title: str
    lines: tuple[str, ...]
    kind: ClassVar[str] = "commands"


class Map(NamedTuple):
    """A heat-map with its words."""

    title: str
    lead: str
    warning: str
    drawing: Markup


@dataclass(frozen=True)
class Maps:
    """Heat-maps side by side."""

    title: str
    facts: str
    maps: tuple[Map, ...]
    kind: ClassVar[str] = "maps"


Block: TypeAlias = Charts | Panels | Tiles | Table | Pairs | Notes | Commands | Maps


class Section(NamedTuple):
    """A part of the page that can be gone to."""

    key: str
    title: str
    facts: str
    blocks: tuple[Block, ...]


StudyBlocks: TypeAlias = Callable[[StudyResult, str], Iterable[Block]]
"""Makes blocks of a study; the word is a prefix for the keys of its drawings."""
