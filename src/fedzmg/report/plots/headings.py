"""Words above and below panels that stand side by side: what room they have, and folded into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from fedzmg.report.lettering import folded

TITLE, NOTE, BELOW = 9.5, 7.2, 8.5
"""Sizes of the letters."""
_PITCHES = 11.4, 8.6, 10.2
"""What a further line of each adds to a figure."""
_OVER_NOTE = 17.0
"""From axes to a title over a note of one line."""
_CLEAR, _GAP = 2.0, 8.0
"""Points to what is beside words: at least, and where they are folded."""
_POINTS_PER_INCH = 72.0


class Room(NamedTuple):
    """How wide the words above and below a panel may be, in points."""

    above: float
    below: float


class Words(NamedTuple):
    """The lines of a panel's title, of the note under it, and of the name of its axis."""

    title: tuple[str, ...]
    note: tuple[str, ...]
    below: tuple[str, ...]

    def within(self, room: Room) -> Words:
        """Words of one line each, in as many lines as the room asks for."""
        return Words(
            folded(self.title[0], room.above, TITLE, bold=True, cut=True),
            folded(self.note[0], room.above, NOTE, cut=True),
            folded(self.below[0], room.below, BELOW, cut=True),
        )

    @property
    def more_inches(self) -> float:
        """How much higher these are than one line of each."""
        lines = zip(self, _PITCHES, strict=True)
        return sum((len(own) - 1) * pitch for own, pitch in lines) / _POINTS_PER_INCH

    @property
    def pad(self) -> float:
        """Points from the axes to the title."""
        return _OVER_NOTE + (len(self.note) - 1) * _PITCHES[1]


class Panel(NamedTuple):
    """Axes with their words."""

    axes: Axes
    column: int
    title: Text
    note: Text


def plain(lines: Sequence[str]) -> str:
    """Lines of words that are not taken for a formula."""
    return "\n".join(lines).replace("$", r"\$")


def have_room(figure: Figure, panels: Sequence[Panel], scale: Axes) -> bool:
    """Whether the words of a figure that was laid out are inside it and touch nothing.

    Args:
        figure: the figure.
        panels: row by row.
        scale: of colours, right of all panels.
    """
    gap = _CLEAR * _pixels(figure)
    # Words may stand above a scale that is lower than they are.
    beyond = scale.get_tightbbox()
    for i, panel in enumerate(panels):
        left, right = _neighbours(figure, panels, i)
        below = panel.axes.xaxis.label.get_window_extent()
        for box in (panel.title.get_window_extent(), panel.note.get_window_extent(), below):
            if box.x1 + gap > right:
                return False
            if beyond is not None and box.padded(gap).overlaps(beyond):
                return False
        if below.x0 - gap < left:
            return False
    return True


def rooms(figure: Figure, panels: Sequence[Panel], scale: Axes) -> list[Room]:
    """What words may take of a figure that was laid out; none of it is above the scale."""
    found, pixels = [], _pixels(figure)
    for i, panel in enumerate(panels):
        left, right = _neighbours(figure, panels, i)
        box = panel.axes.get_window_extent()
        right = min(right, scale.get_window_extent().x0)
        middle = (box.x0 + box.x1) / 2.0
        half = min(right - middle, middle - left)
        found.append(Room((right - box.x0) / pixels - _GAP, 2.0 * (half / pixels - _GAP)))
    return found


def narrowest_cell(figure: Figure, panels: Sequence[Panel]) -> float:
    """Inches of the narrowest column of cells."""
    return min(
        panel.axes.get_window_extent().width / figure.dpi / len(panel.axes.get_xticks())
        for panel in panels
    )


def _neighbours(figure: Figure, panels: Sequence[Panel], i: int) -> tuple[float, float]:
    """Pixels at which the panel to the left ends and the one to the right begins."""
    left, right = 0.0, float(figure.bbox.x1)
    if panels[i].column > 0:
        left = float(panels[i - 1].axes.get_window_extent().x1)
    # At the end of a short row, the one of the rows above.
    after = next((one.axes for one in panels if one.column == panels[i].column + 1), None)
    if after is not None:
        numbers = after.yaxis.get_tightbbox()
        right = float(after.get_window_extent().x0 if numbers is None else numbers.x0)
    return left, right


def _pixels(figure: Figure) -> float:
    """Of a point."""
    return float(figure.dpi) / _POINTS_PER_INCH
