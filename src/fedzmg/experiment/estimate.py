"""What a run, a grid or a study will cost, before anything runs."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from fedzmg import algorithms, tasks
from fedzmg.data.federated import Examples, FederatedData
from fedzmg.experiment.grid import choosing
from fedzmg.experiment.plans import GridSpec, StudySpec
from fedzmg.experiment.spec import DTYPES, RunSpec
from fedzmg.models.functional import FunctionalModel
from fedzmg.simulation import Simulation, Trial, resolve_device
from fedzmg.tasks.task import Protocol, Task
from fedzmg.tree import num_bytes

PROBE_STEPS = 2
PROBE_ROUNDS = 3
PROBE_TRIALS = 8
"""Trials that are timed together at most; more of them only gain on a GPU."""
PROBE_EXAMPLES = 200
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


def estimate(spec: RunSpec | GridSpec | StudySpec, *, measure: bool = True) -> Estimate:
    """Check a specification and count what it asks for; nothing is written.

    Args:
        spec: what to run.
        measure: time a few steps where the data is here.

    Raises:
        InputError: for the first mistake in it.
    """
    entry = tasks.entry(spec.task)
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
    return _timed(found, spec, task, work) if measure else found


def _work(spec: RunSpec | GridSpec | StudySpec, protocol: Protocol, task: Task | None) -> _Work:
    if isinstance(spec, RunSpec):
        protocol = protocol.with_options(spec.protocol)
        algorithm = spec.build_algorithm(task or _Recommended(spec.task))  # type: ignore[arg-type]
        return _Work(
            "run", [(spec.algorithm, 1)], Trial(algorithm, spec.seed), protocol,
            len(range(0, protocol.rounds, protocol.eval_every)),
        )  # fmt: skip
    spec.check()
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
        evaluations = len(range(0, spec.rounds, spec.eval_every))
    first = Trial(spec.configured(names[0], options, task), spec.seeds[0])
    bases = [spec.base(name) for name in names]
    return _Work(spec.kind, list(zip(bases, counts, strict=True)), first, protocol, evaluations)


class _Recommended:
    """A task of which only the recommended options are known, since its data is not here."""

    def __init__(self, name: str) -> None:
        from fedzmg.tasks.tuned import tuned

        self.options = tuned(name)


def _timed(
    found: Estimate, spec: RunSpec | GridSpec | StudySpec, task: Task, work: _Work
) -> Estimate:
    """Time rounds of a few steps of one cohort of the first algorithm, and a small evaluation."""
    if isinstance(spec, GridSpec):
        task = choosing(task, spec)
    device = resolve_device(spec.device)
    together = min(PROBE_TRIALS if device.type == "cuda" else 1, work.names[0][1])
    engine = spec.engine
    if engine == "auto" and device.type == "cpu":
        engine = "vectorized"  # choosing takes longer than all that is timed here
    simulation = Simulation(
        _shortened(task, work.protocol),
        [work.first] * together,
        # Too few to compile anything, and one more than are run, as the last one evaluates.
        rounds=PROBE_ROUNDS + 1,
        device=device,
        dtype=DTYPES[spec.dtype],
        engine=engine,
        precision=spec.precision,
    )
    step = math.inf
    for attempt in range(PROBE_ROUNDS):
        _wait(device)
        began = time.perf_counter()
        records = simulation.run_round().records
        _wait(device)
        if attempt:  # the first one warms up, and evaluates
            steps = max(1, sum(record.steps for record in records))
            step = min(step, (time.perf_counter() - began) / steps)
    began = time.perf_counter()
    simulation.evaluate()
    _wait(device)
    example = (time.perf_counter() - began) / together / simulation.task.test.size
    seconds = (found.steps or 0) * step
    seconds += found.trials * found.evaluations * task.test.size * example
    return replace(found, seconds=seconds, device=device.type, engine=simulation.choice.path)


def _shortened(task: Task, protocol: Protocol) -> Task:
    """The task with one cohort, every client of which has a few steps to do."""
    counts, most = task.train.counts, PROBE_STEPS * protocol.batch_size
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
    few = Examples(*(column[:PROBE_EXAMPLES] for column in task.test))
    cohort = min(protocol.cohort, len(chosen))
    quick = replace(protocol, cohort=cohort, epochs=1, eval_every=PROBE_ROUNDS + 1)
    return replace(task, train=short, test=few, protocol=quick)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
