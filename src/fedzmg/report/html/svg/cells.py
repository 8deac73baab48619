"""A table of scores as shades."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from fedzmg.report.html.svg.labels import axis_names, more_below
from fedzmg.report.html.svg.parts import (
    CHARACTER,
    Frame,
    Number,
    document,
    plain,
    short,
    text,
)

_WIDE, _TALL = 58.0, 32.0
_DARK = 0.72
"""Shades above this carry light words."""


def heat_map(
    frame: Frame,
    columns: Sequence[str],
    lines: Sequence[str],
    cells: Sequence[Sequence[float | str]],
    *,
    limits: tuple[float, float],
    best: tuple[int, int] | None,
    number: Number = plain,
    falling: bool = False,
) -> Markup:
    """Draw scores; ``cells[i][j]`` belongs to ``lines[i]``, from above, and ``columns[j]``.

    Args:
        frame: words around it.
        columns: names of the columns.
        lines: names of the lines.
        cells: scores, or a sign where there is none.
        limits: scores of the lightest and the darkest shade, or the other way round.
        best: line and column of the chosen cell.
        number: writes a score.
        falling: whether less is better, and therefore darker.
    """
    left = 34.0 + CHARACTER * max(map(len, lines))
    foot = 8.0 + _TALL * len(lines)
    width, height = left + _WIDE * len(columns) + 8.0, foot + 46.0
    low, high = limits
    parts = []
    for i, line in enumerate(cells):
        top = 8.0 + _TALL * i
        parts.append(text(left - 8.0, top + _TALL / 2 + 4.0, lines[i], "end"))
        for j, value in enumerate(line):
            share = 0.0
            if not isinstance(value, str) and high > low:
                share = (high - value if falling else value - low) / (high - low)
            words = value if isinstance(value, str) else number(value)
            parts.append(
                Markup(
                    '<rect class="cell" x="{}" y="{}" width="{}" height="{}" fill-opacity="{}">'
                    "<title>{}, {}: {}</title></rect>"
                ).format(
                    short(left + _WIDE * j), short(top), short(_WIDE), short(_TALL),
                    f"{share:.2f}", columns[j], lines[i], words,
                )
            )  # fmt: skip
            shade = "mid on" if share > _DARK else "mid"
            parts.append(text(left + _WIDE * (j + 0.5), top + _TALL / 2 + 4.0, words, shade))
    if best is not None:
        i, j = best
        parts.append(
            Markup('<rect class="best" x="{}" y="{}" width="{}" height="{}"/>').format(
                short(left + _WIDE * j + 1), short(9.0 + _TALL * i), short(_WIDE - 2),
                short(_TALL - 2),
            )
        )  # fmt: skip
    for j, column in enumerate(columns):
        parts.append(text(left + _WIDE * (j + 0.5), foot + 17.0, column, "mid"))
    parts.append(axis_names(frame, (left + width) / 2.0, foot / 2.0, width, height))
    return document(frame, width, height + more_below(frame, width), parts, "any")
