"""Checkpoints of a pack of runs, which also copy what clients came to remember since the last one.

Every client has two slots, and there are three values to tell apart: the previous checkpoint's,
the newest one's and today's. The slots hold the first and the last, the newest checkpoint holds
its own. Once all rounds are done nothing is written over any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from fedzmg.data.plan import sample_cohort
from fedzmg.experiment.runs.job import Job
from fedzmg.simulation import Checkpoint, ClientMetrics, Simulation
from fedzmg.tree import named_leaves, refill, row

COPIED_BYTES = 256 << 20
"""A checkpoint is due once it has to copy this much of what a trial's clients remember."""

COPIED = "memory|"


def save(
    jobs: Sequence[Job],
    simulation: Simulation,
    before: int,
    clients: Sequence[Sequence[ClientMetrics]],
) -> None:
    """Put the checkpoints of all runs that still train in place.

    Args:
        jobs: the runs of the simulation.
        simulation: the pack as it is now.
        before: round of the last checkpoint.
        clients: how single clients did, by run.
    """
    simulation.memory.flush()
    for i, job in enumerate(jobs):
        if job.directory is not None and i not in simulation.stopped_trials:
            checkpoint, copies = simulation.checkpoint(i), _copies(simulation, i, before)
            complete = checkpoint._replace(tensors=checkpoint.tensors | copies)
            # First, so that what a checkpoint stands for is never missing beside it.
            if clients[i] and clients[i][-1].round > before:
                job.directory.save_clients(clients[i])
            job.directory.save(complete, before)
    # Only now may what the checkpoint before the last relied on be written over. What the last one
    # relies on may be written over at any time: it has copies of it.
    simulation.memory.commit(before)


def _copies(simulation: Simulation, trial: int, since: int) -> dict[str, Tensor]:
    """What the clients of the rounds since the last checkpoint remember."""
    if simulation.memory.is_empty or simulation.round == simulation.rounds:
        return {}
    protocol, seed = simulation.task.protocol, simulation.trials[trial].seed
    population = len(simulation.task.train)
    clients: set[int] = set()
    for round_ in range(since + 1, simulation.round + 1):
        cohort = sample_cohort(
            seed, round_, population, protocol.cohort, replacement=protocol.replacement
        )
        clients.update(cohort.tolist())
    named = {c: named_leaves(simulation.memory.read([(trial, c)])) for c in sorted(clients)}
    return {
        f"{COPIED}{c}|{path}": tensor[0]
        for c, each in named.items()
        for path, tensor in each.items()
    }


def is_large(simulation: Simulation, since: int) -> bool:
    """Whether a checkpoint would have so much to copy by now that it should not wait."""
    visits = (simulation.round - since) * simulation.task.protocol.cohort
    most = min(visits, len(simulation.task.train)) * simulation.memory.kept_bytes
    return most > COPIED_BYTES


def without_copies(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint of the model and the server alone."""
    own = {n: t for n, t in checkpoint.tensors.items() if not n.startswith(COPIED)}
    return checkpoint._replace(tensors=own)


def recall(jobs: Sequence[Job], simulation: Simulation) -> None:
    """Give clients what their checkpoint copied, beside what the checkpoint before relies on."""
    simulation.memory.commit(jobs[0].before)
    for i, job in enumerate(jobs):
        if job.position is None or simulation.memory.is_empty:
            continue
        copies: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in job.position.checkpoint.tensors.items():
            if name.startswith(COPIED):
                client, _, path = name.removeprefix(COPIED).partition("|")
                copies[int(client)][path] = tensor
        blank = row(simulation.memory.fresh, i)
        memories = {client: refill(blank, named) for client, named in copies.items()}
        simulation.memory.put(i, simulation.round, memories)
