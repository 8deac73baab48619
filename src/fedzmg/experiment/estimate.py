"""Estimated cost of a run, a grid or a study, before anything runs.

Time comes from a few measured steps, within about two seconds. One gradient of one client comes
first. If there is time, a cohort trains for a few steps; otherwise the gradient stands for the
steps of all clients, and a third of it, the forward pass, for an evaluation.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from fedzmg import algorithms, tasks
from fedzmg.data.federated import Examples, FederatedData
from fedzmg.engine.local import eager_gradient
from fedzmg.evaluation import evaluate
from fedzmg.experiment.grids.grid import choosing
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.experiment.specs.run import DTYPES, RunSpec
from fedzmg.experiment.specs.study import StudySpec
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.objective import Batch, Objective
from fedzmg.simulation import Simulation, Trial, resolve_device
from fedzmg.tasks.task import Protocol, Task
from fedzmg.tree import num_bytes

LINE_BYTES = {"run": 480, "grid": 260}
"""Approximate size of a line of metrics.jsonl."""
CHECKPOINTS = 2
"""Generations of a run's checkpoint."""
SECONDS = 2.0
"""Time limit of all measurements, as far as it can be foreseen."""
TRIALS = 8
"""Maximum number of trials that are timed together on a GPU; on a CPU it is one."""
STEPS = 2
"""Local steps of each client of the cohort that is timed."""
ROUNDS = 3
TEST_EXAMPLES = 200
FORWARD = 1 / 3
"""Share of the forward pass in the time of a gradient."""


