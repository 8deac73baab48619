"""Estimated cost of a run, a grid or a study, before anything runs.

Time comes from a few measured steps, within about two seconds. One step of one client comes first.
If there is time, a cohort trains for a few steps; otherwise the one step stands for all.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from fedzmg import algorithms, tasks
from fedzmg.data.federated import Examples, FederatedData
from fedzmg.evaluation import evaluate
from fedzmg.experiment.grids.grid import choosing
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.experiment.specs.run import DTYPES, RunSpec
from fedzmg.experiment.specs.study import StudySpec
from fedzmg.models.functional import FunctionalModel
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
    return _timed(found, work, choosing(task, spec) if isinstance(spec, GridSpec) else task, spec)


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


def _timed(
    found: Estimate, work: _Work, task: Task, spec: RunSpec | GridSpec | StudySpec
) -> Estimate:
    """Add the time, from measured training and evaluation."""
    batch = min(work.protocol.batch_size, int(task.train.counts.max()))
    together, few = 1, batch
    step, simulation = _time_steps(task, work, spec, clients=1, steps=1)
    extrapolated = ROUNDS * STEPS * work.protocol.cohort * step > SECONDS
    probe = f"one step of one client on {batch} examples"
    if not extrapolated:
        few = TEST_EXAMPLES
        if simulation.device.type == "cuda":
            together = min(TRIALS, work.names[0][1])
        clients = work.protocol.cohort
        step, simulation = _time_steps(task, work, spec, clients, STEPS, together)
        probe = f"{STEPS} steps of {simulation.task.protocol.cohort * together} clients"
    device = simulation.device
    began = time.perf_counter()
    test = Examples(*(column[:few] for column in task.test)).to(device, simulation.dtype)
    objective = replace(task.objective, model=task.model.to(device, simulation.dtype))
    evaluate(simulation.snapshot.params, test, objective, task.metric, task.prepare)
    _wait(device)
    example = (time.perf_counter() - began) / together / test.size
    seconds = (found.steps or 0) * step
    seconds += found.trials * found.evaluations * task.test.size * example
    return replace(
        found, seconds=seconds, device=device.type, engine=simulation.choice.path, probe=probe,
        extrapolated=extrapolated,
    )  # fmt: skip


def _time_steps(
    task: Task,
    work: _Work,
    spec: RunSpec | GridSpec | StudySpec,
    clients: int,
    steps: int,
    trials: int = 1,
) -> tuple[float, Simulation]:
    """Train a few rounds; return the seconds of one client's step, and the simulation."""
    device, engine = resolve_device(spec.device), spec.engine
    if engine == "auto" and device.type == "cpu":
        engine = "vectorized"  # choosing takes longer than the whole measurement
    simulation = Simulation(
        _shortened(task, work.protocol, clients, steps),
        [work.first] * trials,
        # Too few to compile anything, and one more than are run, because the last one evaluates.
        rounds=ROUNDS + 1,
        device=device,
        dtype=DTYPES[spec.dtype],
        engine=engine,
        precision=spec.precision,
    )
    best, first = float("inf"), time.perf_counter()
    for _ in range(ROUNDS):  # the first one warms up, and evaluates
        _wait(device)
        began = time.perf_counter()
        trained = sum(record.steps for record in simulation.run_round().records)
        _wait(device)
        best = min(best, (time.perf_counter() - began) / max(1, trained))
        if time.perf_counter() - first > SECONDS:
            break
    return best, simulation


def _shortened(task: Task, protocol: Protocol, clients: int, steps: int) -> Task:
    """Return the task with a few clients, each of which has a few steps."""
    counts, most = task.train.counts, steps * protocol.batch_size
    # Clients with the most examples: those with few may have no step at all.
    chosen = np.sort(np.argsort(-counts, kind="stable")[:clients])
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
    return replace(task, train=short, test=few, test_owners=None, protocol=quick)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
