"""Code that runs in worker processes: one pack of trials at a time.

Specifications arrive as values; tasks and plugins are built again from them, so a class of a
user's own file is never unpickled. Results go to the directories of the study or grid, under the
usual locks.
"""

import functools
import math
import os
import platform
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from fedzmg import plugins, trackers
from fedzmg.cluster.processes import PipeBoard
from fedzmg.cluster.ray_pool import RayBoard
from fedzmg.cluster.workers import RemoteError
from fedzmg.errors import InputError, Interrupted, UserCodeError
from fedzmg.experiment import training
from fedzmg.experiment.grids import search
from fedzmg.experiment.grids.grid import choosing
from fedzmg.experiment.progress import PackRounds, Progress
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.specs.files import GridSpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.plugins import PluginError
from fedzmg.simulation import RoundReport
from fedzmg.storage.files import write_atomic
from fedzmg.storage.formats import file_sha256
from fedzmg.storage.lock import hold, read_owner
from fedzmg.tasks.task import Task
from fedzmg.version import __version__

Board: TypeAlias = PipeBoard | RayBoard
POST_SECONDS = 1.0
ORPHAN_SECONDS = 30.0  # time that a worker of a killed driver may take to end


class Setup(NamedTuple):
    """Settings of all workers of a training."""

    task_sha256: str
    threads: int
    versions: str
    plugins: tuple[Path, ...]
    plan: Path = Path()  # plan in the shared directory of results
    plan_sha256: str = ""  # hash of the plan; empty if there is none
    track: str | None = None
    board: Board | None = None


class Posts(Progress):
    """Progress of a pack, sent to the driver now and then."""

    def __init__(self, board: Board | None, label: str) -> None:
        self._board, self.label = board, label
        self._rounds, self._posted = 0, -math.inf
        self._metric: float | None = None

    def post(self, message: str | PackRounds | None) -> None:
        """Send a text or a state of the pack; do not wait for the answer."""
        if self._board is not None:
            self._board.post(self.label, message)

    def is_stopping(self, seconds: float = 0.0) -> bool:
        return self._board is not None and self._board.stops(seconds)

    def begin(self, label: str, rounds: int, done: int) -> None:
        self._rounds = rounds
        self.post((done, rounds, None))

    def advance(self, report: RoundReport) -> None:
        if metrics := [one.metric for one in report.records if one.metric is not None]:
            self._metric = statistics.median(metrics)
        if time.monotonic() - self._posted > POST_SECONDS or report.round == self._rounds:
            self._posted = time.monotonic()
            stops = self.is_stopping()
            self.post((report.round, self._rounds, self._metric))
            if stops:
                signal.raise_signal(signal.SIGINT)  # which waits for the checkpoint

    def say(self, text: str) -> None:
        self.post(text)


def reporting(work: Callable[..., None]) -> Callable[..., RemoteError | None]:
    """Prepare a worker process, and turn a user's mistake into a value: pickling loses causes."""

    @functools.wraps(work)
    def run(setup: Setup, label: str, *arguments: Any) -> RemoteError | None:
        try:
            torch.set_num_threads(setup.threads)
            host, progress = platform.node(), Posts(setup.board, label)
            if versions() != setup.versions:
                remedy = "install the same on every node"
                raise InputError(f"{host} has {versions()}, the driver {setup.versions}: {remedy}")
            if setup.plan_sha256 and file_sha256(setup.plan) != setup.plan_sha256:
                remedy = "choose an --out on a file system that all nodes share"
                raise InputError(f"{host} does not see {setup.plan} as the driver does: {remedy}")
            for file in setup.plugins:
                plugins.load(file)
            progress.post(None)
            if not progress.is_stopping(ORPHAN_SECONDS):
                work(setup, progress, *arguments)
        except KeyboardInterrupt as stop:
            if isinstance(stop, Interrupted):
                progress.post((stop.done, stop.rounds, None))
            return RemoteError(KeyboardInterrupt, "")
        except (InputError, PluginError) as error:
            kind = next(k for k in (PluginError, UserCodeError, InputError) if isinstance(error, k))
            cause = None if kind is InputError else error.__cause__
            trace = "" if cause is None else "".join(traceback.format_exception(cause))
            return RemoteError(kind, str(error), trace)
        return None

    return run


@reporting
def train_runs(
    setup: Setup, progress: Posts, runs: Sequence[tuple[RunSpec, str]], paths: Sequence[Path],
    stop_diverged: bool,
) -> None:  # fmt: skip
    """Train the runs of a study that form a pack."""
    task = build_task(setup, runs[0][0])
    _await_orphans(paths)
    track = trackers.named(setup.track)
    with trackers.Tracking(track, setup.plan.parent, progress) as tracking:
        run_pack(
            task, [spec.resolve(task, name) for spec, name in runs], paths,
            progress=tracking, label=progress.label, models=False,
            stop=training.newly_diverged if stop_diverged else None,
        )  # fmt: skip


@reporting
def train_search(
    setup: Setup, progress: Posts, spec: GridSpec, name: str, pack: list[int] | None, path: Path,
    seconds: float,
) -> None:  # fmt: skip
    """Train one pack of an algorithm's trials in a directory of its own; None: all, with scores."""
    whole, track = build_task(setup, spec), trackers.named(setup.track)
    _await_orphans([path])
    with (
        trackers.Tracking(track, setup.plan.parent, progress, trackers.by_point(spec)) as tracking,
        hold([path], progress.say) as held,
    ):
        if pack is not None and not (path.parent / "grid.toml").is_file():
            write_atomic(path.parent / "grid.toml", setup.plan.read_bytes())
        own = search.Search(
            spec, name, choosing(whole, spec), path, tracking, math.inf, seconds, held,
            whole.test if spec.also_by_test else None,
        )  # fmt: skip
        if pack is None:
            own.run()
        else:
            own.train(pack)


def versions() -> str:
    """Describe the versions that every node must have; torch for GPUs and for CPUs are equal."""
    return f"fedzmg {__version__}, torch {torch.__version__.partition('+')[0]}"


_TASKS: dict[tuple[type, str, str, str], Task] = {}  # the task that was trained last


def build_task(setup: Setup, spec: RunSpec | GridSpec) -> Task:
    """Build the task of a specification, and check that its data are the driver's."""
    key = type(spec), spec.task, str(spec.preset), setup.task_sha256
    if key not in _TASKS:
        task = spec.build_task()
        if task.fingerprint() != setup.task_sha256:
            other = f"{platform.node()} has another {spec.task!r} than the driver"
            raise InputError(f"{other}: use the same versions and data on every node")
        _TASKS.clear()
        _TASKS[key] = task
    return _TASKS[key]


def _await_orphans(paths: Sequence[Path]) -> None:
    """Wait for workers of a killed driver, which Ray is about to end."""
    end = time.monotonic() + ORPHAN_SECONDS
    for path in paths:
        while time.monotonic() < end:
            owner = read_owner(path)
            if owner is None or owner.pid == os.getpid() or owner.is_elsewhere or owner.is_gone:
                break
            time.sleep(0.2)
