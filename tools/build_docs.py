"""Write docs/algorithms.md and the README's table of algorithms from the definition cards.

python tools/build_docs.py [--check]
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path
from typing import Any

from fedzmg import tasks
from fedzmg.algorithms import ALGORITHMS
from fedzmg.algorithms.options import card
from fedzmg.results.formatting import bytes_text

ROOT = Path(__file__).parents[1]
CARDS = ROOT / "docs" / "algorithms.md"
BLOCK = re.compile(r"(<!-- algorithms -->\n).*?(<!-- /algorithms -->)", re.DOTALL)
"""Part of a page that the table of families replaces."""
TASK = "digits"
COMMON = 30
"""Algorithms that an option must have in common to be described once, at the top of the page."""


def families() -> str:
    """Return a table with one row of names per family."""
    rows: dict[str, list[str]] = {}
    for name, info in ALGORITHMS.items():
        mark = " (partly inferred)" if info.inferred else ""
        rows.setdefault(info.family, []).append(f"`{name}`{mark}")
    lines = [f"| {family} | {', '.join(names)} |" for family, names in rows.items()]
    return "\n".join(["| family | names |", "|---|---|", *lines]) + "\n"


def cards_page() -> str:
    """Return the page with a card for every algorithm."""
    size = tasks.get(TASK).model_bytes
    cards = [card(info, size) for info in ALGORITHMS.values()]
    lines = [
        "# Algorithms",
        "",
        "`fedzmg list NAME` prints the equations, options and costs of an algorithm; `python",
        "tools/build_docs.py` writes them to this page. Costs in the table are multiples of the",
        f"model ({bytes_text(size)} on `{TASK}`), per client and round, without scalars.",
        "",
        "| name | what it is | source | down | up | client keeps | server keeps |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in cards:
        costs = c["costs"]
        mark = " *(partly inferred)*" if c["inferred"] else ""
        cells = [f"{costs[k]:g}" for k in ("down", "up", "client_keeps", "server_keeps")]
        link = f"[`{c['name']}`](#{c['name'].replace(':', '')})"
        row = [link, c["summary"] + mark, c["source"], *cells]
        lines.append(f"| {' | '.join(row)} |")
    common = common_options(cards)
    lines += [
        "",
        "## Common options",
        "",
        "Each algorithm lists its defaults. An option that is absent has no effect. Almost every",
        "algorithm also takes the options of [wrappers](guide.md#compose-algorithms), such as",
        "`client.zero_mean`, `client.clip_norm` and `client.schedule`.",
        "",
    ]
    lines += ["| option | range | |", "|---|---|---|"]
    lines += [f"| {' | '.join(cells)} |" for cells in common]
    modules: dict[str, list[dict[str, Any]]] = {}
    for c in cards:
        modules.setdefault(c["about"], []).append(c)
    for about, members in modules.items():
        lines += ["", f"## {', '.join(c['name'] for c in members)}", "", "```text", about, "```"]
        for c in members:
            lines += section(c, common, alone=len(members) == 1)
    return "\n".join(lines) + "\n"


def described(option: dict[str, Any]) -> tuple[str, str, str]:
    """Return an option's cells, except for its default."""
    return f"`{option['key']}`", option["range"], option["doc"]


def common_options(cards: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the cells of options that many algorithms have."""
    counts = Counter(described(option) for c in cards for option in c["options"])
    return [cells for cells, count in counts.items() if count >= COMMON]


def section(c: dict[str, Any], common: list[tuple[str, str, str]], *, alone: bool) -> list[str]:
    """Return the options of an algorithm; without a heading if it is alone in its module."""
    summary = f"{c['summary'][0].upper()}{c['summary'][1:]}."
    lines = [] if alone else ["", f"### {c['name']}", "", summary]
    if c["inferred"]:
        lines += ["", f"**Inferred:** {c['inferred']}."]
    rows, shared = [], []
    for o in c["options"]:
        default = "absent" if o["default"] is None else f"`{o['default']}`"
        key, *others = cells = described(o)
        if cells in common:
            shared.append(f"{key} {default}")
        else:
            rows.append(f"| {key} | {default} | {' | '.join(others)} |")
    if rows:
        lines += ["", "| option | default | range | |", "|---|---|---|---|", *rows]
    if shared:
        lines += ["", f"[Common options](#common-options): {', '.join(shared)}."]
    return lines


def main() -> None:
    """Write the pages, or check that they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if out of date")
    check = parser.parse_args().check
    pages = {CARDS: cards_page()}
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        if BLOCK.search(text := path.read_text()):
            pages[path] = BLOCK.sub(rf"\g<1>{families()}\g<2>", text)
    if len(pages) == 1:
        raise SystemExit("no page has the block <!-- algorithms --> ... <!-- /algorithms -->")
    for path, text in pages.items():
        if check and path.read_text() != text:
            name = path.relative_to(ROOT)
            raise SystemExit(f"{name} is out of date: run python tools/build_docs.py")
        path.write_text(text)


if __name__ == "__main__":
    main()
