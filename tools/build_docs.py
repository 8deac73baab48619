"""Write docs/algorithms.md from the definition cards, so that page and command never disagree.

python tools/build_docs.py [--check]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedzmg import tasks
from fedzmg.algorithms import ALGORITHMS
from fedzmg.algorithms.card import card
from fedzmg.results.formatting import bytes_text

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
TASK = "digits"


def render() -> str:
    """The whole page."""
    size = tasks.get(TASK).model_bytes
    cards = [card(entry, size) for entry in ALGORITHMS.values()]
    lines = [
        "# Algorithms",
        "",
        "Made by `python tools/build_docs.py` from what `fedzmg list NAME` shows. Costs are in",
        "multiples of the model, per client and round, scalars left out.",
        "",
        "| name | what it is | source | down | up | client keeps | server keeps |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in cards:
        costs = c["costs"]
        mark = " *(partly inferred)*" if c["inferred"] else ""
        cells = [f"{costs[k]:g}" for k in ("down", "up", "client_keeps", "server_keeps")]
        lines.append(
            f"| [`{c['name']}`](#{anchor(c['name'])}) | {c['summary']}{mark} | {c['source']} | "
            + " | ".join(cells)
            + " |"
        )
    families: dict[str, list[dict[str, Any]]] = {}
    for c in cards:
        families.setdefault(c["about"], []).append(c)
    for about, members in families.items():
        lines += ["", f"## {', '.join(c['name'] for c in members)}", "", "```text", about, "```"]
        for c in members:
            lines += section(c)
    return "\n".join(lines) + "\n"


def anchor(name: str) -> str:
    """The anchor that a heading of this name gets."""
    return name.replace(":", "")


def section(c: dict[str, Any]) -> list[str]:
    """One algorithm's options and costs."""
    lines = ["", f"### {c['name']}", "", f"{c['summary']}. {c['source']}."]
    if c["inferred"]:
        lines += ["", f"**Inferred:** {c['inferred']}"]
    lines += ["", "| option | default | range | |", "|---|---|---|---|"]
    for o in c["options"]:
        default = "absent" if o["default"] is None else f"`{o['default']}`"
        lines.append(f"| `{o['key']}` | {default} | {o['range']} | {o['doc']} |")
    size = {name: bytes_text(count) for name, count in c["costs"].items() if "bytes" in name}
    lines += [
        "",
        f"On `{TASK}`: {size['down_bytes']} down and {size['up_bytes']} up per client and round; a "
        f"client keeps {size['client_keeps_bytes']}, the server {size['server_keeps_bytes']} "
        "besides the model.",
    ]
    return lines


def main() -> None:
    """Write the page, or say whether it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    asked = parser.parse_args()
    page = render()
    if asked.check:
        if PAGE.read_text() != page:
            raise SystemExit("docs/algorithms.md is out of date: run python tools/build_docs.py")
    else:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
