"""The findings of ``fedzmg theory`` on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedzmg.report.tables.theory import Finding, number, tolerance
from fedzmg.report.terminal.tables import listing

_STYLES = {"holds": "green", "fails": "yellow", "not": "bold red"}


def one(finding: Finding) -> RenderableType:
    """A check as a block of a terminal: claim, setting, lines and verdict."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    # The words break where the terminal is narrow; cut off, numbers would be worth nothing.
    table.add_column("what", overflow="fold")
    for head in ("predicted", "measured", "tolerance"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("agrees", no_wrap=True)
    for line in finding["lines"]:
        agrees = "yes" if line["agrees"] else "no"
        table.add_row(
            Text(line["what"] + (" [claim]" if line["stated"] else "")),
            number(line["predicted"]), number(line["measured"]), tolerance(line),
            Text(agrees, style="" if line["agrees"] else "bold"),
        )  # fmt: skip
    style = _STYLES[finding["verdict"].split()[0]]
    return Group(
        Text(f"{finding['id']}  {finding['title']}", style="bold"),
        Text(f"claim    {finding['claim']}"),
        Text(f"setting  {finding['setting']}"),
        Text.assemble("verdict  ", (finding["verdict"], style)),
        table,
    )


def overview(findings: Sequence[Finding], width: int) -> RenderableType:
    """All checks in a table: what each is about, its verdict, and under what it holds instead.

    Args:
        findings: in their order.
        width: of the terminal.
    """
    rows = []
    for finding in findings:
        verdict, _, instead = str(finding["verdict"]).partition("; ")
        about = str(finding["title"]) + f"; {instead}" * bool(instead)
        rows.append([str(finding["id"]), verdict, about])
    return listing(("check", "verdict", "about"), rows, width)


def summary(findings: Sequence[Finding], seconds: float) -> str:
    """One line about all checks, with the names of those that do not hold."""
    kinds = {"hold": "holds", "fail as stated": "fails", "not reproduced": "not"}
    words = []
    for what, first in kinds.items():
        own = [str(one["id"]) for one in findings if str(one["verdict"]).split()[0] == first]
        named = f" ({', '.join(own)})" if first != "holds" and len(findings) > 1 else ""
        words += [f"{len(own)} {what}{named}"] if own else []
    number_of = "1 check" if len(findings) == 1 else f"{len(findings)} checks"
    return f"{number_of} in {seconds:.0f} s: {', '.join(words)}"
