"""Structure of a federation's messages, which server and devices derive on their own."""

import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from fedzmg.contract import ServerRule
from fedzmg.data.federated import Examples, FederatedData
from fedzmg.data.plan import ClientBatch, LocalWork, local_stream
from fedzmg.engine.local import Broadcast, Outcome, Program
from fedzmg.engine.sequential import Sequential
from fedzmg.experiment.specs.run import DTYPES, ResolvedRun, RunSpec
from fedzmg.kernels import onednn, rounding
from fedzmg.messages import Upload
from fedzmg.models.initial import initial_params
from fedzmg.simulation.program import build_program
from fedzmg.simulation.trial import packed_rules
from fedzmg.tasks.task import Task
from fedzmg.tree import State, Tree, named_leaves, row, tree_map
from fedzmg.wrappers.parts import filled, travelling


class Down(NamedTuple):
    """Arrays that the server sends to a client."""

    params: Tree  # parameters that travel; personal and frozen ones do not
    shared: State


def partition(task: Task, client: int, population: int) -> Task:
    """Return a task with the data of one client; data of a single client are that one's anyway."""
    place = client if len(task.train) > 1 else 0
    first, last = (int(o) for o in task.train.offsets[place : place + 2])
    offsets = np.where(np.arange(population + 1) > client, last - first, 0)
    own = row(task.train.examples, slice(first, last))
    names = tuple(str(i) for i in range(population))
    names = (*names[:client], task.train.names[place], *names[client + 1 :])
    protocol = replace(task.protocol, cohort=min(task.protocol.cohort, population))
    return replace(task, train=FederatedData(own, offsets, names), protocol=protocol)


@dataclass(frozen=True)
class ReportedData(FederatedData):
    """Numbers of examples that devices reported; the examples themselves are not here."""

    prints: tuple[str, ...] = ()  # hash of the examples of every device

    @classmethod
    def of(cls, test: Examples, counts: list[int], *names: tuple[str, ...]) -> "ReportedData":
        """Repeat one test example, without memory, in place of examples that are not here."""
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        like = tree_map(lambda t: t[:1].expand(int(offsets[-1]), *t.shape[1:]), test)
        return cls(like, offsets, names[0], "", names[1])

    def fingerprint(self) -> str:
        return hashlib.sha256("\x1f".join((*self.names, *self.prints)).encode()).hexdigest()


@dataclass(frozen=True)
class Blueprint:
    """Local training of one run, with empty messages as templates."""

    run: ResolvedRun
    rule: ServerRule
    program: Program
    work: LocalWork
    numbers: dict[str, torch.Tensor]  # hyper-parameters of the client rule, one row
    start: Tree  # initial model
    memory: State  # memory of a client that was never sampled
    down: Down
    up: Outcome  # result of a client, without its memory

    @classmethod
    def of(cls, task: Task, spec: RunSpec, device: torch.device) -> "Blueprint":
        """Derive everything from a task, which has the number of clients, and a specification."""
        run = spec.resolve(task)
        task, dtype = replace(task, protocol=spec.build_protocol(task)), DTYPES[spec.dtype]
        _, client, server = packed_rules(task, [run.trial], dtype, device)
        first = initial_params(task.model, task.init, run.trial.seed)
        start = first.map(lambda leaf: leaf[None].to(device, dtype))
        state = server.map(lambda rule, p: rule.init(p), start)
        sent = server.map(lambda rule, s, _: rule.share(s), state, torch.zeros(1))
        program = build_program(task, client.rule, dtype, device, spec.precision)
        participation = spec.federation.build().participation
        work = LocalWork(participation, task.protocol.batching, client.rule.extra_epochs)
        memory = client.map(lambda rule, p: rule.init_memory(p), start)
        down = Down(travelling(server.rule, row(start, 0)), row(sent, 0))
        found = cls(
            run, server.rule, program, work, client.numbers, row(start, 0), memory, down,
            up=Outcome(Upload(Tree({})), (), *torch.zeros(2)),
        )  # fmt: skip
        held = int(np.flatnonzero(task.train.counts)[0])
        stream = local_stream(task.protocol.batching, 0, 0, 0, 0, 0, 1)[:0]
        empty = found._train([ClientBatch(0, held, 1, stream)], down, 1, memory)
        return replace(found, up=row(empty, 0)._replace(memory=()))

    def train(
        self, down: Down, round_: int, client: int, occurrences: int, memory: State
    ) -> tuple[Outcome, State]:
        """Train a client; return its results, a row per occurrence, and its new memory."""
        run, data = self.run, self.program.data
        first, last = (int(o) for o in data.offsets[client : client + 2])
        own = run.trial.seed, round_, client
        batches = [self.work.batch((*own, i), first, last - first) for i in range(occurrences)]
        rows = tree_map(lambda leaf: torch.cat([leaf] * occurrences), memory)
        found = self._train(batches, down, round_, rows)
        return found._replace(memory=()), row(found.memory, [-1])

    def _train(self, batches: list[ClientBatch], down: Down, round_: int, memory: State) -> Outcome:
        params, shared = row((filled(down.params, self.start), down.shared), None)
        stamp = torch.full((1,), round_, dtype=torch.int64, device=self.program.device)
        broadcast = Broadcast(params, shared, self.numbers, stamp)
        with onednn(True), rounding(self.run.spec.precision):
            parts = list(Sequential(self.program).train(batches, broadcast, memory))
        return tree_map(lambda *own: torch.cat(own), *(part.outcomes for part in parts))

    def structure(self) -> str:
        """Hash names, shapes and types of all messages, and parameters that do not travel."""
        digest = hashlib.sha256()
        for value in (self.down, self.up, self.memory):
            for name, leaf in named_leaves(value).items():
                digest.update(f"{name} {leaf.dtype} {tuple(leaf.shape)};".encode())
        for name, leaf in self.start.items():
            if name not in self.down.params:
                digest.update(name.encode() + leaf.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]
