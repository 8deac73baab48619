"""``fedzmg list``: the tables of algorithms and tasks, and a card for each."""

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
    from fedzmg.algorithms.options import card
    from fedzmg.report.terminal import cards

    size = None if task is None else tasks.info(task).describe()["model"]["bytes"]
    console = Console()
    if name in tasks.TASKS:
        described = tasks.info(name).describe()
        shown = None if as_json else cards.task_card(described, name, console.width)
    elif name in algorithms.ALGORITHMS:
        described = card(algorithms.ALGORITHMS[name], size)
        shown = None if as_json else cards.algorithm_card(described, console.width, task)
    elif name is not None:
        known = [*algorithms.ALGORITHMS, *tasks.TASKS]
        raise unknown("algorithm or task", name, known, "fedzmg list")
    else:
        described = {
            "algorithms": {n: card(e, size) for n, e in algorithms.ALGORITHMS.items()},
            "tasks": {
                n: {"summary": e.summary, "data": e.data, "missing": e.missing}
                for n, e in tasks.TASKS.items()
            },
        }
        shown = None if as_json else cards.tables(described, console.width)
    if as_json:
        typer.echo(json.dumps(described))
    else:
        console.print(shown)
