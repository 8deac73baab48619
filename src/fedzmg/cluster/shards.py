"""One run whose cohorts are trained by the workers of a cluster, in shards.

Every worker has the examples once, and the client memory of its shards in the run directory. The
driver sends the model and receives one sum per shard. A lost worker ends the attempt; the next one
continues from the last checkpoint.
"""

import functools
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedzmg.cluster import worker
from fedzmg.cluster.connect import Cluster, RayCluster
from fedzmg.cluster.packs import MOST_LOSSES, PROCESS_BYTES, raise_remote
from fedzmg.cluster.ray_pool import fetch
from fedzmg.cluster.workers import LostWorker, RemoteError
from fedzmg.engine.client_memory import MemoryStore
from fedzmg.engine.local import Broadcast
from fedzmg.errors import InputError
from fedzmg.experiment.progress import Progress
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.specs.run import ResolvedRun, RunSpec
from fedzmg.experiment.training import build_simulation
from fedzmg.plugins import loaded_files
from fedzmg.simulation import History, Simulation
from fedzmg.simulation.shards import LocalShards, ShardPart
from fedzmg.tasks.task import Task
from fedzmg.tree import State, num_bytes


class ShardWorker:
    """Ray actor that trains some shards of every cohort."""

    def open(
        self, setup: worker.Setup, spec: RunSpec, own: Sequence[int], places: Sequence[Path] | None
    ) -> RemoteError | None:
        """Build the task and open the client memory; return a mistake of the user."""
        # Ctrl-C is the driver's, which finishes the round.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

        def build(setup: worker.Setup, _: Any) -> None:
            task = worker.build_task(setup, spec)
            task = replace(task, protocol=spec.build_protocol(task))
            self.simulation = build_simulation(task, [spec.resolve(task).trial], spec, None)
            # Opened apart: a new simulation would take files of the run back to its start.
            self.shards = LocalShards(spec.shards, own)
            self.shards.open(self.simulation.memory.fresh, len(task.train), places)
            self.simulation.memory = MemoryStore((), 0)

        return worker.reporting(build)(setup, "")

    def train(
        self, shard: int, round_: int, broadcast: Broadcast, stopped: frozenset[int]
    ) -> ShardPart | None:
        self.simulation.stopped_trials = stopped
        with self.simulation.numerics(self.simulation.choice):
            return self.shards.train_one(self.simulation, shard, round_, broadcast)

    def keep(self, round_: int) -> None:
        self.shards.keep(round_)

    def call(self, shard: int, method: str, *arguments: Any) -> Any:
        return getattr(self.shards.stores[shard], method)(*arguments)


class RemoteStore:
    """Client memory of a shard, in its worker."""

    def __init__(self, ray: Any, actor: Any, shard: int) -> None:
        self._ray, self._actor, self._shard = ray, actor, shard

    def __getattr__(self, method: str) -> Any:
        remote = functools.partial(self._actor.call.remote, self._shard, method)
        return lambda *arguments: fetch(self._ray, remote(*arguments))


class RemoteShards:
    """Shards that train in the workers of a cluster; worker ``i`` of W has the shards i, i + W."""

    def __init__(self, cluster: RayCluster, setup: worker.Setup, spec: RunSpec, task: Task) -> None:
        self.count, self._ray, self._setup, self._spec = spec.shards, cluster.ray, setup, spec
        needs = cluster.needs(spec.device)
        number = min(cluster.workers(needs), spec.shards)
        memory = PROCESS_BYTES + num_bytes((task.train.examples, task.test))
        made = cluster.remote(ShardWorker, needs, memory)
        self._actors = [made.remote() for _ in range(number)]
        self._of_shard = [self._actors[shard % number] for shard in range(spec.shards)]

    def open(self, fresh: State, clients: int, places: Sequence[Path] | None) -> Sequence[Any]:
        absolute = places and [place.absolute() for place in places]
        own = [range(i, self.count, len(self._actors)) for i in range(len(self._actors))]
        both = zip(self._actors, own, strict=True)
        opened = [a.open.remote(self._setup, self._spec, s, absolute) for a, s in both]
        for found in fetch(self._ray, opened):
            raise_remote(found)
        return [RemoteStore(self._ray, actor, i) for i, actor in enumerate(self._of_shard)]

    def train(
        self, simulation: Simulation, round_: int, broadcast: Broadcast
    ) -> Iterator[ShardPart]:
        sent, stopped = self._ray.put(broadcast), simulation.stopped_trials
        shards = enumerate(self._of_shard)
        for ref in [actor.train.remote(i, round_, sent, stopped) for i, actor in shards]:
            if (part := fetch(self._ray, ref)) is not None:
                yield part

    def keep(self, round_: int) -> None:
        fetch(self._ray, [actor.keep.remote(round_) for actor in self._actors])

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


def train_run(
    cluster: Cluster, task: Task, run: ResolvedRun, directory: Path, progress: Progress
) -> History:
    """Train a run whose shards are on a cluster; a lost worker costs the rounds of a checkpoint."""
    spec, losses = run.spec, 0
    if not isinstance(cluster, RayCluster):
        raise InputError(f"--on {cluster.on} trains several runs: use --on ray for a single one")
    if not spec.shards:
        remedy = "--set shards=8 cuts the population into 8 parts by client number"
        raise InputError(f"--on {cluster.on} trains a run in shards: {remedy}")
    setup = worker.Setup(task.fingerprint(), cluster.threads, worker.versions(), loaded_files())
    while True:
        shards = RemoteShards(cluster, setup, spec, task)
        try:
            [history] = run_pack(task, [run], [directory], progress=progress, shards=shards)
            return history
        except LostWorker as error:
            losses += 1
            if losses > MOST_LOSSES:
                remedy = "use more shards, or workers with more memory"
                raise InputError(f"every worker was lost ({str(error)[:200]}): {remedy}") from None
            progress.say(f"worker lost ({str(error)[:200]}), trained again from the checkpoint")
        finally:
            shards.close()
