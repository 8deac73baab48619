"""The reference engine: one client after another, un-padded batches, nothing clever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedzmg.contract import Given, Look, State, bind
from fedzmg.data.plan import Entry, Stream, full_pass
from fedzmg.engine import local
from fedzmg.engine.local import Outcome
from fedzmg.engine.round import Broadcast, Chunk, Program
from fedzmg.models.objective import Batch
from fedzmg.tree import Tree, row, tree_map


@dataclass(frozen=True)
class Sequential:
    """Trains clients in a loop; also what a deployed client runs."""

    program: Program

    def train(self, entries: list[Entry], sent: Broadcast, memory: State) -> Iterator[Chunk]:
        """One chunk per client."""
        for i, entry in enumerate(entries):
            outcome = self._train_one(entry, row(sent, entry.trial), row(memory, i))
            alone = tree_map(lambda leaf: leaf[None], outcome)
            yield Chunk([i], [0], alone, computed=len(entry.stream))

    def _train_one(self, entry: Entry, sent: Broadcast, memory: State) -> Outcome:
        program, stream = self.program, entry.stream
        rule = bind(program.rule, sent.numbers)
        count = torch.tensor(entry.examples, device=program.device)
        given = Given(sent.params, sent.shared, memory, sent.round, count)
        look = self._look(entry, given.params) if rule.looks != "never" else ()
        work = local.start(rule, given, look)
        for t in range(len(stream)):
            loss, grad = local.eager_gradient(
                program.objective.train, work.params, self._batch(stream, t, int(stream.counts[t]))
            )
            after = local.step(rule, given, work.params, work.scratch, grad, active=None)
            work = local.count(work, loss, *after, active=None)
            if rule.watches_epochs and stream.closes[t]:
                seen = self._look(entry, work.params).loss if rule.looks == "epochs" else None
                work = local.close_epoch(rule, work, torch.ones_like(work.active), seen)
                if not bool(work.active):
                    break
        return local.finish(rule, given, work)

    def _batch(self, stream: Stream, t: int, divisor: int) -> Batch:
        program, real = self.program, int(stream.counts[t])
        x, y = program.batch_inputs(torch.from_numpy(stream.indices[t, :real]).to(program.device))
        weights = torch.full((real,), 1 / divisor, dtype=program.dtype, device=program.device)
        key: Tensor | tuple[()] = ()
        if program.objective.model.needs_key:
            key = torch.tensor(int(stream.keys[t]), device=program.device)
        return Batch(x, y, weights, key)

    def _look(self, entry: Entry, params: Tree) -> Look:
        program = self.program
        first = int(program.data.offsets[entry.client])
        stream = full_pass(program.look_size, first, entry.examples)
        batches = [self._batch(stream, t, entry.examples) for t in range(len(stream))]
        loss = next(iter(params.values())).new_zeros(())
        if program.rule.looks == "epochs":
            with torch.no_grad():
                return Look(
                    sum((program.objective.look(params, b) for b in batches), loss), Tree({})
                )
        grad = params.zeros()
        for batch in batches:
            part, slope = local.eager_gradient(program.objective.look, params, batch)
            loss, grad = loss + part, grad + slope
        return Look(loss, grad)
