"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Rounds = Annotated[int | None, typer.Option(help="Instead of the task's own number of rounds.")]
Out = Annotated[
    Path | None, typer.Option(help="Directory for results.", show_default="under runs/")
]
Cache = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Data folder.", show_default="$FEDZMG_DATA or the user's cache"
    ),
]
Track = Annotated[
    str | None,
    typer.Option(
        help="Show every round also to trackers, comma-separated: tensorboard, mlflow, wandb."
    ),
]

DEVICES = "auto, cpu or cuda."
ENGINES = "auto (measured), sequential, vectorized, compiled, cuda_graph or compiled_cuda_graph."
