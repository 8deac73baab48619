"""The fast engine: the four local functions mapped over clients, of one trial or of many.

Clients are sorted by the length of their streams and leave for good when theirs ends, so the
map only shrinks. The loop over steps stays outside of the map: one step is one mapped call, which
can be compiled once per width.

A width of one takes other kernels than a width of two or more and would change the last bits, so
a lone client trains beside a copy of itself whose result is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedzmg.contract import bind
from fedzmg.data.plan import ClientBatch, Padded, full_pass, pad
from fedzmg.engine import local
from fedzmg.engine.cuda_graph import ClientState, StepGraphs, compile_apart
from fedzmg.engine.local import Broadcast, Chunk, Outcome, Program, Work
from fedzmg.messages import ClientContext, FullPass
from fedzmg.models.kernels import MappedLayers
from fedzmg.models.kernels.precision import bits_are_kept
from fedzmg.models.objective import Batch
from fedzmg.tree import State, Tree, row, tree_map

MIN_WIDTH = 2
MAX_COMPILED_WIDTHS = 4

MappedStep = Callable[..., tuple[Tensor, Tree, State]]
"""(numbers, context, params, scratch, batch, active) -> loss, params, scratch."""


class Vectorized:
    """Engine that trains the clients of a round side by side.

    At most ``chunk`` of them at once; None: all of the round. A ``compiled`` step has widths of a
    short ladder. With ``cuda_graph`` it is replayed from fixed buffers as a CUDA graph; on a CPU
    the same code is called on the same buffers.
    """

    def __init__(
        self,
        program: Program,
        *,
        chunk: int | None = None,
        compiled: bool = False,
        cuda_graph: bool = False,
        backend: str = "inductor",
    ) -> None:
        self.program, self.chunk = program, chunk
        self.compiled, self.cuda_graph, self.backend = compiled, cuda_graph, backend
        self._steps: dict[bool, MappedStep] = {}
        """The mapped step, with and without a mask for finished clients."""
        self.graphs: StepGraphs | None = None
        """Made by the first round that replays."""

    def train(
        self, batches: list[ClientBatch], broadcast: Broadcast, memory: State
    ) -> Iterator[Chunk]:
        """Yield one chunk of at most ``chunk`` clients at a time."""
        size = self.chunk or max(len(batches), 1)
        for first in range(0, len(batches), size):
            part = list(range(first, min(first + size, len(batches))))
            # Longest stream first; the sort is stable, so equal streams keep the cohort's order.
            order = sorted(part, key=lambda i: -len(batches[i].stream))
            rows = order + order[-1:] * (self._num_rows(len(order)) - len(order))
            chosen = [batches[i] for i in rows]
            outcomes = self._train_sorted(chosen, broadcast, row(memory, rows))
            computed = sum(self._widths([len(b.stream) for b in chosen]))
            yield Chunk(order, list(range(len(order))), outcomes, computed)

    def _num_rows(self, clients: int) -> int:
        """Count the rows to compute; those beyond the clients are copies of the last one.

        There are none where bits must equal those of a pack that began with fewer clients.
        """
        clients = max(clients, MIN_WIDTH)
        if self.graphs is None or bits_are_kept():
            return clients
        return self.graphs.rows_for(clients)

    def _train_sorted(
        self, batches: list[ClientBatch], broadcast: Broadcast, memory: State
    ) -> Outcome:
        program = self.program
        # One transfer that does not wait for what the device is still busy with.
        facts = torch.tensor([[b.trial for b in batches], [b.examples for b in batches]])
        trial, counts = facts.to(program.device, non_blocking=True)
        own: Broadcast = tree_map(lambda leaf: leaf[trial], broadcast)
        context = ClientContext(own.params, own.shared, memory, own.round, counts)
        numbers = dict(own.numbers)
        full_pass: FullPass | tuple[()] = ()
        if program.rule.full_pass != "never":
            full_pass = self._full_pass(batches, context.params)
        work = self._map(local.start, numbers, context, full_pass)
        run = self._replay if self.cuda_graph else self._run
        work = run(batches, ClientState(numbers, context, work))
        out: Outcome = self._map(local.finish, numbers, context, work)
        return out

    def _run(self, batches: list[ClientBatch], state: ClientState) -> Work:
        padded = pad([b.stream for b in batches])
        steps = int(padded.lengths.max(initial=0))
        plan = _DevicePlan(self.program, padded)
        epoch_ends = self.program.rule.uses_epoch_end
        numbers, context, work = state
        done: list[Work] = []
        if self.compiled:
            # Compiled code is specialised on which of its inputs are one tensor: let none be.
            work = work._replace(params=work.params.map(torch.clone))
        for t in range(steps):
            alive = int((padded.lengths > t).sum())
            width = self._width(alive, len(batches))
            if width < len(work.steps):
                done.append(row(work, slice(width, None)))
                work, context, numbers = row((work, context, numbers), slice(width))
            # A mask is nearly free once compiled, and one graph per width is worth more.
            masked = self.compiled or epoch_ends or alive < width
            active = plan.active(t, width) if masked else None
            if active is not None:
                active = active & work.active
            loss, params, scratch = self._step(masked=masked)(
                numbers, context, work.params, work.scratch, plan.at(t, width), active
            )
            work = local.count(work, loss, params, scratch, active)
            if epoch_ends and padded.closes[:width, t].any():
                work = self._close_epoch(batches[:width], numbers, work, plan.closes(t, width))
        # Rows left in ascending order of width, so the pieces line up when read backwards.
        return tree_map(lambda *parts: torch.cat(parts), work, *reversed(done)) if done else work

    def _replay(self, batches: list[ClientBatch], state: ClientState) -> Work:
        """Run the same steps from fixed buffers."""
        padded = pad([b.stream for b in batches])
        if self.graphs is None:
            self.graphs = StepGraphs(self.program, compiled=self.compiled)
        widths = self._widths([len(b.stream) for b in batches])
        state = self.graphs.load(padded, state, sorted(set(widths)))
        with self.graphs.timed():
            for t, width in enumerate(widths):
                self.graphs.replay(len(batches), width)
                if self.program.rule.uses_epoch_end and padded.closes[:width, t].any():
                    numbers, now = row((state.numbers, state.work), slice(width))
                    ends = torch.from_numpy(padded.closes[:width, t] & (padded.lengths[:width] > t))
                    closed = self._close_epoch(
                        batches[:width], numbers, now, ends.to(self.program.device)
                    )
                    tree_map(lambda old, new: old.copy_(new), now, closed)
        return state.work

    def step_seconds(self) -> float | None:
        """Return the GPU time of local steps since the last call; None: it is not measured."""
        if self.graphs is None or self.program.device.type != "cuda":
            return None
        return self.graphs.seconds()

    def _widths(self, lengths: list[int]) -> list[int]:
        """Count the rows that each step computes."""
        steps = np.arange(max(lengths, default=0))
        alive = (np.array(lengths)[:, None] > steps).sum(0)
        return [self._width(int(count), len(lengths)) for count in alive]

    def _width(self, alive: int, total: int) -> int:
        """Count the rows of a step; compiled steps round up to a ladder of few widths."""
        if not self.compiled and not self.cuda_graph:
            return max(alive, MIN_WIDTH)
        ladder = {max(MIN_WIDTH, -(-total >> k)) for k in range(MAX_COMPILED_WIDTHS)}
        return min(w for w in ladder if w >= alive)

    def _map(self, function: Callable[..., Any], numbers: dict[str, Tensor], *args: Any) -> Any:
        """Map ``function(rule, *args)`` over clients, the rule bound to each client's numbers."""
        with torch.no_grad():
            return torch.vmap(lambda n, *a: function(bind(self.program.rule, n), *a))(
                numbers, *args
            )

    def _step(self, *, masked: bool) -> MappedStep:
        if masked not in self._steps:
            if self.compiled:
                step = compiled_step(self.program, masked=masked)
                self._steps[masked] = compile_apart(step, self.backend)
            else:
                self._steps[masked] = eager_step(self.program, masked=masked)
        return self._steps[masked]

    def _close_epoch(
        self, batches: Sequence[ClientBatch], numbers: dict[str, Tensor], work: Work, closes: Tensor
    ) -> Work:
        full = self.program.rule.full_pass == "epochs"
        seen = (self._full_pass(batches, work.params).loss,) if full else ()
        closed: Work = self._map(local.close_epoch, numbers, work, closes, *seen)
        return closed

    def _full_pass(self, batches: Sequence[ClientBatch], params: Tree) -> FullPass:
        program = self.program
        # No wider than the largest client: padding costs as much as examples do. The largest of
        # all, not of these, because another width would move the last bits.
        size = min(program.full_pass_size, int(program.data.counts.max()))
        streams = [
            full_pass(size, int(program.data.offsets[b.client]), b.examples) for b in batches
        ]
        padded = pad(streams, per_example=True)
        plan, width, steps = _DevicePlan(program, padded), len(batches), padded.indices.shape[1]
        losses = torch.vmap(program.objective.eval_loss)
        loss = torch.zeros(width, dtype=program.dtype, device=program.device)
        if program.rule.full_pass == "epochs":
            with torch.no_grad(), MappedLayers():
                for t in range(steps):
                    loss = loss + losses(params, plan.at(t, width))
            return FullPass(loss, Tree({}))
        grad = params.zeros()
        for t in range(steps):
            with MappedLayers():
                part, slope = local.eager_gradient(losses, params, plan.at(t, width))
            loss, grad = loss + part, grad + slope
        return FullPass(loss, grad)


