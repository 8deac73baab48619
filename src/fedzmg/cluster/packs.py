"""Packs of trials in workers: submission, progress, lost workers, Ctrl-C and the time limit.

All nodes share the directory of results. A pack continues from the checkpoints there wherever it
is trained again, and the driver reads finished runs from there. A lost worker or node thus loses
the rounds since the last checkpoint, and a lost driver loses nothing.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from fedzmg import plugins
from fedzmg.cluster import worker
from fedzmg.cluster.connect import Cluster, Pool
from fedzmg.cluster.workers import LostWorker, Needs, RemoteError, RemoteTraceback
from fedzmg.errors import InputError, Interrupted
from fedzmg.experiment import training
from fedzmg.experiment.grids import search
from fedzmg.experiment.progress import PackRounds, Progress
from fedzmg.experiment.specs.files import GridSpec, StudySpec
from fedzmg.experiment.specs.plan import Plan
from fedzmg.experiment.specs.run import ResolvedRun
from fedzmg.storage.formats import file_sha256, read_json
from fedzmg.tasks.task import Task
from fedzmg.tree import num_bytes

T = TypeVar("T")
StudyPacks: TypeAlias = Mapping[str, Sequence[tuple[ResolvedRun, Path]]]
"""Runs and their directories by the label of their pack."""
WAIT_SECONDS = 0.5
STOP_SECONDS = 300.0  # time that workers may take to finish their round after Ctrl-C
MOST_LOSSES = 5  # workers that a pack may lose before it counts as their cause
SHOW_SECONDS = 120.0  # time until a network file system shows files of another machine, at most
PROCESS_BYTES = 800 * 2**20  # memory of a worker process without a task
COPIES = 4  # copies of its model that a client needs while it trains


class Job(NamedTuple):
    """Work of one worker."""

    label: str
    group: str  # label of the pack that it is a part of
    rounds: int
    function: Callable[..., RemoteError | None]
    arguments: tuple[Any, ...]
    paths: tuple[Path, ...]  # directories of results
    fact: str  # fact that their manifests have afterwards
    memory: float


@dataclass
class Packs:
    """Trains packs of trials on a cluster; with trackers, which run in the workers."""

    cluster: Cluster
    track: str | None = None
    _rounds: dict[str, PackRounds] = field(default_factory=dict)  # by pack

    def train_study(
        self, spec: StudySpec, task: Task, out: Path, packs: StudyPacks, progress: Progress,
        end: float,
    ) -> Generator[str]:  # fmt: skip
        """Train the runs of packs; yield labels in the order in which they finish."""
        done = [p for p, own in packs.items() if all(_is_finished(path) for _, path in own)]
        yield from done
        left = {label: list(own) for label, own in packs.items() if label not in done}
        needs, jobs = self.cluster.needs(spec.device), list[Job]()
        for number, (label, members) in enumerate(self._split(left, needs, spec), 1):
            runs = [(run.spec, run.trial.name) for run, _ in members]
            paths = tuple(path.absolute() for _, path in members)
            shown = label if len(members) == len(left[label]) else f"{label}, part {number}"
            work = worker.train_runs, (runs, paths, spec.stop.diverged), paths, "finished"
            jobs.append(Job(shown, label, spec.rounds, *work, pack_bytes(task, len(members), spec)))
        setup = self._setup(out / "study.toml", task)
        yield from _groups(jobs, self._train(setup, jobs, needs, progress, end))

    def train_grid(
        self, spec: GridSpec, task: Task, folders: Mapping[str, Path], progress: Progress,
        end: float, seconds: float,
    ) -> Generator[str]:  # fmt: skip
        """Train the points of algorithms, each in its folder; yield those that are finished."""
        needs, waiting = self.cluster.needs(spec.device), dict(folders)
        alone = bool(spec.search.halving)  # it compares all points
        setup = self._setup(next(iter(folders.values())).parent / "grid.toml", task)
        while waiting:  # Optuna proposes the next points when it knows the scores of the last
            chosen: list[tuple[str, list[int] | None]] = [(name, None) for name in waiting]
            if not alone:
                left = {n: search.unfinished_packs(spec, n, waiting[n], task) for n in waiting}
                parts = {(n, i): pack for n, own in left.items() for i, pack in own.items()}
                chosen = [(name, pack) for (name, _), pack in self._split(parts, needs, spec)]
            jobs = []
            for name, pack in chosen:
                label, path, trials = name, folders[name].absolute(), spec.trials(name)
                if pack is not None:
                    label, trials = f"{name}, trials from {pack[0]}", len(pack)
                    path = path / search.PACKS / f"{pack[0]}-{pack[-1]}"
                work = worker.train_search, (spec, name, pack, path, seconds)
                needed = pack_bytes(task, trials, spec)
                jobs.append(Job(label, name, spec.rounds, *work, (path,), "seconds", needed))
            trained = self._train(setup, jobs, needs, progress, end)
            finished = [name for name in waiting if name not in dict(chosen)]
            trained = trained if alone else _absorbed(folders, trained)
            for name in itertools.chain(finished, _groups(jobs, trained)):
                if name in finished or alone or spec.search.method == "grid":
                    del waiting[name]
                    yield name

    def _split(
        self, packs: Mapping[T, Sequence[Any]], needs: Needs, spec: Plan
    ) -> list[tuple[T, list[Any]]]:
        """Split packs, unless packing decides the last bits, as it does on a GPU."""
        keep = bool(needs.gpus) and spec.deterministic
        return split(packs, 0 if keep else self.cluster.workers(needs))

    def _setup(self, plan: Path, task: Task) -> worker.Setup:
        known = task.fingerprint(), self.cluster.threads, worker.versions(), plugins.loaded_files()
        return worker.Setup(*known, plan.absolute(), file_sha256(plan), self.track)

    def _train(
        self, setup: worker.Setup, jobs: Sequence[Job], needs: Needs, progress: Progress, end: float
    ) -> Iterator[Job]:
        """Train all jobs; yield each when its results are visible."""
        pending, losses, finished = dict[Any, Job](), Counter[str](), 0
        self._rounds = {job.label: (0, job.rounds, None) for job in jobs}

        def submit(job: Job) -> None:
            arguments = setup._replace(board=pool.board), job.label, *job.arguments
            pending[pool.submit(job.function, arguments, needs, job.memory)] = job

        with training.deferred_interrupt(progress) as requested, self.cluster.pool() as pool:
            try:
                for job in jobs:
                    submit(job)
                while pending:
                    ready = pool.wait(list(pending), WAIT_SECONDS)
                    self._relay(pool, progress)
                    for handle in ready:
                        job = pending.pop(handle)
                        try:
                            raise_remote(pool.result(handle))
                        except LostWorker as error:
                            losses[job.label] += 1
                            if losses[job.label] > MOST_LOSSES:
                                lost = f"{job.label} lost every worker ({error})"
                                remedy = "train fewer runs at once, or give workers more memory"
                                raise InputError(f"{lost}: {remedy}") from None
                            again = "trained again from its checkpoint"
                            progress.say(f"{job.label}: worker lost ({error}), {again}")
                            submit(job)
                            continue
                        _await_visible(job)
                        finished += 1
                        self._rounds[job.label] = (job.rounds, job.rounds, None)
                        progress.say(f"{job.label}: trained, {finished} of {len(jobs)}")
                        yield job
                    if pending and (requested.is_set() or time.monotonic() >= end):
                        _stop(pool, pending)  # workers report the rounds that they keep
                        self._relay(pool, progress)
                        begun = [one[:2] for one in self._rounds.values() if 0 < one[0] < one[1]]
                        done = min(begun, default=(0, jobs[0].rounds))
                        if requested.is_set():
                            raise Interrupted(*done)
                        raise training.TimeLimitReached(*done)
            finally:
                _stop(pool, pending)
                self._relay(pool, progress)

    def _relay(self, pool: Pool, progress: Progress) -> None:
        for label, message in pool.messages():
            if isinstance(message, str):
                progress.say(f"{label}: {message}")
            else:
                self._rounds[label] = message
        progress.show_packs(self._rounds)


def _stop(pool: Pool, pending: dict[Any, Job]) -> None:
    """Let workers finish their round and write a checkpoint; a second Ctrl-C ends the wait."""
    end, left = time.monotonic() + STOP_SECONDS, set(pending)
    pending.clear()
    while left and time.monotonic() < end:
        pool.stop()
        left -= set(pool.wait(list(left), 1.0))


def split(packs: Mapping[T, Sequence[Any]], workers: int) -> list[tuple[T, list[Any]]]:
    """Split the largest packs until every worker has one.

    >>> split({"a": [0, 1, 2], "b": [3]}, 3)
    [('a', [0, 1]), ('a', [2]), ('b', [3])]
    """
    found = [(key, list(own)) for key, own in packs.items()]
    while found and len(found) < workers:
        largest = max(range(len(found)), key=lambda i: len(found[i][1]))
        key, own = found[largest]
        if len(own) == 1:
            break
        half = -(-len(own) // 2)
        found[largest : largest + 1] = [(key, own[:half]), (key, own[half:])]
    return found


def raise_remote(found: RemoteError | None) -> None:
    """Raise the mistake that a worker found, if there is one."""
    if found is not None:
        raise found.kind(found.message) from RemoteTraceback(found.trace)


def pack_bytes(task: Task, trials: int, spec: Plan) -> float:
    """Estimate the host memory of a pack, by which Ray places it."""
    protocol = task.protocol.with_options(spec.protocol)
    data = num_bytes((task.train.examples, task.test))
    clients = spec.federation.build().participation.most_clients(protocol.cohort, len(task.train))
    return PROCESS_BYTES + data + COPIES * trials * clients * task.model_bytes


def _absorbed(folders: Mapping[str, Path], trained: Iterator[Job]) -> Iterator[Job]:
    for job in trained:
        search.absorb_pack(folders[job.group], job.paths[0])
        yield job


def _groups(jobs: Sequence[Job], finished: Iterator[Job]) -> Iterator[str]:
    """Yield a group once all of its jobs are finished."""
    left = Counter(job.group for job in jobs)
    for job in finished:
        left[job.group] -= 1
        if not left[job.group]:
            yield job.group


def _is_finished(directory: Path, fact: str = "finished") -> bool:
    path = directory / "manifest.json"
    return path.is_file() and fact in read_json(path)


def _await_visible(job: Job) -> None:
    """Wait for the manifests of a job that another machine has finished."""
    end = time.monotonic() + SHOW_SECONDS
    while hidden := [path for path in job.paths if not _is_finished(path, job.fact)]:
        if time.monotonic() > end:
            remedy = "use a file system that all nodes share"
            raise InputError(f"{hidden[0]} was trained but is not visible here: {remedy}")
        time.sleep(WAIT_SECONDS)
