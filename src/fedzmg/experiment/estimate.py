"""What a run, a grid or a study will cost, before anything runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from fedzmg import algorithms, tasks
from fedzmg.experiment.grids.grid import choosing
from fedzmg.experiment.pace import measure
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.specs.study import StudySpec
from fedzmg.models.functional import FunctionalModel
from fedzmg.simulation import Trial
from fedzmg.tasks.task import Protocol, Task
from fedzmg.tree import num_bytes

LINE_BYTES = {"run": 480, "grid": 260}
"""A line of metrics.jsonl, about."""
CHECKPOINTS = 2
"""Generations of a run's checkpoint."""


@dataclass(frozen=True)
class Estimate:
    """Counts are exact but for steps, which depend on whom the seeds draw."""

    kind: str
    task: str
    algorithms: int
    trials: int
    rounds: int
    """Of one trial."""
    evaluations: int
    """Of one trial."""
    bytes_down: int
    """Arrays to clients, all trials."""
    bytes_up: int
    disk_bytes: int
    """While it runs, client memory included where every client is visited."""
    disk_bytes_after: int
    missing: str
    """The command that brings the data here; empty if it is."""
    steps: int | None = None
    """Local steps of all clients and trials, on average over seeds; None without data."""
    seconds: float | None = None
    """On this machine, from a few measured steps; None without data."""
    device: str = ""
    engine: str = ""
    probe: str = ""
    """What was measured."""
    extrapolated: bool = False
    """Whether less than steps of a whole cohort was measured, because it would take too long."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Work:
    """What every kind of file comes down to."""

    kind: str
    names: list[tuple[str, int]]
    """Algorithm and number of its trials."""
    first: Trial
    protocol: Protocol
    evaluations: int


def estimate(spec: RunSpec | GridSpec | StudySpec, *, timed: bool = True) -> Estimate:
    """Check a specification and count what it asks for; nothing is written.

    Args:
        spec: what to run.
        timed: time a few steps, for two or three seconds, where the data is here.

    Raises:
        InputError: for the first mistake in it.
    """
    entry = tasks.info(spec.task)
    preset = entry.preset.with_options(spec.preset)
    missing = replace(entry, preset=preset).missing
    task = None
    if not missing:
        task = spec.build_task()
    work = _work(spec, preset.protocol, task)
    model = num_bytes(FunctionalModel(preset.network()).params())
    cohort, rounds = work.protocol.cohort, work.protocol.rounds
    clients = preset.clients
    down = up = during = after = 0.0
    for name, trials in work.names:
        row = algorithms.ALGORITHMS[name]
        moved = model * cohort * rounds * trials
        down, up = down + row.down * moved, up + row.up * moved
        # Two slots for every client that is ever drawn.
        memory = 2 * row.client_keeps * model * min(clients, cohort * rounds)
        state = (1 + row.server_keeps) * model
        if work.kind == "grid":
            # One algorithm at a time, and a new checkpoint beside the old.
            during = max(during, trials * (2 * state + memory))
            after += trials * work.evaluations * LINE_BYTES["grid"]
        else:
            kept = trials * (CHECKPOINTS * state + memory + rounds * LINE_BYTES["run"])
            during, after = during + kept, after + kept
    found = Estimate(
        kind=work.kind,
        task=spec.task,
        algorithms=len(work.names),
        trials=sum(trials for _, trials in work.names),
        rounds=rounds,
        evaluations=work.evaluations,
        bytes_down=round(down),
        bytes_up=round(up),
        disk_bytes=round(during + (after if work.kind == "grid" else 0)),
        disk_bytes_after=round(after),
        missing=missing,
    )
    if task is None:
        return found
    per_client = [work.protocol.batching.steps(int(n)) for n in task.train.counts]
    steps = found.trials * rounds * cohort * sum(per_client) / len(per_client)
    found = replace(found, steps=round(steps))
    return _timed(found, spec, task, work) if timed else found


def _work(spec: RunSpec | GridSpec | StudySpec, protocol: Protocol, task: Task | None) -> _Work:
    if isinstance(spec, RunSpec):
        protocol = protocol.with_options(spec.protocol)
        return _Work(
            "run", [(spec.algorithm, 1)], Trial(spec.build_algorithm(task), spec.seed), protocol,
            _evaluations(protocol.rounds, protocol.eval_every),
        )  # fmt: skip
    spec.check(task)
    names = list(spec.algorithms)
    if isinstance(spec, GridSpec):
        protocol = protocol.with_options({**spec.protocol, "rounds": spec.rounds})
        points = [spec.points(name) for name in names]
        options: dict[str, Any] = {**spec.fixed(names[0]), **points[0][len(points[0]) // 2]}
        counts = [len(each) * len(spec.seeds) for each in points]
        evaluations = spec.last + (spec.last < spec.rounds)
    else:
        given = {**spec.protocol, "rounds": spec.rounds, "eval_every": spec.eval_every}
        protocol = protocol.with_options(given)
        options = dict(spec.fixed(names[0]))
        counts = [len(spec.seeds)] * len(names)
        evaluations = _evaluations(spec.rounds, spec.eval_every)
    first = Trial(spec.configured(names[0], options, task), spec.seeds[0])
    bases = [spec.base(name) for name in names]
    return _Work(spec.kind, list(zip(bases, counts, strict=True)), first, protocol, evaluations)


def _evaluations(rounds: int, every: int) -> int:
    """How often a run is evaluated: after rounds 1, 1 + N, ... and the last.

    >>> [_evaluations(rounds, 5) for rounds in (1, 2, 6, 7)]
    [1, 2, 2, 3]
    """
    return len({*range(0, rounds, every), rounds - 1})


def _timed(
    found: Estimate, spec: RunSpec | GridSpec | StudySpec, task: Task, work: _Work
) -> Estimate:
    if isinstance(spec, GridSpec):
        task = choosing(task, spec)
    pace = measure(task, work.first, work.names[0][1], work.protocol, spec)
    seconds = (found.steps or 0) * pace.step
    seconds += found.trials * found.evaluations * task.test.size * pace.example
    return replace(
        found, seconds=seconds, device=pace.device, engine=pace.engine, probe=pace.words,
        extrapolated=pace.extrapolated,
    )  # fmt: skip