class _DevicePlan:
    """A padded plan on the device, one step at a time."""

    def __init__(self, program: Program, padded: Padded) -> None:
        self._program = program
        tensors = [torch.from_numpy(part).to(program.device) for part in padded]
        self._indices, weights, self._closes, self._keys, self._lengths = tensors
        self._weights = weights.to(program.dtype)

    def at(self, t: int, width: int) -> Batch:
        x, y = self._program.batch_inputs(self._indices[:width, t])
        keyed = self._program.objective.model.needs_key
        key = self._keys[:width, t].contiguous() if keyed else ()
        return Batch(x, y, self._weights[:width, t].contiguous(), key)

    def active(self, t: int, width: int) -> Tensor:
        return self._lengths[:width] > t

    def closes(self, t: int, width: int) -> Tensor:
        return self._closes[:width, t] & self.active(t, width)


def eager_step(program: Program, *, masked: bool) -> MappedStep:
    """Build a mapped step whose gradient is one ordinary backward pass over all clients."""
    losses = torch.vmap(program.objective.train)

    def one(numbers: Any, *args: Any) -> tuple[Tree, State]:
        return local.step(bind(program.rule, numbers), *args)

    advance = torch.vmap(one, in_dims=(0, 0, 0, 0, 0, 0 if masked else None))

    def mapped(
        numbers: Any, context: Any, params: Tree, scratch: Any, batch: Batch, active: Any
    ) -> tuple[Tensor, Tree, State]:
        with MappedLayers():
            loss, grad = local.eager_gradient(losses, params, batch)
        with torch.no_grad():
            return loss, *advance(numbers, context, params, scratch, grad, active)

    return mapped


def compiled_step(program: Program, *, masked: bool) -> MappedStep:
    """Build the same step in a form that traces as one graph: ``torch.func.grad`` in the map."""

    def one(
        numbers: Any, context: Any, params: Tree, scratch: Any, batch: Batch, active: Any
    ) -> tuple[Tensor, Tree, State]:
        def loss_of(tensors: dict[str, Tensor]) -> Tensor:
            return program.objective.train(Tree(tensors), batch)

        grad, loss = torch.func.grad_and_value(loss_of)(dict(params.items()))
        rule = bind(program.rule, numbers)
        return loss, *local.step(rule, context, params, scratch, Tree(grad), active)

    in_dims = (0, 0, 0, 0, 0, 0 if masked else None)

    def mapped(*args: Any) -> tuple[Tensor, Tree, State]:
        return torch.vmap(one, in_dims=in_dims)(*args)

    return mapped
