"""``diagnose``: measure a task's model on some clients, before training and along it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedzmg.diagnose.clients import (
    Where,
    centred,
    excerpt,
    gradients,
    in_order_of_use,
    input_share,
    sample,
    updates,
)
from fedzmg.diagnose.measure import Measurement, Pair, measure, spread_of
from fedzmg.diagnose.verdict import Verdict, judge
from fedzmg.errors import InputError, unknown
from fedzmg.models.initial import initial_params
from fedzmg.seeds import stream
from fedzmg.simulation import Device, RoundReport, Trial, resolve_device, simulate
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree, row

CLIENTS, EXAMPLES, DRIFTING = 50, 256, 10
LEARNING_RATE = 0.05
"""Client learning rate for a task without a tuned one for FedAvg."""


@dataclass(frozen=True)
class Point:
    """Measurement of one model."""

    round: int
    measurement: Measurement
    drift: dict[str, Pair]
    """Mean squared distance of local models from their mean, plain and projected, by layer.

    Empty if it was not measured or local training diverged."""


@dataclass(frozen=True)
class Diagnosis:
    """Evidence for or against FedZMG's premise on a task."""

    task: str
    total: int
    """Number of the task's clients; ``clients`` names those that were measured."""
    clients: tuple[str, ...]
    examples: int
    """Largest number of examples per client."""
    seed: int
    lr: float
    drifting: int
    """Number of clients whose local training was followed."""
    inputs: float | None
    """Share of the inputs' energy that is the mean of each example; None for token ids."""
    points: tuple[Point, ...]
    """Measurements in order of rounds."""
    centred: Measurement | None
    """First point with every input centred; None for token ids and for a trained model."""
    verdict: Verdict
    """Verdict on the first point."""

    def as_dict(self) -> dict[str, Any]:
        """Convert for JSON."""
        data = asdict(self)
        data["points"] = [
            {"round": point["round"], **point["measurement"], "drift": point["drift"]}
            for point in data["points"]
        ]
        return data


def diagnose(
    task: Task,
    *,
    params: Mapping[str, Tensor] | None = None,
    round: int = 0,
    clients: int = CLIENTS,
    examples: int = EXAMPLES,
    drifting: int = DRIFTING,
    lr: float | None = None,
    along: int = 0,
    every: int | None = None,
    seed: int = 0,
    device: Device = "auto",
    dtype: torch.dtype = torch.float32,
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Measure what the zero-mean projection would do to a task's clients.

    Args:
        task: a preset of ``fedzmg.tasks`` or :meth:`Task.from_arrays`.
        params: a trained model by parameter names, such as ``history.params`` or
            ``module.state_dict()``; frozen parameters are always the task's own. By default the
            initial model of ``seed``.
        round: number of rounds after which ``params`` was taken.
        clients: largest number of clients to measure, drawn by ``seed``.
        examples: largest number of examples per client.
        drifting: number of clients whose local training is followed; 0 skips drift.
        lr: client learning rate of local training and ``along``; by default the task's tuned one
            for FedAvg, else 0.05.
        along: number of rounds of plain FedAvg to train and measure.
        every: rounds of ``along`` between measurements; by default a fifth of them.
        seed: seed of clients, examples, initial weights, batches and cohorts.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: type of models and gradients; sums are always in double precision.
        progress: receives progress messages.

    Raises:
        InputError: for a wrong type, a number out of range, or a model of another task.
    """
    if not isinstance(task, Task):
        raise InputError(
            f"task is a {type(task).__name__}: use tasks.get or tasks.Task.from_arrays"
        )
    tuned = task.options.get("fedavg", {}).get("client.lr", LEARNING_RATE)
    rate = float(tuned) if lr is None else lr
    _check(clients=clients, examples=examples, drifting=drifting, along=along, every=every)
    if not (isinstance(rate, int | float) and 0 < rate < math.inf):
        raise InputError(f"lr = {lr!r}: expected a finite number > 0")
    if params is not None and along:
        raise InputError(f"along = {along}: training starts at the initial model; pass no params")
    if every is not None and not along:
        raise InputError(f"every = {every}: there is no training to measure; pass along too")
    say = progress or (lambda _: None)
    where = Where(resolve_device(device), dtype)
    drawn = sample(task, clients, seed)
    part, weights = excerpt(task, drawn, examples, seed)
    shuffled = stream(seed, "probe", "diagnose", "drift").permutation(drawn)
    followed = np.sort(shuffled[:drifting])
    start = initial_params(task.model, task.init, seed)
    given = start if params is None else _matched(params, start, task)
    layout = in_order_of_use(task, start)

    def point_of(model: Tree, at: int) -> Point:
        found = measure(gradients(part, model, weights, where), layout)
        trained = [
            updates(task, model, followed, where, lr=rate, project=project, seed=seed)
            for project in ((False, True) if len(followed) > 1 else ())
        ]
        drifts = [spread_of(parts, layout) for parts in trained]
        if not drifts or not all(math.isfinite(v) for one in drifts for v in one.values()):
            return Point(at, found, {})
        return Point(at, found, {name: Pair(*(one[name] for one in drifts)) for name in drifts[0]})

    say("measuring gradients" + (" and drift" if drifting else ""))
    points = [point_of(given, round)]
    then = None
    if params is None and (other := centred(part)) is not None:
        say("measuring with centred inputs")
        then = measure(gradients(other, start, weights, where), layout)
    inputs = input_share(part)
    if along:
        step = every or max(1, along // 5)

        def observe(report: RoundReport) -> None:
            if report.round % step == 0 or report.round == along:
                say(f"round {report.round} of {along}")
                points.append(point_of(row(report.simulation.snapshot.params, 0), report.round))

        # Evaluations are not used: one suffices.
        quiet = replace(task, protocol=replace(task.protocol, eval_every=along))
        simulate(quiet, Trial.of("fedavg", seed, client_lr=rate), rounds=along,
                 device=where.device.type,  # type: ignore[arg-type]
                 dtype=dtype, observer=observe)  # fmt: skip
    return Diagnosis(
        task=task.name,
        total=len(task.train),
        clients=part.train.names,
        examples=examples,
        seed=seed,
        lr=rate,
        drifting=len(followed),
        inputs=inputs,
        points=tuple(points),
        centred=then,
        verdict=judge(points[0].measurement, inputs=inputs, centred=then),
    )


def _check(**given: int | None) -> None:
    for name, value in given.items():
        least = 0 if name in ("drifting", "along") else 1
        if value is not None and (not isinstance(value, int) or value < least):
            raise InputError(f"{name} = {value!r}: expected a whole number of at least {least}")


def _matched(params: Mapping[str, Tensor], start: Tree, task: Task) -> Tree:
    """Check a user's model, and order its parameters like the task's own."""
    if not isinstance(params, Mapping):
        raise InputError(f"params is a {type(params).__name__}: pass module.state_dict()")
    known = {*start, *task.model.source.state_dict()}
    for name in params:
        if name not in known:
            raise unknown("parameter in params", name, known)
    for name, leaf in start.items():
        other = params.get(name)
        shape = tuple(other.shape) if isinstance(other, Tensor) else None
        if shape != leaf.shape:
            got = other if shape is None else f"a tensor of shape {shape}"
            want = tuple(leaf.shape)
            raise InputError(f"params[{name!r}] is {got}: expected a tensor of shape {want}")
    return Tree({name: params[name].detach() for name in start})
