"""The findings of ``fedzmg theory``: their numbers for people, and all of them in Markdown.

A finding is the dictionary that the command prints as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fedzmg.results.formatting import MINUS

Finding: TypeAlias = Mapping[str, Any]


def number(value: float) -> str:
    r"""A number with as many digits as it deserves.

    >>> number(13.799966), number(-1.0225), number(9.2e-06), number(300)
    ('13.8', '\u22121.0225', '9.2e\u221206', '300')
    """
    return f"{value:.5g}".replace("-", MINUS)


def tolerance(line: Mapping[str, Any]) -> str:
    """What a measured number may differ by.

    >>> tolerance({"rule": "relative", "tolerance": 0.01})
    '± 1 %'
    """
    room = float(line["tolerance"])
    if line["rule"] == "relative":
        return f"± {100 * room:.2g} %" if room >= 1e-4 else f"rel. {room:.0e}".replace("-", MINUS)
    if line["rule"] == "near":
        return "exact" if room == 0 else f"± {room:.2g}".replace("-", MINUS)
    return str(line["rule"])


def markdown(findings: Sequence[Finding]) -> str:
    """All lines of all checks as one Markdown table."""
    out = ["| check | what | predicted | measured | tolerance | agrees |",
           "|:--|:--|--:|--:|:--|:--|"]  # fmt: skip
    for finding in findings:
        out.append(
            f"| **{finding['id']}** | **{finding['title']}: {finding['verdict']}** | | | | |"
        )
        for line in finding["lines"]:
            what = line["what"].replace("|", "\\|") + (" *(claim)*" if line["stated"] else "")
            cells = [
                "", what, number(line["predicted"]), number(line["measured"]), tolerance(line),
                "yes" if line["agrees"] else "**no**",
            ]  # fmt: skip
            out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"
