"""Tables as plain text, for objects that are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def aligned(columns: Mapping[str, Sequence[str]], words: int = 1) -> str:
    """Lines of a table; a column without anything in it is left out.

    Args:
        columns: cells by head.
        words: how many columns begin at the left; numbers end at the right.

    >>> print(aligned({"algorithm": ["fedzmg", "x"], "sd": ["", ""], "mean": ["0.5", "12"]}))
    algorithm  mean
    fedzmg      0.5
    x            12
    """
    shown = [[head, *cells] for head, cells in columns.items() if any(cells)]
    widths = [max(map(len, cells)) for cells in shown]
    padded = [
        [cell.ljust(width) if i < words else cell.rjust(width) for cell in cells]
        for i, (cells, width) in enumerate(zip(shown, widths, strict=True))
    ]
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))
