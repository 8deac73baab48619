"""Names of lines outside the axes, of any length, and titles that fit their figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from matplotlib.figure import Figure

from fedzmg.report.lettering import folded, widest

_POINTS_PER_INCH = 72.0
_SIZE, _HANDLE = 7.5, 3.2
_AROUND = (_HANDLE + 2.0) * _SIZE
"""What an entry takes besides its words: the piece of a line and the gaps."""
_BETWEEN = 2.0 * _SIZE
_PITCH = 1.7 * _SIZE
_TITLE, _ROW = 11.0, 9.0
_EDGE = 14.0
BESIDE = 1.0 / 3.0
"""Names that take more than this share of a figure stand below it."""


def add_title(figure: Figure, title: str) -> None:
    """Write a title at the left, folded where the figure ends."""
    lines = folded(title, _wide(figure) - _EDGE, _TITLE, bold=True, cut=True)
    figure.suptitle(
        "\n".join(lines).replace("$", r"\$"), x=0.01, ha="left", fontsize=_TITLE,
        fontweight="bold",
    )  # fmt: skip


def add_legend_outside(figure: Figure, columns: int) -> None:
    """Name the lines right of the axes, where they cover nothing, or below if names are long.

    A figure with names below is so much higher, so that they take nothing from its axes.

    Args:
        figure: drawn, with a layout engine that leaves room for legends.
        columns: of names right of the axes.
    """
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if not labels:
        return
    plain = [str(label).replace(r"\$", "$") for label in labels]
    wide = _wide(figure)
    entry = _AROUND + widest(plain, _SIZE)
    # Names in one column begin as high as the title does.
    title = widest(figure.get_suptitle().split("\n"), _TITLE, bold=True)
    meets = columns == 1 and title + entry + _EDGE > wide
    place: Literal["outside right upper", "outside lower left"] = "outside right upper"
    if entry > BESIDE * wide or meets:
        lines = [folded(own, wide - _AROUND - _EDGE, _SIZE, cut=True) for own in plain]
        columns = max(1, int((wide - _EDGE) // (_AROUND + _BETWEEN + _widest_of(lines))))
        rows = -(-len(lines) // columns) * max(map(len, lines))
        figure.set_figheight(figure.get_figheight() + (rows * _PITCH + _EDGE) / _POINTS_PER_INCH)
        labels = ["\n".join(own).replace("$", r"\$") for own in lines]
        place = "outside lower left"
    figure.legend(
        handles, labels, loc=place, fontsize=_SIZE, frameon=False, handlelength=_HANDLE,
        ncols=columns,
    )  # fmt: skip


def row_name(name: str, inches: float) -> tuple[str, ...]:
    """The lines of a name left of the axes of a figure so wide."""
    return folded(name, BESIDE * inches * _POINTS_PER_INCH, _ROW, cut=True)


def _wide(figure: Figure) -> float:
    return float(figure.get_figwidth()) * _POINTS_PER_INCH


def _widest_of(labels: Sequence[Sequence[str]]) -> float:
    return max(widest(lines, _SIZE) for lines in labels)
