"""``fedzmg keep`` and ``export``: copy results and models out of a directory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from fedzmg.cli import output


def keep(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A run, study or grid, or some of them."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where the copy goes.", show_default="results/NAME")
    ] = None,
) -> None:
    """Copy results without checkpoints, logs compressed; report, diff and verify read the copy."""
    from fedzmg.experiment.keep import keep as keep_results
    from fedzmg.results.watch import Watch

    kept = keep_results(directory, out or Path("results") / directory.resolve().name)
    before, after = (_mebibytes(size) for size in (kept.bytes_before, kept.bytes))
    output.place("kept", f"{kept.path} ({kept.files} files, {after} MiB of {before})")
    output.say(*(f"{words}; keep it again when it is" for words in Watch(directory).unfinished()))


def export(
    run_directory: Annotated[Path, typer.Argument(help="A run directory.")],
    to: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="RUN/model.safetensors")
    ] = None,
) -> None:
    """Write a run's trained model as a plain state dict in safetensors."""
    from fedzmg.experiment.run_directory import export_model

    path = export_model(run_directory, to)
    typer.echo(str(path))


def _mebibytes(size: int) -> str:
    """Return a size in MiB, rounded up."""
    return f"{math.ceil(size / 2**20 * 10) / 10:.1f}"
