"""Tables as plain text, for objects that are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def aligned(columns: Mapping[str, Sequence[str]]) -> str:
    """Lines of a table: names at the left, numbers at the right; a column without any is left out.

    >>> print(aligned({"algorithm": ["fedzmg", "x"], "sd": ["", ""], "mean": ["0.5", "12"]}))
    algorithm  mean
    fedzmg      0.5
    x            12
    """
    shown = {head: [head, *cells] for head, cells in columns.items() if any(cells)}
    names, *numbers = (
        [cell.rjust(max(map(len, cells))) if i else cell.ljust(max(map(len, cells)))
         for cell in cells]
        for i, cells in enumerate(shown.values())
    )  # fmt: skip
    return "\n".join("  ".join(row).rstrip() for row in zip(names, *numbers, strict=True))
