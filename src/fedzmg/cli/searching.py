"""Commands that search hyper-parameters: ``grid`` and ``tune``."""

import math
import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fedzmg.cli import common, training
from fedzmg.cli.common import Device, Json, opt
from fedzmg.errors import InputError
from fedzmg.terminal.render import print_text, render


def grid(
    file: training.File, set_: training.Settings = None, out: training.FileOut = None,
    max_minutes: training.Minutes = None, on: training.On = None, track: training.Track = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Choose learning rates, or any other numbers, by a grid; heat-maps and best points."""
    from fedzmg.experiment.grids.grid import warnings
    from fedzmg.report import figures
    from fedzmg.report.tables.grids import best_points
    from fedzmg.storage.formats import read_json

    spec, task, directory = training.prepare("grid", file, set_, out)
    data = _trained(spec, task, directory, on, track, max_minutes)
    folders = {name: directory / spec.folder(name) for name in data["algorithms"]}
    manifests = [read_json(folder / "manifest.json") for folder in folders.values()]
    spent = f"{sum(one.get('seconds', 0.0) for one in manifests):,.0f} s, all trials together"
    view = partial(render, [best_points(data)])
    common.show(data, view, as_json, directory, rounds=spent, grid=directory)
    if not as_json:
        common.say(*warnings(data))
    with training.after_results(directory):
        for name, folder in folders.items():
            figures.save(figures.heat_maps(data, name), folder / "heat-map")
        written = figures.save(figures.heat_maps(data), directory / "heat-maps")
        if not as_json:
            common.print_path("figure", written[0])


def tune(
    task: training.TaskName,
    algorithms: Annotated[str, opt("Comma-separated, or all.")],
    axis: Annotated[
        list[str], opt("Values to try, or LOW..HIGH for ten a decade; several axes are combined.",
                       metavar="KEY=VALUE,VALUE,..."),
    ],
    search: Annotated[
        str, opt("grid trains every combination; optuna those that Optuna proposes.")
    ] = "grid",
    budget: Annotated[int, opt("Points that Optuna proposes.", min=1)] = 40,
    batch: Annotated[int, opt("Points that Optuna proposes at once.", min=1)] = 8,
    seeds: Annotated[int, opt("Seeds for each point: 1000, 1001, ...", min=1)] = 1,
    rounds: training.Rounds = None, set_: training.AlgorithmSettings = None,
    device: Device = "auto", out: training.Out = None, on: training.On = None,
    track: training.Track = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Search learning rates, or any other numbers; print the command that compares with them."""
    from fedzmg.api import search_spec
    from fedzmg.experiment.grids.grid import Tuned
    from fedzmg.experiment.specs.plan import named_algorithms

    axes = dict(map(_axis, axis))
    chosen, given = training.task_and_settings("tune", task, set_)
    names, _ = named_algorithms(algorithms)
    how = {"method": search, "budget": budget, "batch": batch}
    spec = search_spec(chosen, names, axes, seeds, given, rounds=rounds, device=device, search=how)
    spec.check(chosen)
    directory = out or training.default_directory(f"tune-{chosen.name}", spec)
    common.say(*chosen.notes)
    found = Tuned(_trained(spec, chosen, directory, on, track))
    common.show(found.data, lambda _: str(found), as_json, directory, grid=directory)
    line = _compare_line(task, found.data["algorithms"], set_ or [])
    if as_json:
        common.say(*found.warnings, *line)
    else:
        print_text("\n".join(line))


def _trained(
    spec: Any, task: Any, out: Path, on: str | None, track: str | None, limit: float | None = None
) -> dict[str, Any]:
    from fedzmg import trackers
    from fedzmg.experiment.grids.grid import run_grid

    more: Any = {"task": task, "max_minutes": limit}
    with training.remote_of(on, track, spec, task) as remote:
        shown, naming = None if remote else track, trackers.by_point(spec)
        with training.progress_of(task, out, shown, spec.packs(), naming=naming) as progress:
            return run_grid(spec, out, progress=progress, remote=remote, **more)


def _axis(text: str) -> tuple[str, list[float]]:
    """Parse ``client.lr=0.01,0.1`` or ``client.lr=0.01..1``, which has ten values a decade."""
    key, _, values = text.partition("=")
    try:
        if ".." not in values:
            return key.strip(), [float(value) for value in values.split(",")]
        low, high = map(float, values.split(".."))
        if not 0 < low < high < math.inf:
            raise ValueError
        steps = max(1, round(10 * math.log10(high / low)))
        spaced = [low * (high / low) ** (i / steps) for i in range(steps + 1)]
        return key.strip(), [float(f"{value:.4g}") for value in spaced]
    except ValueError:
        wanted = "KEY=NUMBER,NUMBER,... or KEY=LOW..HIGH with 0 < LOW < HIGH"
        raise InputError(f"--axis {text}: expected {wanted}") from None


def _compare_line(task: str, tuned: dict[str, Any], given: list[str]) -> list[str]:
    from fedzmg.algorithms import ALGORITHMS
    from fedzmg.experiment.grids.grid import chosen_options
    from fedzmg.plugins import options_for
    from fedzmg.storage.formats import flat

    entries = {name: own for name, own in tuned.items() if own["best"]}
    best = {name: chosen_options(name, own, own["best"]) for name, own in entries.items()}
    if not best:
        return []
    loaded = options_for(ALGORITHMS.origins.get(name) for name in best)
    kept = [text for text in given if text.startswith(("preset.", "protocol.", "federation."))]
    sets = [*kept, *(f"{key}={value}" for key, value in flat(best).items())]
    words = ["fedzmg", "compare", task, "--algorithms", ",".join(best), *loaded]
    return [shlex.join([*words, *(word for text in sets for word in ("--set", text))])]
