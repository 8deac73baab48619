"""Estimated cost of a run, a grid or a study, before anything runs.

Time comes from a few measured steps, within about two seconds. One step of one client comes first.
If there is time, a cohort trains for a few steps; otherwise the one step stands for all.
"""

import time
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedzmg import algorithms, tasks
from fedzmg.data.plan import LocalWork
from fedzmg.data.sampling import inclusion_probabilities
from fedzmg.evaluation import evaluate
from fedzmg.experiment.grids.grid import choosing
from fedzmg.experiment.specs.files import GridSpec, Spec
from fedzmg.experiment.specs.run import DTYPES, RunSpec
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.objective import Batch
from fedzmg.simulation import Simulation, Trial, resolve_device
from fedzmg.tasks.task import Task
from fedzmg.tree import num_bytes, row

LINE_BYTES = {"run": 480, "grid": 260}  # approximate size of a line of metrics.jsonl
SECONDS = 2.0  # time limit of all measurements, as far as it can be foreseen
TRIALS = 8  # maximum number of trials that are timed together on a GPU; on a CPU it is one
STEPS, ROUNDS, TEST_EXAMPLES, BATCH = 2, 6, 200, 1000
"""Size of the measurement: local steps of each client, rounds, evaluated examples, and the batch
size above which a batch that no client fills is not measured in full."""


