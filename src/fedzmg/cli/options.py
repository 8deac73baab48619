"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

DEVICES = "auto, cpu or cuda."
ENGINES = "auto (measured), sequential, vectorized, compiled, cuda_graph or compiled_cuda_graph."
TRACKERS = "Show every round also to trackers, comma-separated: tensorboard, mlflow, wandb."


def opt(help: str, shown: str | bool = True, **more: Any) -> Any:
    """Declare an option; ``shown`` describes a default that depends on something else."""
    return Option(help=help, show_default=shown, **more)


def flag(name: str, help: str) -> Any:
    """Declare a switch without a negative form."""
    return Option(name, help=help)


def setting(help: str, metavar: str = "KEY=VALUE") -> Any:
    """Declare the option ``--set``, which can be given several times."""
    return Option("--set", metavar=metavar, help=help)


Texts = list[str] | None
Json = Annotated[bool, flag("--json", "Print JSON for a program to read.")]
Rounds = Annotated[int | None, opt("Instead of the task's own number of rounds.")]
Out = Annotated[Path | None, opt("Directory for results.", "under runs/")]
Device = Annotated[str, opt(DEVICES)]
Track = Annotated[str | None, opt(TRACKERS)]
Cache = Annotated[
    Path | None, opt("Data folder.", "$FEDZMG_DATA or the user's cache", metavar="DIR")
]
