"""Storage of runs that train together, with checkpoints of client memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from fedzmg.data.plan import sample_cohort
from fedzmg.engine.choose import EngineChoice
from fedzmg.experiment import early_stopping, manifest, rules_hash
from fedzmg.experiment.early_stopping import Stopped
from fedzmg.experiment.progress import Progress
from fedzmg.experiment.run_directory import Position, RunDirectory
from fedzmg.experiment.specs.run import ResolvedRun
from fedzmg.experiment.training import TrainingStorage
from fedzmg.simulation import Checkpoint, ClientMetrics, Record, RoundReport, Simulation
from fedzmg.tree import named_leaves, refill, row

COPIED_BYTES = 256 << 20
"""Size of copied client memory at which a checkpoint is due."""

COPIED = "memory|"


class Job(NamedTuple):
    """A run and the state of its directory."""

    run: ResolvedRun
    directory: RunDirectory | None
    existed: bool = False
    position: Position | None = None
    records: Sequence[Record] = ()
    engine: EngineChoice | None = None
    """The recorded execution path."""
    clients: tuple[ClientMetrics, ...] = ()
    stopped: Stopped | None = None
    """The decision to stop it early, if there is one."""
    only_log: bool = False
    """True if it has finished without checkpoints and its model is not needed."""

    @property
    def done(self) -> int:
        """Rounds that need not be repeated."""
        if self.only_log:
            return len(self.records)
        return 0 if self.position is None else self.position.checkpoint.round

    @property
    def before(self) -> int:
        """Round of the previous checkpoint."""
        return 0 if self.position is None else self.position.before

    def complete(self, rounds: int) -> bool:
        """Return whether nothing is left to train."""
        return self.done >= (rounds if self.stopped is None else self.stopped.round)


class RunStorage(TrainingStorage):
    """Run directories of a pack; nothing is stored without them."""

    keeps_models = True

    def __init__(self, jobs: Sequence[Job], simulation: Simulation, progress: Progress) -> None:
        self._jobs, self._saved_round = list(jobs), simulation.round
        self._directories = {i: j.directory for i, j in enumerate(jobs) if j.directory is not None}
        self.path = self._directories[0].path if self._directories else None
        self.records = [list(job.records) for job in jobs]
        self.clients = [list(job.clients) for job in jobs]
        now = manifest.describe(simulation)
        for i, directory in self._directories.items():
            if not jobs[i].existed:
                directory.create(jobs[i].run.spec, now)
                continue
            facts = directory.manifest()
            for name in ("torch", "device", "threads", "platform"):
                if facts.get(name) != now[name]:
                    progress.say(
                        f"{directory.path} began with {name} {facts.get(name)} and continues with "
                        f"{now[name]}: the last bits may differ from an uninterrupted run"
                    )
            algorithm = simulation.trials[0].algorithm
            changes = rules_hash.continued(facts, algorithm, simulation.round)
            manifest.note(directory.path, **{manifest.FINISHED: None}, **changes)

    def append(self, report: RoundReport) -> RoundReport:
        simulation = report.simulation
        active = [i for i in range(len(self._jobs)) if i not in simulation.stopped_trials]
        for i in active:
            self.records[i].append(report.records[i])
            if i in self._directories:
                self._directories[i].append(report.records[i])
        every = self._jobs[0].run.spec.client_metrics_every
        is_due = every > 0 and (simulation.round - 1) % every == 0
        if is_due or simulation.round == simulation.rounds:
            found = simulation.evaluate_clients()
            for i in active:
                self.clients[i].append(found[i])
        return report

    def early_stops(self, report: RoundReport, stopped: Mapping[int, Stopped]) -> Collection[int]:
        # Decisions are written before the checkpoint of this round: after a crash in between, the
        # round is repeated and the decision stays.
        found = {
            i
            for i, job in enumerate(self._jobs)
            if job.stopped is not None and job.stopped.round == report.round
        }
        for i, decision in stopped.items():
            # An earlier decision takes effect at its own round.
            if self._jobs[i].stopped is None:
                found.add(i)
                if i in self._directories:
                    early_stopping.write(self._directories[i].path, decision)
        return sorted(found)

    def is_large(self, simulation: Simulation) -> bool:
        visits = (simulation.round - self._saved_round) * simulation.task.protocol.cohort
        clients = min(visits, len(simulation.task.train))
        return clients * simulation.memory.kept_bytes > COPIED_BYTES

    def save(self, simulation: Simulation, stopping: Collection[int]) -> None:
        before, ended = self._saved_round, simulation.round == simulation.rounds
        active = [i for i in self._directories if i not in simulation.stopped_trials]
        simulation.memory.flush()
        for i in active:
            directory, checkpoint = self._directories[i], simulation.checkpoint(i)
            # Evaluations of clients come first, so that a checkpoint never lacks them.
            if self.clients[i] and self.clients[i][-1].round > before:
                directory.save_clients(self.clients[i])
            tensors = checkpoint.tensors | _copies(simulation, i, before)
            directory.save(checkpoint._replace(tensors=tensors), before)
        # Only now may memory that the checkpoint before the last needs be overwritten. The last
        # one has copies of what it needs.
        simulation.memory.commit(before)
        self._saved_round = simulation.round
        for i in active:
            # The log alone does not tell: its last line precedes the last checkpoint.
            if ended or i in stopping:
                manifest.note(self._directories[i].path, **{manifest.FINISHED: manifest.now()})

    def note_chunk(self, simulation: Simulation) -> None:
        change = {"round": simulation.round, "chunk": simulation.chunk}
        for directory in self._directories.values():
            manifest.note_change(directory.path, "chunk_changes", change)

    def note_pack(self, simulation: Simulation) -> None:
        names = manifest.members(simulation)
        left = [i for i in range(len(self._jobs)) if i not in simulation.stopped_trials]
        change = {"round": simulation.round, "pack": [names[i] for i in left]}
        for i in self._directories.keys() & left:
            manifest.note_change(self._directories[i].path, "pack_changes", change)


def _copies(simulation: Simulation, trial: int, since: int) -> dict[str, Tensor]:
    """Copy the memory of clients that trained since the last checkpoint.

    Every client has two slots on disk and there are three values: of the previous checkpoint, of
    the newest one and of the current round. The slots hold the first and the last; the newest
    checkpoint holds its own. After the last round nothing is overwritten any more.
    """
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
    return {
        f"{COPIED}{client}|{path}": tensor[0]
        for client in sorted(clients)
        for path, tensor in named_leaves(simulation.memory.read([(trial, client)])).items()
    }


def without_copies(position: Position) -> Checkpoint:
    """Return a checkpoint of the model and the server alone."""
    tensors = position.checkpoint.tensors
    own = {n: t for n, t in tensors.items() if not n.startswith(COPIED)}
    return position.checkpoint._replace(tensors=own)


def restore_memory(jobs: Sequence[Job], simulation: Simulation) -> None:
    """Restore the client memory that checkpoints hold; keep what the previous ones need."""
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
