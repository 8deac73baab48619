"""``fedzmg bench``: training speed on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedzmg.cli import output
from fedzmg.cli.options import DEVICES, ENGINES, Json

ON_CPU = ("mlp",)
ON_GPU = ("cifar100", "emnist62", "shakespeare")
"""Default workloads."""


def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            help="mlp, cifar100, emnist62, shakespeare, ragged-text.",
            show_default=f"{', '.join(ON_CPU)} on a CPU; {', '.join(ON_GPU)} on a GPU",
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help=f"Comma-separated: {ENGINES}"),
    ] = "auto",
    precision: Annotated[
        str, typer.Option(help="Comma-separated: float32; on a GPU also tf32, bf16.")
    ] = "float32",
    trials: Annotated[str, typer.Option(help="Comma-separated: numbers of trials per pack.")] = "1",
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds per measurement; there are three.")
    ] = 5,
    algorithm: Annotated[str, typer.Option(help="An algorithm of 'fedzmg list'.")] = "fedzmg",
    device: Annotated[str, typer.Option(help=DEVICES)] = "auto",
    deterministic: Annotated[
        bool, typer.Option(help="On a GPU: use kernels that give the same bits in every process.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Time rounds on random data of a task's shape: speed, memory, distance to the floor."""
    from fedzmg import algorithms
    from fedzmg.bench.measure import Timing, environment, measure_all
    from fedzmg.experiment.control import named_write_errors
    from fedzmg.report.terminal import views
    from fedzmg.simulation import resolve_device
    from fedzmg.storage.formats import write_json

    if out is not None:
        output.check_file(out, "--out")
    algorithms.get(algorithm)
    target = resolve_device(device)
    console = Console(stderr=as_json)
    found: list[Timing] = []
    for timing in measure_all(
        workloads or (ON_CPU if target.type == "cpu" else ON_GPU),
        engine.split(","),
        precision.split(","),
        [int(count) if count.isdigit() else count for count in trials.split(",")],
        rounds=rounds,
        algorithm=algorithm,
        deterministic=deterministic,
        device=target,
    ):
        found.append(timing)
        output.plain(console, views.timing_line(timing.as_dict()))
    data = {"environment": environment(target), "timings": [t.as_dict() for t in found]}
    # Before the file: its disk may be full.
    if as_json:
        typer.echo(json.dumps(data))
    else:
        console.print(views.timings(data, console.width))
    if out is not None:
        with named_write_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            write_json(out, data)
