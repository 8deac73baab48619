"""One run of a pack: what its directory holds, and from which round it goes on."""

from __future__ import annotations

from typing import NamedTuple

from fedzmg.engine.choose import EngineChoice
from fedzmg.errors import InputError
from fedzmg.experiment import stopping
from fedzmg.experiment.runs import manifest
from fedzmg.experiment.runs.store import Position, RunDirectory
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.stopping import Stopped
from fedzmg.experiment.work.claims import first_difference
from fedzmg.experiment.work.progress import Progress
from fedzmg.experiment.work.write_errors import named_write_errors
from fedzmg.simulation import ClientMetrics, EngineName, Record
from fedzmg.storage.formats import flat
from fedzmg.tasks.task import Task


class Job(NamedTuple):
    """A run, and what is known of it from before."""

    spec: RunSpec
    directory: RunDirectory | None
    position: Position | None
    records: list[Record]
    engine: EngineName | EngineChoice
    existed: bool = False
    clients: tuple[ClientMetrics, ...] = ()
    stopped: Stopped | None = None
    """The decision, if one was made, to train it no further from some round on."""
    name: str = ""
    """What it is called in a pack of several algorithms."""
    only_log: bool = False
    """It has finished, its checkpoints were removed, and nobody asks for its model."""

    @property
    def done(self) -> int:
        """Rounds that need not be repeated."""
        if self.only_log:
            return len(self.records)
        return 0 if self.position is None else self.position.checkpoint.round

    def complete(self, rounds: int) -> bool:
        """Whether nothing is left to train."""
        last = rounds if self.stopped is None else self.stopped.round
        return self.done >= last

    @property
    def before(self) -> int:
        """Round of the checkpoint before."""
        return 0 if self.position is None else self.position.before


def open_job(
    task: Task,
    spec: RunSpec,
    directory: RunDirectory | None,
    until: int | None = None,
    *,
    models: bool = True,
) -> Job:
    """Read what a run directory holds, if it holds this run.

    Args:
        task: the task it was made for.
        spec: the run it should hold, every default written out.
        directory: where it lies; None if nothing is kept.
        until: leave out checkpoints of later rounds.
        models: whether the model is asked for; if not, the log of a finished run is enough.

    Raises:
        InputError: if it holds another run, or one that cannot go on.
    """
    if directory is None or not directory.exists:
        return Job(spec, directory, None, [], spec.engine)
    there = directory.spec()
    if there != spec:
        difference = first_difference(flat(there.model_dump()), flat(spec.model_dump()))
        raise InputError(
            f"{directory.path} holds another run ({difference}): choose another place with --out"
        )
    facts = directory.manifest()
    lacking = [name for name in ("data_sha256", "engine", "onednn") if name not in facts]
    if lacking:
        raise InputError(
            f"{directory.path}/manifest.json lacks {lacking[0]!r}: it was made by another version; "
            "choose another place with --out"
        )
    if facts["data_sha256"] != task.train.fingerprint():
        raise InputError(
            f"{directory.path} was trained on other data than {task.name!r} holds now: choose "
            "another place with --out"
        )
    if facts.get("task_sha256", task.fingerprint()) != task.fingerprint():
        raise InputError(
            f"{directory.path} was made for another model, test set or metric than {task.name!r} "
            "has now: choose another place with --out"
        )
    records = {record.round: record for record in directory.records()}
    position = directory.position(logged=records, until=until)
    stopped = stopping.read(directory.path)
    last = task.protocol.rounds if stopped is None else stopped.round
    only_log = (
        not models
        and position is None
        and manifest.FINISHED in facts
        and all(round_ in records for round_ in range(1, last + 1))
    )
    done = last if only_log else 0 if position is None else position.checkpoint.round
    kept = [records[round_] for round_ in range(1, done + 1)]
    choice = EngineChoice(facts["engine"], "as before", facts["onednn"])
    clients = directory.clients(until=done)
    return Job(spec, directory, position, kept, choice, True, clients, stopped, only_log=only_log)


def take_job(
    task: Task,
    spec: RunSpec,
    directory: RunDirectory,
    progress: Progress,
    until: int | None = None,
    *,
    models: bool = True,
) -> Job:
    """Open a directory that this process holds, and put right what a crash left of it.

    Args:
        task: the task it was made for.
        spec: the run it should hold.
        directory: where it lies.
        progress: told of a checkpoint that cannot be used.
        until: leave out checkpoints of later rounds.
        models: whether the model is asked for.
    """
    job = open_job(task, spec, directory, until, models=models)
    if until is None and job.position is not None and job.position.rejected:
        progress.say(
            f"{job.position.rejected}: the previous checkpoint is used, from round {job.done}"
        )
    with named_write_errors(directory.path):
        directory.repair(job.position)
    return job
