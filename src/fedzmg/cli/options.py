"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

DEVICES = "auto, cpu or cuda."
ENGINES = "auto (measured), sequential, vectorized, compiled, cuda_graph or compiled_cuda_graph."
TRACKERS = "Show every round also to trackers, comma-separated: tensorboard, mlflow, wandb."


def setting(help: str, metavar: str = "KEY=VALUE") -> Any:
    """Declare the option ``--set``, which can be given several times."""
    return Option("--set", metavar=metavar, help=help)


Json = Annotated[bool, Option("--json", help="Print JSON for a program to read.")]
Rounds = Annotated[int | None, Option(help="Instead of the task's own number of rounds.")]
Out = Annotated[Path | None, Option(help="Directory for results.", show_default="under runs/")]
Device = Annotated[str, Option(help=DEVICES)]
Track = Annotated[str | None, Option(help=TRACKERS)]
Cache = Annotated[
    Path | None,
    Option(metavar="DIR", help="Data folder.", show_default="$FEDZMG_DATA or the user's cache"),
]
