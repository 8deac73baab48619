"""``fedzmg list``: algorithms and tasks, and the card of each."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from fedzmg.cli.options import Json
from fedzmg.errors import unknown


def list_(
    name: Annotated[
        str | None, typer.Argument(help="An algorithm or a task: show its card.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Give a card's costs in bytes for it.")] = None,
    as_json: Json = False,
) -> None:
    """Show the algorithms and tasks there are, or the card of one of them."""
    from fedzmg import algorithms, tasks
    from fedzmg.algorithms.card import card
    from fedzmg.report.terminal import cards, tables
    from fedzmg.tasks.card import card as task_card

    size = None if task is None else task_card(tasks.entry(task))["model"]["bytes"]
    if name in tasks.TASKS:
        _show_task(name, as_json=as_json)
        return
    if name is not None:
        if name not in algorithms.ALGORITHMS:
            known = [*algorithms.ALGORITHMS, *tasks.TASKS]
            raise unknown("algorithm or task", name, known, "fedzmg list")
        shown = card(algorithms.ALGORITHMS[name], size)
        if as_json:
            typer.echo(json.dumps(shown))
        else:
            console = Console()
            console.print(cards.card(shown, console.width, task), highlight=False)
        return
    if as_json:
        found = {n: card(e, size) for n, e in algorithms.ALGORITHMS.items()}
        presets = {
            n: {"summary": e.summary, "data": e.data, "missing": e.missing}
            for n, e in tasks.TASKS.items()
        }
        typer.echo(json.dumps({"algorithms": found, "tasks": presets}))
        return
    console = Console()
    rows = [
        (n, e.summary + (" (inferred)" if e.inferred else ""), e.source)
        for n, e in algorithms.ALGORITHMS.items()
    ]
    heads = ["name", "what it is", "source"]
    console.print(tables.listing(heads, rows, console.width, title="Algorithms"))
    rest = [(n, e.summary, e.missing) for n, e in tasks.TASKS.items()]
    heads = ["name", "what it is", "data to get first"]
    console.print(tables.listing(heads, rest, console.width, title="Tasks"))


def _show_task(name: str, *, as_json: bool) -> None:
    """A task's card: data, clients, model, protocol and the fields of its preset."""
    from fedzmg import tasks
    from fedzmg.report.terminal import tables
    from fedzmg.report.terminal.prose import prose
    from fedzmg.results.formatting import bytes_text
    from fedzmg.tasks.card import card

    shown = card(tasks.entry(name))
    if as_json:
        typer.echo(json.dumps(shown))
        return
    model = shown["model"]
    place = f"not here yet: {shown['missing']}" if shown["missing"] else "here"
    facts = {
        "data": "ships with fedzmg" if shown["data"] is None else f"{shown['data']} ({place})",
        "clients": f"{shown['clients']:,}",
        "model": f"{model['parameters']:,} parameters, {bytes_text(model['bytes'])}",
        "protocol": ", ".join(f"{k} {v}" for k, v in shown["protocol"].items()),
    }
    console = Console()
    console.print(f"{name}: {shown['summary']}\n", style="bold", highlight=False, markup=False)
    about = prose(shown["about"], console.width)
    console.print(about + "\n", highlight=False, markup=False)
    for what, text in facts.items():
        console.print(f"{what:<9} {text}", highlight=False, markup=False)
    if shown["fields"]:
        rows = [(f["key"], str(f["default"]), f["range"], f["doc"]) for f in shown["fields"]]
        heads = ["key", "default", "allowed", "what it is"]
        console.print()
        console.print(tables.listing(heads, rows, console.width, title="Choices (--set KEY=VALUE)"))
