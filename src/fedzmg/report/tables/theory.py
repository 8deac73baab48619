"""Tables of ``fedzmg theory``; a finding is the dictionary that the command prints as JSON."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from fedzmg.report.tables.table import Cell, Column, Table
from fedzmg.results.formatting import MINUS

Finding: TypeAlias = Mapping[str, Any]
_AGREES = {True: Cell("yes"), False: Cell("no", None, "fails")}


def finding_table(finding: Finding) -> Table:
    """Make a row per line of one check."""
    columns = [
        Column("quantity", "", lambda one: one["what"] + mark(one, " ({})")),
        Column("predicted", "", itemgetter("predicted"), number),
        Column("measured", "", itemgetter("measured"), number),
        Column("tolerance", "", tolerance),
        Column("agrees", "", lambda one: _AGREES[one["agrees"]]),
    ]
    return Table.build(finding["id"], "", columns, finding["lines"])


def overview(findings: Sequence[Finding]) -> Table:
    """Make a row per check: verdict, subject and the condition under which it holds instead."""
    rows = []
    for finding in findings:
        verdict, _, instead = str(finding["verdict"]).partition("; ")
        about = str(finding["title"]) + f"; {instead}" * bool(instead)
        rows.append([str(finding["id"]), verdict, about])
    return Table.of("", ("check", "verdict", "about"), rows, words=3)


def mark(line: Mapping[str, Any], form: str) -> str:
    """Mark a number that the paper claims, or one beyond its claims; not one that we derive."""
    return "" if line["basis"] == "derived" else form.format(line["basis"])


def number(value: float) -> str:
    """Format a number with five significant digits."""
    return f"{value:.5g}".replace("-", MINUS)


def tolerance(line: Mapping[str, Any]) -> str:
    """Format the tolerance of a measured number."""
    room, rule = float(line["tolerance"]), str(line["rule"])
    if rule == "relative":
        rule = f"± {100 * room:.2g} %" if room >= 1e-4 else f"rel. {room:.0e}"
    elif rule == "near":
        rule = "exact" if room == 0 else f"± {room:.2g}"
    return rule.replace("-", MINUS)
