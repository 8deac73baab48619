"""Plan of every round of a pack: cohorts and batches, from the seeds alone."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from fedzmg.data.plan import ClientBatch, LocalWork, local_stream
from fedzmg.data.sampling import Sampler
from fedzmg.participation import Participation
from fedzmg.tasks.task import Task

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan")


class RoundPlanner:
    """Plans the rounds of trials; trials of one seed share cohorts and batches."""

    def __init__(
        self, task: Task, seeds: Sequence[int], participation: Participation | None = None,
        extra_epochs: int = 0,
    ) -> None:  # fmt: skip
        protocol, self._task, self._seeds = task.protocol, task, list(seeds)
        chosen = participation or Participation()
        cohort, replacement = protocol.cohort, protocol.replacement
        self._sampler = Sampler(chosen, task.train, cohort, replacement=replacement)
        self.most_clients = len(self._seeds) * chosen.most_clients(cohort, len(task.train))
        """Largest number of clients that a round of all trials may have."""
        self._work = LocalWork(chosen, protocol.batching, extra_epochs)
        self._ahead: tuple[int, Future[list[ClientBatch]]] | None = None

    def plan_ahead(self, round_: int) -> None:
        """Begin to plan a round in another thread, while a device is busy."""
        self._ahead = round_, _thread.submit(self._plan, round_)

    def batches(self, round_: int, chosen: range | None = None) -> list[ClientBatch]:
        """Return the client batches of a round, trial after trial; only of ``chosen`` clients."""
        if self._ahead is not None and self._ahead[0] == round_ and chosen is None:
            return self._ahead[1].result()
        return self._plan(round_, chosen)

    def _plan(self, round_: int, chosen: range | None = None) -> list[ClientBatch]:
        planned: dict[int, list[ClientBatch]] = {seed: [] for seed in self._seeds}
        for seed, batches in planned.items():
            drawn: Counter[int] = Counter()
            for client in self._sampler.draw(seed, round_):
                if chosen is not None and client not in chosen:
                    continue
                first, last = (int(o) for o in self._task.train.offsets[client : client + 2])
                address = seed, round_, client, drawn[client]
                batches.append(self._work.batch(address, first, last - first))
                drawn[client] += 1
        seeds = enumerate(self._seeds)
        return [batch._replace(trial=i) for i, seed in seeds for batch in planned[seed]]

    def absent(self) -> ClientBatch:
        """Return a client without steps and upload, in place of an empty cohort."""
        first, last = (int(o) for o in self._task.train.offsets[:2])
        stream = local_stream(self._task.protocol.batching, 0, 0, 0, 0, first, last - first)
        return ClientBatch(0, 0, last - first, stream[:0])

    @property
    def longest(self) -> int:
        """Steps of the longest stream that any client can have; estimated for a user's function."""
        return self._work.steps(int(self._task.train.counts.max()))
