"""Docstrings for people: paragraphs folded to a terminal's width, equations kept whole."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from rich.cells import cell_len

SOURCE_WIDTH = 100
"""What docstrings are folded to: a line that ends early, with a full stop, was meant to end."""
_GAP = 2
"""Least blanks between an equation and what stands beside it."""
_NO_BREAK = "\N{NO-BREAK SPACE}"
"""Holds a quoted formula together while its paragraph is folded."""


def prose(text: str, width: int) -> str:
    r"""A docstring without its markup, no line wider than ``width``.

    >>> print(prose("With ``g = 0``::\n\n    w <- w - lr g         always\n\nDone.", 21))
    With g = 0:
    <BLANKLINE>
        w <- w - lr g
                   always
    <BLANKLINE>
    Done.
    """
    blocks = (_block(block, width) for block in re.split(r"\n\s*\n", text.strip("\n")))
    return "\n\n".join(block for block in blocks if block)


def _block(block: str, width: int) -> str:
    if block.startswith(" "):
        return "\n".join(part for line in block.splitlines() for part in _equation(line, width))
    return "\n".join(_folded(paragraph, width) for paragraph in _paragraphs(block))


def _paragraphs(block: str) -> Iterator[str]:
    """Paragraphs that follow each other without an empty line, each on one line."""
    lines: list[str] = []
    for line in block.splitlines():
        ended = bool(lines) and lines[-1].endswith(".")
        early = ended and len(lines[-1]) + 1 + len(line.split()[0]) <= SOURCE_WIDTH
        if early or (ended and re.match(r"[A-Z][\w ]*: ", line)):
            yield " ".join(lines)
            lines = []
        lines.append(line)
    yield " ".join(lines)


def _folded(paragraph: str, width: int) -> str:
    said = paragraph.strip()
    if said.endswith("::"):
        said = said[:-1] if said != "::" else ""
    said = re.sub(r"``(.+?)``", lambda found: found[1].replace(" ", _NO_BREAK), said)
    return textwrap.fill(said, width, break_on_hyphens=False).replace(_NO_BREAK, " ")


def _equation(line: str, width: int) -> Iterator[str]:
    """A line of equations; where it is too wide, what stands beside them moves left, or below.

    >>> list(_equation("    client:  w <- w - lr g            a step", 35))
    ['    client:  w <- w - lr g   a step']
    >>> list(_equation("    client:  w <- w - lr g      with a rate", 30))
    ['    client:  w <- w - lr g', '                   with a rate']
    """
    below: list[str] = []
    while cell_len(line) > width:
        gaps = list(re.finditer(r"(?<=\S)\s{2,}(?=\S)", line))
        if not gaps:
            break
        head, remark = line[: gaps[-1].start()], line[gaps[-1].end() :]
        if cell_len(head) + _GAP + cell_len(remark) <= width:
            line = head + remark.rjust(width - cell_len(head))
        elif len(gaps) == 1 and " " not in head.strip():
            break  # that is no remark but the equation itself, after its label
        else:
            # A further equation goes under the first, a remark to the right.
            under = " " * _start(line) + remark if head.endswith(";") else ""
            fits = under and cell_len(under) <= width
            below.insert(0, under if fits else remark.rjust(width))
            line = head
    for part in (line, *below):
        yield from _words(part, width)


def _words(line: str, width: int) -> list[str]:
    """A line that is too wide even alone, folded between its words; any other as it is."""
    if cell_len(line) <= width:
        return [line]
    held, deeper = line.replace("  ", 2 * _NO_BREAK), " " * min(_start(line), width // 2)
    folded = textwrap.wrap(held, width, subsequent_indent=deeper, break_on_hyphens=False)
    return [part.replace(_NO_BREAK, " ") for part in folded]


def _start(line: str) -> int:
    """Where the equation of a line begins, after labels such as ``client:``.

    >>> _start("    client:  w <- w - lr g")
    13
    """
    labels = re.match(r"\s*(?:\S+\s{2,})*", line)
    return 0 if labels is None else labels.end()
