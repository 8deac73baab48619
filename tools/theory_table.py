"""Print the findings of the theory as the Markdown table at the end of docs/theory.md.

fedzmg theory --json | python tools/theory_table.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from fedzmg.report.tables.theory import Finding, mark, number, tolerance


def markdown(findings: Sequence[Finding]) -> str:
    """Render all lines of all checks as one table."""
    rows = [("check", "what", "predicted", "measured", "tolerance", "agrees")]
    rows.append((":--", ":--", "--:", "--:", ":--", ":--"))
    for finding in findings:
        verdict = f"**{finding['title']}: {finding['verdict']}**"
        rows.append((f"**{finding['id']}**", verdict, "", "", "", ""))
        for line in finding["lines"]:
            what = line["what"].replace("|", "\\|") + mark(line, " *({})*")
            numbers = (number(line["predicted"]), number(line["measured"]), tolerance(line))
            rows.append(("", what, *numbers, "yes" if line["agrees"] else "**no**"))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    try:
        found = json.load(sys.stdin)["findings"]
    except (ValueError, KeyError, TypeError):
        raise SystemExit("theory_table.py: pipe `fedzmg theory --json` into it") from None
    print(markdown(found), end="")
