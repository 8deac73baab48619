"""The reference engine: one client after another, un-padded batches, nothing clever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fedzmg.contract import bind
from fedzmg.data.plan import ClientBatch, Stream, full_pass
from fedzmg.engine import local
from fedzmg.engine.local import Broadcast, Chunk, Outcome, Program
from fedzmg.messages import ClientContext, FullPass
from fedzmg.models.objective import Batch
from fedzmg.tree import State, Tree, row, tree_map


@dataclass(frozen=True)
class Sequential:
    """Engine that trains clients in a loop; a deployed client runs the same code."""

    program: Program

    def train(
        self, batches: list[ClientBatch], broadcast: Broadcast, memory: State
    ) -> Iterator[Chunk]:
        """Yield one chunk per client."""
        for i, batch in enumerate(batches):
            outcome = self._train_one(batch, row(broadcast, batch.trial), row(memory, i))
            alone = tree_map(lambda leaf: leaf[None], outcome)
            yield Chunk([i], [0], alone, computed=len(batch.stream))

    def _train_one(self, batch: ClientBatch, broadcast: Broadcast, memory: State) -> Outcome:
        program, stream = self.program, batch.stream
        rule = bind(program.rule, broadcast.numbers)
        count = torch.tensor(batch.examples, device=program.device)
        context = ClientContext(broadcast.params, broadcast.shared, memory, broadcast.round, count)
        full_pass = self._full_pass(batch, context.params) if rule.full_pass != "never" else ()
        work = local.start(rule, context, full_pass)
        for t in range(len(stream)):
            loss, grad = local.eager_gradient(
                program.objective.train, work.params, self._batch(stream, t, int(stream.counts[t]))
            )
            after = local.step(rule, context, work.params, work.scratch, grad)
            work = local.count(work, loss, *after)
            if rule.uses_epoch_end and stream.closes[t]:
                full = rule.full_pass == "epochs"
                seen = self._full_pass(batch, work.params).loss if full else None
                work = local.close_epoch(rule, work, torch.ones_like(work.active), seen)
                if not bool(work.active):
                    break
        return local.finish(rule, context, work)

    def _batch(self, stream: Stream, t: int, divisor: int) -> Batch:
        program, real = self.program, int(stream.counts[t])
        x, y = program.batch_inputs(torch.from_numpy(stream.indices[t, :real]).to(program.device))
        weights = torch.full((real,), 1 / divisor, dtype=program.dtype, device=program.device)
        keyed = program.objective.model.needs_key
        key = torch.tensor(int(stream.keys[t]), device=program.device) if keyed else ()
        return Batch(x, y, weights, key)

    def _full_pass(self, batch: ClientBatch, params: Tree) -> FullPass:
        program = self.program
        first = int(program.data.offsets[batch.client])
        stream = full_pass(program.full_pass_size, first, batch.examples)
        parts = (self._batch(stream, t, batch.examples) for t in range(len(stream)))
        loss = next(iter(params.values())).new_zeros(())
        return local.full_pass(
            program.objective.eval_loss, params, parts, loss, program.rule.full_pass
        )
