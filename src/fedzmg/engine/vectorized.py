"""The fast engine: the four local functions mapped over clients, of one trial or of many.

Clients are sorted by the length of their streams and drop out when theirs ends. One step is
one mapped call, which can be compiled once per width. A width of one takes other kernels, which
would change the last bits: a lone client trains beside a copy of itself.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedzmg.contract import ClientRule, map_rule
from fedzmg.data.plan import ClientBatch, full_pass, pad
from fedzmg.engine import local
from fedzmg.engine.cuda_graph import ClientState, Plan, StepGraphs, compile_apart
from fedzmg.engine.local import Broadcast, Chunk, Models, Outcome, Program, Work
from fedzmg.engine.replay import Replayed, copy_all
from fedzmg.engine.sequential import Sequential, common_origin
from fedzmg.errors import CannotMap, InputError
from fedzmg.kernels import MappedLayers
from fedzmg.kernels.precision import bits_are_kept
from fedzmg.messages import ClientContext, FullPass
from fedzmg.models.gradients import eager_gradient
from fedzmg.models.objective import Batch
from fedzmg.tree import State, Tree, flatten_rows, leaves, row, tree_map, vmap

MIN_WIDTH = 2
MAX_COMPILED_WIDTHS = 4

WHY_NOT = {  # by words of torch's errors
    "It looks like you": "the model or loss decides by the value of a tensor, see torch.where",
    "dynamic shape": "the shape of a tensor depends on the values of another",
    "have storage": "the model or loss hands a tensor to NumPy or Python",
    "in extra_args that has more": "a tensor made in the model is changed in place",
}
MappedStep = Callable[..., tuple[Tensor, Tree, State]]
"""(numbers, context, params, scratch, batch, [active]) -> loss, params, scratch."""


class Vectorized:
    """Engine that trains the clients of a round side by side.

    At most ``chunk`` of them at once; None: all of the round. A ``compiled`` step has one of few
    widths. With ``cuda_graph`` it is replayed from fixed buffers as a CUDA graph; on a CPU
    the same code is called on the same buffers. ``subtracts``: see :class:`Sequential`.
    """

    def __init__(
        self, program: Program, *, chunk: int | None = None, compiled: bool = False,
        cuda_graph: bool = False, backend: str = "inductor", subtracts: bool = True,
    ) -> None:  # fmt: skip
        self.program, self.chunk = program, chunk
        self.subtracts = subtracts
        self.compiled, self.cuda_graph, self.backend = compiled, cuda_graph, backend
        self.graphs: StepGraphs | None = None  # made by the first round that replays
        self._begin: Callable[..., ClientState] = self._begin_all
        self._finish: Callable[..., Outcome] = self._finish_all
        if cuda_graph:
            self._begin, self._finish = Replayed(self._begin_all), Replayed(self._finish_all)

    def train(
        self, batches: list[ClientBatch], broadcast: Broadcast, memory: State
    ) -> Iterator[Chunk]:
        """Yield one chunk of at most ``chunk`` clients at a time."""
        if reason := self.program.objective.model.loop_reason:
            raise cannot_map(reason)
        size = self.chunk or max(len(batches), 1)
        origin = None if self.subtracts else common_origin(self.program.rule, batches, broadcast)
        for first in range(0, len(batches), size):
            part = list(range(first, min(first + size, len(batches))))
            # Longest stream first; the sort is stable, so equal streams keep the cohort's order.
            order = sorted(part, key=lambda i: -len(batches[i].stream))
            width = max(len(order), MIN_WIDTH)
            # Bits may have to equal those of a pack that began with fewer clients.
            if self.graphs is not None and not bits_are_kept():
                width = self.graphs.rows_for(width)
            rows = order + order[-1:] * (width - len(order))  # with copies of the last client
            chosen = [batches[i] for i in rows]
            try:
                outcomes = self._train_sorted(chosen, broadcast, row(memory, rows), origin is None)
            except (InputError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
                    raise torch.OutOfMemoryError(str(error)) from error
                # An error of the model itself is raised once more, with client and step.
                path = ["compiled"] * self.compiled + ["cuda_graph"] * self.cuda_graph
                loop = Sequential(self.program, "_".join(path) or "vectorized")
                deque(loop.train(chosen, broadcast, row(memory, rows)), 0)
                raise cannot_map(error) from error
            models = None
            if origin is not None:
                models = Models(flatten_rows(outcomes.upload.delta)[0], origin)
            yield Chunk(order, list(range(len(order))), outcomes, models)

    def _train_sorted(
        self, batches: list[ClientBatch], broadcast: Broadcast, memory: State, subtract: bool
    ) -> Outcome:
        program = self.program
        # One transfer, which does not wait for the device to finish its work.
        facts = torch.tensor([[b.trial for b in batches], *program.facts(batches)])
        known = facts.to(program.device, non_blocking=True)
        if program.rule.full_pass == "never":
            still = self.graphs.state(len(batches)) if self.graphs is not None else None
            state = self._begin((), broadcast, memory, known, still=still)
        else:
            numbers, context = self._context(broadcast, memory, known)
            begin = self._map(lambda rule, own: rule.start(own), numbers, context)
            work = self._map(local.start, numbers, context, self._full_pass(batches, begin))
            state = ClientState(numbers, context, work)
        work = (self._replay if self.cuda_graph else self._run)(batches, state)
        if not subtract:
            return local.finish(program.rule, state.context, work, subtract=False)
        if self.graphs is None:
            return self._finish((), state._replace(work=work))
        # The places of the buffers do not change.
        return self._finish((), still=self.graphs.state(len(batches)))

    def _context(
        self, broadcast: Broadcast, memory: State, known: Tensor
    ) -> tuple[dict[str, Tensor], ClientContext]:
        trial, *facts = known
        own: Broadcast = tree_map(lambda leaf: leaf[trial], broadcast)
        return dict(own.numbers), self.program.context(own, memory, *facts)

    def _begin_all(
        self, _: Any, broadcast: Broadcast, memory: State, known: Tensor,
        still: ClientState | None = None,
    ) -> ClientState:  # fmt: skip
        numbers, context = self._context(broadcast, memory, known)
        made = ClientState(numbers, context, self._map(local.start, numbers, context, ()))
        if still is not None:  # where the steps work
            copy_all(leaves(still), leaves(made))
        return still or made

    def _finish_all(self, _: Any, state: ClientState) -> Outcome:
        out: Outcome = self._map(local.finish, *state)
        return out

    def _run(self, batches: list[ClientBatch], state: ClientState) -> Work:
        padded = pad([b.stream for b in batches])
        plan = Plan.of(self.program, padded)
        epoch_ends = self.program.rule.uses_epoch_end
        numbers, context, work = state
        done: list[Work] = []
        if self.compiled:
            # Compiled code is specialised on which inputs share a tensor: none may.
            work = work._replace(params=work.params.map(torch.clone))
        for t, width in enumerate(self._widths(batches)):
            if width < len(work.steps):
                done.append(row(work, slice(width, None)))
                work, context, numbers, plan = row((work, context, numbers, plan), slice(width))
            # A mask is nearly free once compiled, and one graph per width is worth more.
            masked = self.compiled or epoch_ends or padded.lengths[width - 1] <= t
            active = ((plan.lengths > t) & work.active,) if masked else ()
            loss, *after = self._step(
                numbers, context, work.params, work.scratch, self._batch(plan, t), *active
            )
            work = local.count(work, loss, *after, *active)
            if epoch_ends and padded.closes[:width, t].any():
                work = self._close_epoch(batches[:width], numbers, work, plan.ending(t))
        # Short clients drop out first, so the pieces are in order when read backwards.
        return tree_map(lambda *parts: torch.cat(parts), work, *reversed(done)) if done else work

    def _replay(self, batches: list[ClientBatch], state: ClientState) -> Work:
        padded = pad([b.stream for b in batches])
        if self.graphs is None:
            self.graphs = StepGraphs(self.program, compiled=self.compiled)
        widths = self._widths(batches)
        state, plan = self.graphs.load(padded, state, sorted(set(widths)))
        for t, width in enumerate(widths):
            self.graphs.replay(len(batches), width)
            if self.program.rule.uses_epoch_end and padded.closes[:width, t].any():
                numbers, now, part = row((state.numbers, state.work, plan), slice(width))
                closed = self._close_epoch(batches[:width], numbers, now, part.ending(t))
                tree_map(lambda old, new: old.copy_(new), now, closed)
        return state.work

    def _widths(self, batches: list[ClientBatch]) -> list[int]:
        return step_widths(tuple(len(b.stream) for b in batches), self.compiled or self.cuda_graph)

    def _map(self, function: Callable[..., Any], numbers: dict[str, Tensor], *args: Any) -> Any:
        with torch.no_grad():
            return map_rule(self.program.rule, function, numbers, *args)

    @functools.cached_property
    def _step(self) -> MappedStep:
        if self.compiled:
            eager = eager_step(self.program)
            return compile_apart(compiled_step(self.program), self.backend, eager)
        return eager_step(self.program)

    def _batch(self, plan: Plan, t: int) -> Batch:
        x, y = self.program.batch_inputs(plan.indices[:, t])
        model, weights = self.program.objective.model, plan.weights[:, t].contiguous()
        key = plan.keys[:, t].contiguous() if model.needs_key else ()
        return Batch(x, y, weights, key, weights > 0 if model.norms.dependent else ())

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
        first = program.data.offsets
        streams = [full_pass(size, int(first[b.client]), b.examples) for b in batches]
        padded = pad(streams, per_example=True)
        plan = Plan.of(program, padded)
        parts = (self._batch(plan, t) for t in range(padded.indices.shape[1]))
        losses = vmap(program.objective.eval_loss)
        none = torch.zeros(len(batches), dtype=program.dtype, device=program.device)
        with MappedLayers():
            return local.add_full_pass(losses, params, parts, none, program.rule.full_pass)


@functools.lru_cache(256)  # mostly the same from round to round
def step_widths(lengths: tuple[int, ...], few: bool) -> list[int]:
    """Count the clients at each step; with ``few``, round up to a small set of widths."""
    alive = (np.array(lengths)[:, None] > np.arange(max(lengths, default=0))).sum(0).tolist()
    if not few:
        return [max(count, MIN_WIDTH) for count in alive]
    ladder = {max(MIN_WIDTH, -(-len(lengths) >> k)) for k in range(MAX_COMPILED_WIDTHS)}
    return [min(width for width in ladder if width >= count) for count in alive]


def cannot_map(cause: Exception | str) -> CannotMap:
    """Explain an error of mapped clients that train one by one, or a reason known before."""
    message = str(cause).removeprefix("vmap: ") or type(cause).__name__
    first = message.splitlines()[0].split(". ")[0].rstrip(".:")
    reason = next((why for words, why in WHY_NOT.items() if words in message), first)
    return CannotMap(f"clients cannot be mapped ({reason}): use engine='sequential' or 'auto'")


def eager_step(program: Program) -> MappedStep:
    """Build a mapped step whose gradients are ordinary backward passes over all clients."""
    losses = local.mapped_losses(program)

    def mapped(
        numbers: Any, context: Any, params: Tree, scratch: Any, batch: Batch, *active: Tensor
    ) -> tuple[Tensor, Tree, State]:
        # Every field costs the map a few microseconds: an absent one at the end is left out.
        known = tuple(context) if context.asked else context[:-1]

        def apply(function: Callable[..., Any], _: Any, *own: Any) -> Any:
            def one(rule: ClientRule, facts: Any, *own: Any) -> Any:
                return function(rule, ClientContext(*facts), *own)

            with torch.no_grad():
                return map_rule(program.rule, one, numbers, known, *own)

        own_loss = (numbers, context) if program.rule.own_loss else ()

        def loss(point: Tree, own: Batch) -> tuple[Tensor, Tree]:
            with MappedLayers():
                return losses(point, own, *own_loss)

        def gradient(point: Tree) -> tuple[Tensor, Tree]:
            return eager_gradient(loss, point, batch)

        return local.full_step(program.rule, apply, gradient, context, params, scratch, *active)

    return mapped


def compiled_step(program: Program) -> MappedStep:
    """Build the same step in a form that traces as one graph: ``torch.func.grad`` in the map."""

    def one(
        rule: ClientRule, context: Any, params: Tree, scratch: Any, batch: Batch, active: Tensor
    ) -> tuple[Tensor, Tree, State]:
        def loss_of(tensors: dict[str, Tensor]) -> tuple[Tensor, Tree]:
            if rule.own_loss:
                return local.client_loss(rule, program.objective, context, Tree(tensors), batch)
            return program.objective.train(Tree(tensors), batch)

        def gradient(point: Tree) -> tuple[Tensor, Tree]:
            compute = torch.func.grad_and_value(loss_of, has_aux=True)
            grad, (loss, moved) = compute(dict(point.items()))
            return loss, Tree({**grad, **moved})

        def apply(function: Callable[..., Any], *own: Any) -> Any:
            return function(rule, *own)

        return local.full_step(rule, apply, gradient, context, params, scratch, active)

    return lambda numbers, *args: map_rule(program.rule, one, numbers, *args)
