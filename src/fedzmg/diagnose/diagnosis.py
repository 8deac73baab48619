"""``diagnose``: measure a task's model on some clients, before training and along it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedzmg.contract import Layout
from fedzmg.diagnose import clients as people
from fedzmg.diagnose.clients import Where
from fedzmg.diagnose.measure import WHOLE, Measurement, Pair, Part, measure
from fedzmg.diagnose.order import in_order_of_use
from fedzmg.diagnose.verdict import Verdict, judge
from fedzmg.errors import InputError, unknown
from fedzmg.models.initial import initial_params
from fedzmg.seeds import stream
from fedzmg.simulation import Device, RoundReport, Trial, resolve_device, simulate
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree, row

CLIENTS, EXAMPLES, DRIFTING = 50, 256, 10
LEARNING_RATE = 0.05
"""Of local steps, for a task that recommends none to FedAvg."""


@dataclass(frozen=True)
class Point:
    """One model that was looked at."""

    round: int
    measurement: Measurement
    drift: dict[str, Pair]
    """Mean squared distance of local models from their mean, plain and projected, by layer;
    empty if it was not measured or local training diverged."""

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        drift = {name: pair._asdict() for name, pair in self.drift.items()}
        return {"round": self.round, **self.measurement.as_dict(), "drift": drift}


@dataclass(frozen=True)
class Diagnosis:
    """Whether the premise of FedZMG holds for a task."""

    task: str
    total: int
    """Clients of the task; ``clients`` names those that were looked at."""
    clients: tuple[str, ...]
    examples: int
    """At most so many examples of each."""
    seed: int
    lr: float
    drifting: int
    """Clients whose local training was followed."""
    inputs: float | None
    """Share of the inputs' energy that is the mean of each example; None for token ids."""
    points: tuple[Point, ...]
    """In the order of rounds."""
    centred: Measurement | None
    """As the first point, with every input centred; None for token ids and for a trained model."""
    verdict: Verdict
    """From the first point."""

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "task": self.task,
            "total": self.total,
            "clients": list(self.clients),
            "examples": self.examples,
            "seed": self.seed,
            "lr": self.lr,
            "drifting": self.drifting,
            "inputs": self.inputs,
            "points": [point.as_dict() for point in self.points],
            "centred": None if self.centred is None else self.centred.as_dict(),
            "verdict": self.verdict.as_dict(),
        }


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
            ``module.state_dict()``; frozen parameters are always the task's own. The initial model
            of ``seed`` if not given.
        round: after how many rounds ``params`` was taken.
        clients: look at so many clients at most, drawn by ``seed``.
        examples: and at so many examples of each at most.
        drifting: follow the local training of so many of them; 0 leaves drift out.
        lr: client learning rate for local training and ``along``; by default what the task
            recommends for FedAvg, else 0.05.
        along: also train so many rounds with plain FedAvg and look again on the way.
        every: after every so many rounds of ``along``; by default a fifth of them.
        seed: draws clients and examples, initial weights, batches and cohorts.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: of models and gradients; sums are always taken in double precision.
        progress: told in words what comes next.

    Raises:
        InputError: for something else than a task, numbers out of range, or a model that does not
            belong to the task.
    """
    if not isinstance(task, Task):
        raise InputError(
            f"diagnose needs a task, not a {type(task).__name__}: make one of a model and data "
            "with fedzmg.tasks.Task.from_arrays, or take one from fedzmg.tasks.get"
        )
    _check(clients=clients, examples=examples, drifting=drifting, along=along, every=every)
    if params is not None and along:
        raise InputError(
            f"along = {along}: training starts at the initial model; give no params "
            "(a task, not a run)"
        )
    if every is not None and not along:
        raise InputError(f"every = {every}: there is no training to look at; give along, too")
    rate = _learning_rate(task) if lr is None else lr
    if not (isinstance(rate, int | float) and 0 < rate < math.inf):
        raise InputError(f"lr = {lr!r}: expected a finite number > 0")
    say = progress or _silent
    where = Where(resolve_device(device), dtype)
    drawn = people.sample(task, clients, seed)
    part, weights = people.excerpt(task, drawn, examples, seed)
    followed = stream(seed, "probe", "diagnose", "drift").permutation(drawn)
    start = initial_params(task.model, task.init, seed)
    given = start if params is None else _fitted(params, start, task)
    layout, notes = in_order_of_use(task, start)
    watcher = _Watcher(
        task, part, weights, np.sort(followed[:drifting]), where, rate, seed, layout
    )  # fmt: skip
    say("measuring gradients" + (" and drift" if drifting else ""))
    points = [watcher.look(given, round)]
    then = None
    if params is None and (other := people.centred(part)) is not None:
        say("measuring with centred inputs")
        then = measure(people.gradients(other, start, weights, where), layout)
    inputs = people.input_share(part)
    if along:
        points += _along(watcher, along, every or max(1, along // 5), say)
    return Diagnosis(
        task=task.name,
        total=len(task.train),
        clients=part.train.names,
        examples=examples,
        seed=seed,
        lr=rate,
        drifting=len(watcher.followed),
        inputs=inputs,
        points=tuple(points),
        centred=then,
        verdict=judge(points[0].measurement, inputs=inputs, centred=then, notes=notes),
    )


@dataclass(frozen=True)
class _Watcher:
    """FullPassTiming at models of one task, always through the same clients and batches."""

    task: Task
    part: Task
    weights: npt.NDArray[np.float64]
    followed: npt.NDArray[np.int64]
    where: Where
    lr: float
    seed: int
    layout: Layout
    """In the order in which layers are shown."""

    def look(self, params: Tree, round_: int) -> Point:
        found = measure(people.gradients(self.part, params, self.weights, self.where), self.layout)
        drifts: list[dict[str, float]] = []
        for project in (False, True) if len(self.followed) > 1 else ():
            moves = people.updates(
                self.task, params, self.followed, self.where,
                lr=self.lr, project=project, seed=self.seed,
            )  # fmt: skip
            drifts.append(spread_of(moves, self.layout))
        if not drifts or not all(math.isfinite(v) for one in drifts for v in one.values()):
            return Point(round_, found, {})
        plain, projected = drifts
        return Point(round_, found, {name: Pair(plain[name], projected[name]) for name in plain})


def spread_of(parts: Iterable[Part], layout: Layout) -> dict[str, float]:
    """Weighted mean squared distance of clients' models from their mean, by parameter and whole.

    Args:
        parts: how far each client moved, and its weight; see :data:`fedzmg.diagnose.measure.Part`.
        layout: names the parameters.
    """
    total = 0.0
    square = dict.fromkeys(layout, 0.0)
    mean: dict[str, Any] = dict.fromkeys(layout, 0.0)
    for moves, weights in parts:
        share = torch.from_numpy(weights)
        total += float(share.sum())
        for name, leaf in moves.items():
            flat = leaf.detach().to("cpu", torch.float64).flatten(1)
            square[name] += float(share @ flat.square().sum(1))
            mean[name] = mean[name] + share @ flat
    if total == 0.0:
        return {}
    found = {
        name: square[name] / total - float((mean[name] / total).square().sum()) for name in layout
    }
    # A difference of two large numbers can step below zero; what is not a number stays.
    found = {name: 0.0 if value < 0.0 else value for name, value in found.items()}
    return {**found, WHOLE: sum(found.values())}


def _along(watcher: _Watcher, rounds: int, every: int, say: Callable[[str], None]) -> list[Point]:
    """Points on the way of plain FedAvg, the last round included."""
    found: list[Point] = []
    task = watcher.task

    def observe(report: RoundReport) -> None:
        if report.round % every == 0 or report.round == rounds:
            say(f"round {report.round} of {rounds}")
            found.append(watcher.look(row(report.simulation.snapshot.params, 0), report.round))

    # Nothing is read from evaluations, so there is one only.
    quiet = replace(task, protocol=replace(task.protocol, eval_every=rounds))
    simulate(
        quiet, Trial.of("fedavg", watcher.seed, client_lr=watcher.lr), rounds=rounds,
        device=watcher.where.device.type,  # type: ignore[arg-type]
        dtype=watcher.where.dtype, observer=observe,
    )  # fmt: skip
    return found


def _silent(text: str) -> None:
    del text


def _learning_rate(task: Task) -> float:
    return float(task.options.get("fedavg", {}).get("client.lr", LEARNING_RATE))


def _check(**given: int | None) -> None:
    least = {"clients": 1, "examples": 1, "drifting": 0, "along": 0, "every": 1}
    for name, value in given.items():
        if value is None and name == "every":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least[name]:
            raise InputError(
                f"{name} = {value!r}: expected a whole number of at least {least[name]}"
            )


def _fitted(params: Mapping[str, Tensor], start: Tree, task: Task) -> Tree:
    """What a user calls a model of this task, with the names and the order of its own."""
    if not isinstance(params, Mapping):
        raise InputError(
            f"params is a {type(params).__name__}: give a mapping of names to tensors, such as "
            "module.state_dict()"
        )
    known = {*start, *task.model.source.state_dict()}
    for name in params:
        if name not in known:
            raise unknown("parameter in params", name, known)
    for name, leaf in start.items():
        other = params.get(name)
        if not isinstance(other, Tensor) or other.shape != leaf.shape:
            is_ = f"of shape {tuple(other.shape)}" if isinstance(other, Tensor) else "no tensor"
            raise InputError(
                f"params do not belong to this task: {name!r} is "
                f"{'missing' if other is None else is_}, expected {tuple(leaf.shape)}"
            )
    return Tree({name: params[name].detach() for name in start})
