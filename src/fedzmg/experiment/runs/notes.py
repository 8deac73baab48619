"""What the manifests of a pack's runs say that came to light later: widths, neighbours, rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from fedzmg.experiment.runs import manifest, rules
from fedzmg.experiment.runs.job import Job
from fedzmg.experiment.runs.store import RunDirectory
from fedzmg.experiment.work.progress import Progress
from fedzmg.simulation import Simulation
from fedzmg.tasks.task import Task


def recorded_chunk(task: Task, jobs: Sequence[Job]) -> int | None:
    """How many clients of this pack trained at once before; None: to be measured.

    On a GPU another number would be other widths, and other widths move the last bits.
    """
    if not jobs[0].existed or jobs[0].directory is None:
        return None
    facts = jobs[0].directory.manifest()
    changes = facts.get("chunk_changes", [])
    return changes[-1]["chunk"] if changes else manifest.chunk(facts, task, len(jobs))


def note_chunk(jobs: Sequence[Job], round_: int, chunk: int | None) -> None:
    """Record in the manifests that widths, and so the last bits, changed from a round on."""
    for job in jobs:
        if job.directory is not None:
            facts = job.directory.manifest()
            changes = [*facts.get("chunk_changes", []), {"round": round_, "chunk": chunk}]
            job.directory.note({**facts, "chunk_changes": changes})


def note_pack(jobs: Sequence[Job], simulation: Simulation) -> None:
    """Record in the manifests of runs that go on who still trains beside them, and since when."""
    left = [i for i in range(len(jobs)) if i not in simulation.stopped_trials]
    names = manifest.members(simulation)
    change = {"round": simulation.round, "pack": [names[i] for i in left]}
    for i in left:
        directory = jobs[i].directory
        if directory is not None:
            facts = directory.manifest()
            before = [c for c in facts.get("pack_changes", []) if c["round"] < simulation.round]
            directory.note({**facts, "pack_changes": [*before, change]})


def note_finished(jobs: Iterable[Job]) -> None:
    """Record that nothing is left to train and that the last checkpoints are written.

    A log alone does not say so: its last line comes before the last checkpoint.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    for job in jobs:
        if job.directory is not None:
            job.directory.note({**job.directory.manifest(), manifest.FINISHED: now})


def note_unfinished(directory: RunDirectory) -> None:
    """Take back that nothing is left to train, before it is trained again."""
    facts = directory.manifest()
    if facts.pop(manifest.FINISHED, None) is not None:
        directory.note(facts)


def note_rules(directory: RunDirectory, simulation: Simulation) -> None:
    """Record by which rules a run goes on, if they are others than it began with."""
    facts = directory.manifest()
    told = rules.gone_on(facts, simulation.trials[0].algorithm, simulation.round)
    if told != facts:
        directory.note(told)


def warn_if_moved(directory: RunDirectory, simulation: Simulation, progress: Progress) -> None:
    """Say when a run goes on under circumstances that move its last bits."""
    then, now = directory.manifest(), manifest.describe(simulation)
    for fact in ("torch", "device", "threads", "platform"):
        if then.get(fact) != now[fact]:
            progress.say(
                f"{directory.path} began with {fact} {then.get(fact)}, goes on with {now[fact]}: "
                "the last bits may differ from an uninterrupted run"
            )
