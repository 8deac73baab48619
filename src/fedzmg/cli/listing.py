"""``fedzmg list``: algorithms and tasks, and a description of each."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from fedzmg.cli.options import Json
from fedzmg.errors import unknown


def list_(
    name: Annotated[str | None, typer.Argument(help="Algorithm or task to describe.")] = None,
    task: Annotated[str | None, typer.Option(help="Show costs in bytes for this task.")] = None,
    as_json: Json = False,
) -> None:
    """List algorithms and tasks, or describe one of them."""
    from fedzmg import algorithms, tasks
    from fedzmg.algorithms.card import card
    from fedzmg.report.terminal import cards, tables

    size = None if task is None else tasks.info(task).describe()["model"]["bytes"]
    console = Console()
    if name in tasks.TASKS:
        _show_task(name, console, as_json=as_json)
    elif name in algorithms.ALGORITHMS:
        shown = card(algorithms.ALGORITHMS[name], size)
        if as_json:
            typer.echo(json.dumps(shown))
        else:
            console.print(cards.card(shown, console.width, task), highlight=False)
    elif name is not None:
        known = [*algorithms.ALGORITHMS, *tasks.TASKS]
        raise unknown("algorithm or task", name, known, "fedzmg list")
    elif as_json:
        found = {n: card(e, size) for n, e in algorithms.ALGORITHMS.items()}
        presets = {
            n: {"summary": e.summary, "data": e.data, "missing": e.missing}
            for n, e in tasks.TASKS.items()
        }
        typer.echo(json.dumps({"algorithms": found, "tasks": presets}))
    else:
        rows = [
            (n, e.summary + (" (inferred)" if e.inferred else ""), e.source)
            for n, e in algorithms.ALGORITHMS.items()
        ]
        heads = ["name", "what it is", "source"]
        console.print(tables.listing(heads, rows, console.width, title="Algorithms"))
        rows = [(n, e.summary, e.missing) for n, e in tasks.TASKS.items()]
        heads = ["name", "what it is", "data to get first"]
        console.print(tables.listing(heads, rows, console.width, title="Tasks"))


def _show_task(name: str, console: Console, *, as_json: bool) -> None:
    """Print a task's data, clients, model, protocol, tuned options and fields."""
    from fedzmg import tasks
    from fedzmg.report.terminal import tables
    from fedzmg.report.terminal.prose import prose
    from fedzmg.results.formatting import bytes_text

    shown = tasks.info(name).describe()
    if as_json:
        typer.echo(json.dumps(shown))
        return
    model, tuned = shown["model"], shown["tuned"]
    state = f"not here yet: {shown['missing']}" if shown["missing"] else "here"
    facts = {
        "data": "ships with fedzmg" if shown["data"] is None else f"{shown['data']} ({state})",
        "clients": f"{shown['clients']:,}",
        "model": f"{model['parameters']:,} parameters, {bytes_text(model['bytes'])}",
        "protocol": ", ".join(f"{k} {v}" for k, v in shown["protocol"].items()),
        "tuned": f"learning rates of {len(tuned)} algorithms" if tuned
        else "no learning rates; defaults of the algorithms apply ('fedzmg grid' searches)",
    }  # fmt: skip
    console.print(f"{name}: {shown['summary']}\n", style="bold", highlight=False, markup=False)
    about = prose(shown["about"], console.width)
    console.print(about + "\n", highlight=False, markup=False)
    for what, text in facts.items():
        console.print(f"{what:<9} {text}", highlight=False, markup=False)
    listings = {
        "Options (--set KEY=VALUE)": (
            ["key", "default", "allowed", "what it is"],
            [(f["key"], str(f["default"]), f["range"], f["doc"]) for f in shown["fields"]],
        ),
        "Tuned learning rates": (
            ["algorithm", "client", "server", "source", "remark"],
            [
                (key, *(f"{row['options'][k]:.4g}" if k in row["options"] else ""
                        for k in ("client.lr", "server.lr")), row["source"], row["remark"])
                for key, row in tuned.items()
            ],
        ),
    }  # fmt: skip
    for title, (heads, rows) in listings.items():
        if rows:
            console.print()
            console.print(tables.listing(heads, rows, console.width, title=title))