def estimate(spec: Spec) -> dict[str, Any]:
    """Check a specification and return its cost, ready for JSON.

    ``rounds`` and ``evaluations`` are those of one trial to the end, other counts those of all.
    ``disk_bytes`` includes client memory if every client is visited. ``missing`` is the command
    that downloads the data; without data, the later facts are None. ``steps`` depend on the
    cohorts, and bytes on their sizes if these vary; all other counts are exact. ``probe`` describes
    the measurement; it is ``extrapolated`` if less than a whole cohort was measured.
    """
    preset = tasks.info(spec.task).with_options(spec.preset)
    task = None if preset.missing else spec.build_task()
    if task is not None:
        spec.check_participation(task)
    keys = ("rounds",) if isinstance(spec, GridSpec) else ("rounds", "eval_every")
    top = {key: getattr(spec, key) for key in keys if hasattr(spec, key)}
    protocol = preset.protocol.with_options({**spec.protocol, **top})
    participation, rounds = spec.federation.build().participation, protocol.rounds
    first, counts = _trials(spec, task, rounds)
    # A user's function is taken to keep the cohort.
    lists = participation.schedule
    cohort = protocol.cohort if lists is None else sum(map(len, lists)) / len(lists)
    # A run is evaluated after rounds 1, 1 + N, ... and the last.
    evaluations = -(-rounds // protocol.eval_every) + ((rounds - 1) % protocol.eval_every > 0)
    if isinstance(spec, GridSpec):
        evaluations = len({1, *spec.logged()})
    model = num_bytes(FunctionalModel(preset.network()).params())
    down = up = during = after = 0.0
    for name, n, trained in counts:
        row = algorithms.ALGORITHMS[name]
        moved = model * cohort * trained
        down, up = down + row.down * moved, up + row.up * moved
        # Three slots for every client that is ever sampled.
        memory = 3 * row.client_keeps * model * min(preset.clients, cohort * rounds)
        # An old and a new checkpoint lie side by side.
        state = n * (2 * (1 + row.server_keeps) * model + memory)
        if isinstance(spec, GridSpec):  # one algorithm at a time
            during = max(during, state)
            after += trained / rounds * evaluations * LINE_BYTES["grid"]
        else:
            after += state + n * rounds * LINE_BYTES["run"]
    found: dict[str, Any] = {
        "kind": getattr(spec, "kind", "run"), "task": spec.task, "algorithms": len(counts),
        "trials": sum(n for _, n, _ in counts), "rounds": rounds,
        "trial_rounds": sum(trained for _, _, trained in counts), "evaluations": evaluations,
        "bytes_down": round(down), "bytes_up": round(up), "disk_bytes": round(during + after),
        "disk_bytes_after": round(after), "missing": preset.missing,
        **dict.fromkeys(("steps", "seconds", "device", "engine", "probe", "extrapolated")),
    }  # fmt: skip
    if task is None:
        return found
    own = LocalWork(participation, protocol.batching, first.algorithm.client.extra_epochs)
    per_client = np.array([own.steps(int(n), fmean) for n in task.train.counts])
    drawn = np.full(len(per_client), cohort / len(per_client))
    if participation.sampler == "examples" and not protocol.replacement:
        drawn = inclusion_probabilities(task.train.counts, protocol.cohort)
    steps = found["trial_rounds"] * float(drawn @ per_client)
    task = choosing(task, spec) if isinstance(spec, GridSpec) else task
    task, trials = replace(task, protocol=protocol), [first] * min(TRIALS, counts[0][1])
    evaluated = round(found["trial_rounds"] / rounds * evaluations * task.test.size)
    return {**found, "steps": round(steps), **_timed(task, spec, trials, steps, evaluated)}


def _trials(spec: Spec, task: Task | None, rounds: int) -> tuple[Trial, list[tuple[str, int, int]]]:
    """Return a trial of the first algorithm; and every algorithm, its trials and their rounds."""
    if isinstance(spec, RunSpec):
        return Trial(spec.build_algorithm(task), spec.seed), [(spec.algorithm, 1, rounds)]
    spec.check(task)
    name = next(iter(spec.algorithms))
    n, options = len(spec.seeds), spec.fixed(name)
    counts = [(base, n, n * rounds) for base in spec.bases()]
    if isinstance(spec, GridSpec):
        points = spec.points(name)
        options |= points[len(points) // 2]
        names = spec.algorithms
        counts = [(spec.base(each), spec.trials(each), spec.trial_rounds(each)) for each in names]
    return Trial(spec.configured(name, options, task), spec.seeds[0]), counts


def _timed(
    task: Task, spec: Spec, trials: list[Trial], steps: float, evaluated: int
) -> dict[str, Any]:
    """Measure training and evaluation; return the time of local steps and evaluated examples."""
    cohort, size, largest = task.protocol.cohort, task.protocol.batch_size, task.train.counts.max()
    few, measured = min(size, int(largest)), min(size, max(BATCH, int(largest)))
    # A batch is padded to its full size, which takes time in proportion.
    steps *= size / measured
    task = replace(task, protocol=replace(task.protocol, batch_size=measured))
    probe = f"one step of one client on {few} examples"
    step, simulation = _time_steps(task, spec, trials[:1], clients=1, steps=1)
    extrapolated = 2 * STEPS * cohort * step > SECONDS
    if not extrapolated:
        few = TEST_EXAMPLES
        trials = trials[: TRIALS if simulation.device.type == "cuda" else 1]
        step, simulation = _time_steps(task, spec, trials, cohort, STEPS)
        probe = f"{STEPS} steps of {simulation.task.protocol.cohort * len(trials)} clients"
    device = simulation.device
    test = row(task.test, slice(few)).to(device, simulation.dtype)
    objective = task.objective.to(device, simulation.dtype)
    for _ in range(2):  # the first one warms up
        began = time.perf_counter()
        evaluate(simulation.snapshot.params, test, objective, task.metric, task.prepare)
        example = (_clock(device) - began) / len(simulation.trials) / test.size
    return {
        "seconds": steps * step + evaluated * example, "device": device.type,
        "engine": simulation.choice.path, "probe": probe, "extrapolated": extrapolated,
    }  # fmt: skip


def _time_steps(
    task: Task, spec: Spec, trials: list[Trial], clients: int, steps: int
) -> tuple[float, Simulation]:
    """Train a few rounds of a few clients; return the seconds of a step, and the simulation."""
    device, engine = resolve_device(spec.device), spec.engine
    if engine == "auto" and device.type == "cpu":
        engine = "vectorized"  # choosing takes longer than the whole measurement
    data, protocol = task.train, task.protocol
    # Clients with the most examples: those with few may have no step at all.
    chosen = np.sort(np.argsort(-data.counts, kind="stable")[:clients])
    lengths = np.minimum(data.counts[chosen], steps * protocol.batch_size)
    rows = [data.offsets[c] + np.arange(n) for c, n in zip(chosen, lengths, strict=True)]
    quick = replace(protocol, cohort=len(chosen), epochs=1, eval_every=ROUNDS + 1)
    few, short = row(task.test, slice(2)), data.take(chosen, rows)
    simulation = Simulation(
        replace(task, train=short, test=few, test_owners=None, protocol=quick), trials,
        # Too few to compile anything, and one more than are run, because the last one evaluates.
        rounds=ROUNDS + 1, device=device, dtype=DTYPES[spec.dtype], engine=engine,
        precision=spec.precision,
    )  # fmt: skip
    best, first = float("inf"), _clock(device)
    for i in range(ROUNDS):  # the first one warms up, and evaluates
        began = _clock(device)
        trained = sum(record.steps for record in simulation.run_round().records)
        best = min(best, (_clock(device) - began) / max(1, trained))
        if i and time.perf_counter() - first > SECONDS:
            break
    return best, simulation


def step_operations(task: Task) -> int:
    """Count operations of matrix products of a client's step on a batch."""
    size, data = task.protocol.batch_size, task.train.examples
    params, x, y = task.prepared(data, torch.arange(size) % data.size)
    key: Any = torch.zeros((), dtype=torch.int64) if task.model.needs_key else ()
    batch = Batch(x, y, torch.full((size,), 1 / size), key)
    tracked = params.map(lambda leaf: leaf.detach().clone().requires_grad_())
    counter = _Counter()  # type: ignore[no-untyped-call]
    with counter:
        loss, _ = task.objective.train(tracked, batch)
        torch.autograd.grad(loss, list(tracked.values()), allow_unused=True)
    return counter.operations


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """As torch's ``FlopCounterMode``, but does not load the compiler, which takes a second."""

    operations: int = 0
    _should_skip_dynamo = classmethod(lambda _: False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils.flop_counter import flop_registry  # takes a quarter of a second

        found = func(*args, **(own := kwargs or {}))
        if formula := flop_registry.get(func._overloadpacket):
            self.operations += formula(*args, **own, out_val=found)
        return found


def _clock(device: torch.device) -> float:
    """Return the time after everything on the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
