"""The findings of ``fedzmg theory`` on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedzmg.report.sheets.theory import Finding, number, tolerance

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


def summary(findings: Sequence[Finding], seconds: float) -> str:
    """One line about all checks."""
    verdicts = [str(finding["verdict"]) for finding in findings]
    counts = {
        "hold": sum(v == "holds" for v in verdicts),
        "fail as stated": sum(v.startswith("fails") for v in verdicts),
        "not reproduced": sum(v.startswith("not") for v in verdicts),
    }
    words = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    number_of = "1 check" if len(findings) == 1 else f"{len(findings)} checks"
    return f"{number_of} in {seconds:.0f} s: {words}"
