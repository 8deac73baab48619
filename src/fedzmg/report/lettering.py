"""How wide words are, and words folded into lines: for charts of the page and for figures.

Figures are set in DejaVu Sans, of which these are the widths. Pages are set in what a reader's
system has; DejaVu Sans is among the widest, so what has room here has room there.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

# Advances from the space to the tilde, in thousandths of the font's size.
_PLAIN = (
    318, 401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361, 318, 337, 636, 636, 636,
    636, 636, 636, 636, 636, 636, 636, 337, 337, 838, 838, 838, 531, 1000, 684, 686, 698, 770, 632,
    575, 775, 752, 295, 295, 656, 557, 863, 748, 787, 603, 787, 695, 635, 611, 732, 684, 989, 685,
    611, 685, 390, 337, 390, 838, 500, 500, 613, 635, 550, 635, 615, 352, 635, 634, 278, 278, 579,
    278, 974, 634, 612, 635, 635, 411, 521, 392, 634, 592, 818, 592, 592, 525, 636, 337, 636, 838,
)  # fmt: skip
_BOLD = (
    348, 456, 521, 838, 696, 1002, 872, 306, 457, 457, 523, 838, 380, 415, 380, 365, 696, 696, 696,
    696, 696, 696, 696, 696, 696, 696, 400, 400, 838, 838, 838, 580, 1000, 774, 762, 734, 830, 683,
    683, 821, 837, 372, 372, 775, 637, 995, 837, 850, 733, 850, 770, 720, 682, 812, 774, 1103, 771,
    724, 725, 457, 365, 457, 838, 500, 500, 675, 716, 593, 716, 678, 435, 716, 712, 343, 343, 665,
    343, 1042, 712, 687, 716, 716, 493, 595, 478, 712, 652, 924, 645, 652, 582, 712, 365, 712, 838,
)  # fmt: skip
_LETTER, _SIGN, _FULL_WIDTH = 720, 840, 1000
"""Of what is not in the tables: a letter, any other sign, and one as wide as it is high."""


def width_of(words: str, size: float, *, bold: bool = False) -> float:
    """How wide a line of words is, in the unit of ``size``, its font's size.

    >>> round(width_of("momentum", 12.0)), round(width_of("momentum", 12.0, bold=True))
    (70, 77)
    """
    table = _BOLD if bold else _PLAIN
    return size * sum(_advance(letter, table) for letter in words) / 1000.0


def _advance(letter: str, table: Sequence[int]) -> int:
    place = ord(letter) - ord(" ")
    if 0 <= place < len(table):
        return table[place]
    if unicodedata.combining(letter):
        return 0
    if unicodedata.east_asian_width(letter) in "WF":
        return _FULL_WIDTH
    return _LETTER if letter.isalpha() else _SIGN


def widest(lines: Iterable[str], size: float, *, bold: bool = False) -> float:
    """Width of the widest line."""
    return max(width_of(line, size, bold=bold) for line in lines)


def folded(
    words: str, room: float, size: float, *, bold: bool = False, cut: bool = False
) -> tuple[str, ...]:
    """Break words at spaces into as few lines as the room allows, and these as even as possible.

    A word that is wider than the room has a line of its own, or several if it may be ``cut``.

    >>> folded("average: projection + momentum + decay", 200.0, 12.0)
    ('average: projection +', 'momentum + decay')
    """
    if width_of(words, size, bold=bold) <= room:
        return (words,)
    pieces = words.split()
    if cut:
        pieces = [part for piece in pieces for part in _cut(piece, room, size, bold)]
    lines = _filled(pieces, room, size, bold)
    while len(lines) > 1:
        # The room of which the widest line is just too wide: as many lines, but more even ones?
        narrower = _filled(pieces, widest(lines, size, bold=bold) - 1e-6, size, bold)
        if len(narrower) > len(lines):
            break
        if widest(narrower, size, bold=bold) >= widest(lines, size, bold=bold):
            break
        lines = narrower
    return tuple(lines)


def _filled(pieces: Sequence[str], room: float, size: float, bold: bool) -> list[str]:
    """Lines, each with as many pieces as it holds."""
    lines: list[str] = []
    for piece in pieces:
        longer = f"{lines[-1]} {piece}" if lines else piece
        if lines and width_of(longer, size, bold=bold) <= room:
            lines[-1] = longer
        else:
            lines.append(piece)
    return lines or [""]


def _cut(word: str, room: float, size: float, bold: bool) -> list[str]:
    """A word in parts that have room, each of at least one letter; after a sign if there is one."""
    parts = [""]
    for letter in word:
        full = parts[-1]
        if full and width_of(full + letter, size, bold=bold) > room:
            signs = [i for i, own in enumerate(full, 1) if not own.isalnum()]
            end = signs[-1] if signs else len(full)
            parts[-1:] = [full[:end], full[end:]]
        parts[-1] += letter
    return parts