@dataclass(frozen=True)
class Estimate:
    """Cost of an experiment; steps depend on the cohorts, all other counts are exact."""

    kind: str
    task: str
    algorithms: int
    trials: int
    rounds: int
    """Rounds of one trial."""
    evaluations: int
    """Evaluations of one trial."""
    bytes_down: int
    """Arrays to clients, all trials."""
    bytes_up: int
    disk_bytes: int
    """Disk space during training, with client memory if every client is visited."""
    disk_bytes_after: int
    missing: str
    """The command that downloads the data; empty if they are present."""
    steps: int | None = None
    """Local steps of all clients and trials, on average over seeds; None without data."""
    seconds: float | None = None
    """Time on this machine, from a few measured steps; None without data."""
    device: str = ""
    engine: str = ""
    probe: str = ""
    """Description of the measurement."""
    extrapolated: bool = False
    """True if less than a whole cohort was measured."""

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate ready for JSON."""
        return asdict(self)


class _Work(NamedTuple):
    """Trainings that a specification asks for."""

    kind: str
    names: list[tuple[str, int]]
    """Algorithm and number of its trials."""
    first: Trial
    protocol: Protocol
    evaluations: int


def estimate(spec: RunSpec | GridSpec | StudySpec, *, timed: bool = True) -> Estimate:
    """Check a specification and count its costs; nothing is written.

    Args:
        spec: the run, grid or study.
        timed: measure a few steps, for two or three seconds, if the data are present.

    Raises:
        InputError: for the first mistake in it.
    """
    entry = tasks.info(spec.task)
    preset = entry.preset.with_options(spec.preset)
    missing = replace(entry, preset=preset).missing
    task = None if missing else spec.build_task()
    work = _work(spec, preset.protocol, task)
    model = num_bytes(FunctionalModel(preset.network()).params())
    cohort, rounds = work.protocol.cohort, work.protocol.rounds
    down = up = during = after = 0.0
    for name, trials in work.names:
        row = algorithms.ALGORITHMS[name]
        moved = model * cohort * rounds * trials
        down, up = down + row.down * moved, up + row.up * moved
        # Two slots for every client that is ever sampled.
        memory = 2 * row.client_keeps * model * min(preset.clients, cohort * rounds)
        state = (1 + row.server_keeps) * model
        if work.kind == "grid":
            # One algorithm at a time, and a new checkpoint beside the old one.
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
    if not timed:
        return found
    if isinstance(spec, GridSpec):
        task = choosing(task, spec)
    pace = _measure(task, work, spec)
    seconds = (found.steps or 0) * pace.step
    seconds += found.trials * found.evaluations * task.test.size * pace.example
    return replace(
        found, seconds=seconds, device=pace.device, engine=pace.engine, probe=pace.words,
        extrapolated=pace.extrapolated,
    )  # fmt: skip


def _work(spec: RunSpec | GridSpec | StudySpec, protocol: Protocol, task: Task | None) -> _Work:
    if isinstance(spec, RunSpec):
        protocol = protocol.with_options(spec.protocol)
        trial = Trial(spec.build_algorithm(task), spec.seed)
        evaluations = _evaluations(protocol.rounds, protocol.eval_every)
        return _Work("run", [(spec.algorithm, 1)], trial, protocol, evaluations)
    spec.check(task)
    names = list(spec.algorithms)
    options: dict[str, Any] = dict(spec.fixed(names[0]))
    if isinstance(spec, GridSpec):
        protocol = protocol.with_options({**spec.protocol, "rounds": spec.rounds})
        points = [spec.points(name) for name in names]
        options |= points[0][len(points[0]) // 2]
        counts = [len(each) * len(spec.seeds) for each in points]
        evaluations = spec.last + (spec.last < spec.rounds)
    else:
        given = {**spec.protocol, "rounds": spec.rounds, "eval_every": spec.eval_every}
        protocol = protocol.with_options(given)
        counts = [len(spec.seeds)] * len(names)
        evaluations = _evaluations(spec.rounds, spec.eval_every)
    first = Trial(spec.configured(names[0], options, task), spec.seeds[0])
    bases = [spec.base(name) for name in names]
    return _Work(spec.kind, list(zip(bases, counts, strict=True)), first, protocol, evaluations)


def _evaluations(rounds: int, every: int) -> int:
    """Count the evaluations of a run: after rounds 1, 1 + N, ... and the last.

    >>> [_evaluations(rounds, 5) for rounds in (1, 2, 6, 7)]
    [1, 2, 2, 3]
    """
    return len({*range(0, rounds, every), rounds - 1})


class _Pace(NamedTuple):
    """Measured seconds."""

    step: float
    """A local step of one client."""
    example: float
    """The evaluation of one example."""
    device: str
    engine: str
    words: str
    extrapolated: bool


def _measure(task: Task, work: _Work, spec: RunSpec | GridSpec | StudySpec) -> _Pace:
    """Time training and evaluation."""
    protocol, device, dtype = work.protocol, resolve_device(spec.device), DTYPES[spec.dtype]
    objective = replace(task.objective, model=task.model.to(device, dtype))
    batch = min(protocol.batch_size, int(task.train.counts.max()))
    one = _gradient(task, objective, batch, device, dtype)
    engine = spec.engine
    if engine == "auto" and device.type == "cpu":
        engine = "vectorized"  # choosing takes longer than the whole measurement
    if ROUNDS * STEPS * protocol.cohort * one > SECONDS:
        words = f"one gradient of one client on {batch} examples"
        return _Pace(one, FORWARD * one / batch, device.type, engine, words, extrapolated=True)
    together = min(TRIALS, work.names[0][1]) if device.type == "cuda" else 1
    short = _shortened(task, protocol)
    simulation = Simulation(
        short,
        [work.first] * together,
        # Too few to compile anything, and one more than are run, because the last one evaluates.
        rounds=ROUNDS + 1,
        device=device,
        dtype=dtype,
        engine=engine,
        precision=spec.precision,
    )
    step = _rounds(simulation)
    began = time.perf_counter()
    few = Examples(*(c[:TEST_EXAMPLES] for c in task.test)).to(device, dtype)
    evaluate(simulation.snapshot.params, few, objective, task.metric, task.prepare)
    _wait(device)
    example = (time.perf_counter() - began) / together / few.size
    words = f"{STEPS} steps of {short.protocol.cohort * together} clients"
    return _Pace(step, example, device.type, simulation.choice.path, words, extrapolated=False)


def _gradient(
    task: Task, objective: Objective, examples: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Time one gradient; a fast one is repeated after it is warm."""
    x, y = Examples(*(c[:examples] for c in task.train.examples)).to(device, dtype)
    weights = torch.full((examples,), 1 / examples, dtype=dtype, device=device)
    key = torch.tensor(0, device=device) if objective.model.needs_key else ()
    params = task.model.params().map(lambda leaf: leaf.to(device, dtype))
    best, first = float("inf"), time.perf_counter()
    for _ in range(3):
        _wait(device)
        began = time.perf_counter()
        # A copy: a prepare function may work in place.
        batch = Batch(task.prepare(x.clone(), dtype), y, weights, key)
        eager_gradient(objective.train, params, batch)
        _wait(device)
        best = min(best, time.perf_counter() - began)
        if time.perf_counter() - first > SECONDS / 4:
            break
    return best


def _rounds(simulation: Simulation) -> float:
    """Time a client's step."""
    best = float("inf")
    for attempt in range(ROUNDS):
        _wait(simulation.device)
        began = time.perf_counter()
        records = simulation.run_round().records
        _wait(simulation.device)
        if attempt:  # the first one warms up, and evaluates
            steps = max(1, sum(record.steps for record in records))
            best = min(best, (time.perf_counter() - began) / steps)
    return best


def _shortened(task: Task, protocol: Protocol) -> Task:
    """Return the task with one cohort, in which every client has a few steps."""
    counts, most = task.train.counts, STEPS * protocol.batch_size
    # Clients with the most examples: those with few may have no step at all.
    chosen = np.sort(np.argsort(-counts, kind="stable")[: protocol.cohort])
    lengths = np.minimum(counts[chosen], most)
    rows = np.concatenate(
        [task.train.offsets[c] + np.arange(n) for c, n in zip(chosen, lengths, strict=True)]
    )
    picked = torch.from_numpy(rows)
    short = FederatedData(
        Examples(*(column[picked] for column in task.train.examples)),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tuple(task.train.names[c] for c in chosen),
    )
    quick = replace(protocol, cohort=len(chosen), epochs=1, eval_every=ROUNDS + 1)
    few = Examples(*(column[:2] for column in task.test))
    return replace(task, train=short, test=few, protocol=quick)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
