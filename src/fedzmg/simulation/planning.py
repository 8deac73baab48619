"""Plan the cohorts and batches of rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from fedzmg.data.plan import ClientBatch, local_stream, sample_cohort
from fedzmg.tasks.task import Task

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan")


class RoundPlanner:
    """Plans the rounds of trials; trials of one seed share cohorts and batches."""

    def __init__(self, task: Task, seeds: Sequence[int]) -> None:
        self._task, self._seeds = task, list(seeds)
        self._ahead: tuple[int, Future[list[ClientBatch]]] | None = None

    def plan_ahead(self, round_: int) -> None:
        """Begin to plan a round in another thread, while a device is busy."""
        self._ahead = round_, _thread.submit(self._plan, round_)

    def batches(self, round_: int) -> list[ClientBatch]:
        """Return the client batches of a round, trial after trial."""
        if self._ahead is not None and self._ahead[0] == round_:
            return self._ahead[1].result()
        return self._plan(round_)

    def _plan(self, round_: int) -> list[ClientBatch]:
        planned = {seed: self._plan_seed(seed, round_) for seed in set(self._seeds)}
        return [
            batch._replace(trial=i) for i, seed in enumerate(self._seeds) for batch in planned[seed]
        ]

    def _plan_seed(self, seed: int, round_: int) -> list[ClientBatch]:
        protocol, data = self._task.protocol, self._task.train
        cohort = sample_cohort(
            seed, round_, len(data), protocol.cohort, replacement=protocol.replacement
        ).tolist()
        drawn: Counter[int] = Counter()
        batches = []
        for client in cohort:
            first, last = (int(o) for o in data.offsets[client : client + 2])
            address = (seed, round_, client, drawn[client])
            stream = local_stream(protocol.batching, *address, first, last - first)
            batches.append(ClientBatch(0, client, last - first, stream))
            drawn[client] += 1
        return batches
