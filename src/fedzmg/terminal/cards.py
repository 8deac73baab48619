"""Lists and cards of algorithms, tasks and data sets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from fedzmg.report.tables.table import Table
from fedzmg.results.formatting import bytes_text
from fedzmg.terminal.render import bold, render


def tables(data: Mapping[str, Any], width: int) -> RenderableType:
    """Show the algorithms and tasks of ``fedzmg list --json``."""
    algorithms = [
        (name, card["summary"] + (" (inferred)" if card["inferred"] else ""), card["source"])
        for name, card in data["algorithms"].items()
    ]
    tasks = [(name, one["summary"], one["missing"]) for name, one in data["tasks"].items()]
    parts = [
        Table.of("Algorithms", ("name", "what it is", "source"), algorithms, words=3),
        Table.of("Tasks", ("name", "what it is", "data to get first"), tasks, words=3),
    ]
    return render(parts, width)


def algorithm_card(data: Mapping[str, Any], width: int, task: str | None = None) -> RenderableType:
    """Show the card that :func:`fedzmg.algorithms.options` makes."""
    options = [
        (o["key"], "absent" if o["default"] is None else str(o["default"]), o["range"], o["doc"])
        for o in data["options"]
    ]
    heads = ("key", "default", "range", "what it is")
    costs = []
    for name, what in {
        "down": "travels to a client, every round",
        "up": "travels back",
        "client_keeps": "kept by a client between rounds",
        "server_keeps": "kept by the server besides the model",
    }.items():
        size = [bytes_text(data["costs"][f"{name}_bytes"])] if task else []
        costs.append([what, f"{data['costs'][name]:g}", *size])
    parts = [
        bold(f"{data['name']}  ({data['source']})"),
        data["summary"],
        f"inferred: {data['inferred']}" if data["inferred"] else None,
        Text(f"\n{prose(data['about'], width)}\n"),
        Table.of("Options (--set KEY=VALUE)", heads, options, 4),
        *([f"also: {', '.join(own)}", ""] if (own := data["wrapper_options"]) else []),
        Table.of("Costs, scalars left out", ("", "models", *([task] if task else [])), costs),
    ]
    return render(parts, width)


def task_card(data: Mapping[str, Any], name: str, width: int) -> RenderableType:
    """Show the card that :meth:`fedzmg.tasks.Preset.describe` makes."""
    model, tuned = data["model"], data["tuned"]
    state = f"not here yet: {data['missing']}" if data["missing"] else "here"
    facts = {
        "data": "ships with fedzmg" if data["data"] is None else f"{data['data']} ({state})",
        "clients": f"{data['clients']:,}",
        "model": f"{model['parameters']:,} parameters, {bytes_text(model['bytes'])}",
        "protocol": ", ".join(f"{k} {v}" for k, v in data["protocol"].items()),
        "tuned": f"learning rates of {len(tuned)} algorithms" if tuned
        else "no learning rates; defaults of the algorithms apply ('fedzmg grid' searches)",
    }  # fmt: skip
    parts: list[Any] = [bold(f"{name}: {data['summary']}"), "", Text(prose(data["about"], width))]
    parts += ["", *(f"{what:<9} {text}" for what, text in facts.items()), ""]
    if data["fields"]:
        rows = [(f["key"], str(f["default"]), f["range"], f["doc"]) for f in data["fields"]]
        heads = ("key", "default", "allowed", "what it is")
        parts.append(Table.of("Options (--set KEY=VALUE)", heads, rows, 4))
    if tuned:
        chosen = []
        for key, row in tuned.items():
            rates = (row["options"].get(f"{side}.lr") for side in ("client", "server"))
            texts = ("" if rate is None else f"{rate:.4g}" for rate in rates)
            chosen.append((key, *texts, row["source"], row["remark"]))
        columns = ("algorithm", "client", "server", "source", "remark")
        parts.append(Table.of("Tuned learning rates", columns, chosen, 5))
    return render(parts, width)


def data_sets(found: Mapping[str, Mapping[str, Any]], width: int) -> RenderableType:
    """Show the data sets of ``fedzmg data list --json``."""
    rows = []
    for name, one in found.items():
        # Equal numbers of all splits are shown once.
        numbers = [
            " / ".join(dict.fromkeys(
                "" if split[what] is None else f"{split[what]:,}"
                for split in one["counts"].values()
            ))
            for what in ("clients", "examples")
        ]  # fmt: skip
        size = bytes_text(one["bytes"]) if one["state"] == "here" else one["state"]
        rows.append((name, one["title"], *numbers, size))
    heads = ("name", "what it is", "clients", "examples", "here")
    return render([Table.of("", heads, rows, 2)], width)


def prose(text: str, width: int) -> str:
    r"""Strip a docstring of its markup and break equations that are too wide between their parts.

    Lines of paragraphs are joined; a line that ends with a full stop ends its paragraph.

    >>> print(prose("With ``g = 0``::\n\n    w <- w - lr g         always\n\nDone.", 24))
    With g = 0:
    <BLANKLINE>
        w <- w - lr g
            always
    <BLANKLINE>
    Done.
    """
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if block.startswith(" "):
            lines = block.splitlines()
            below = [re.sub(r"(?<=\S)\s{2,}", "\n" + " " * 8, line) for line in lines]
            fitted = [a if len(a) <= width else b for a, b in zip(lines, below, strict=True)]
            blocks.append("\n".join(fitted))
        else:
            joined = re.sub(r"(?<!\.)\n", " ", re.sub(r":?:$", ":", block.replace("``", "")))
            blocks.append(joined if joined != ":" else "")
    return "\n\n".join(filter(None, blocks))
