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
    from fedzmg.report.terminal import cards
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
            console.print(cards.algorithm_card(shown, console.width, task))
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
    console.print(cards.listing("Algorithms", heads, rows, console.width))
    rest = [(n, e.summary, e.missing) for n, e in tasks.TASKS.items()]
    heads = ["name", "what it is", "data to get first"]
    console.print(cards.listing("Tasks", heads, rest, console.width))


def _show_task(name: str, *, as_json: bool) -> None:
    """A task's card: data, clients, model, protocol and the fields of its preset."""
    from fedzmg import tasks
    from fedzmg.report.terminal import cards
    from fedzmg.tasks.card import card

    shown = card(tasks.entry(name))
    if as_json:
        typer.echo(json.dumps(shown))
        return
    console = Console()
    console.print(cards.task_card(shown, name, console.width))
