"""Local steps as CUDA graphs: one replay per step, and no word from the host in between.

Everything a step reads and writes lies in buffers that keep their place: the plan of the round, the
clients' work, and the number of the step itself. Gathering the batch, gradient, update and tallies
are one graph, captured once per width; a narrower width is a graph over the first rows of the same
buffers, so clients that are done are left where they are.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedzmg.contract import ClientContext, ClientRule, bind
from fedzmg.data.plan import Padded
from fedzmg.engine import local
from fedzmg.engine.compiling import compile_apart
from fedzmg.engine.local import Work
from fedzmg.engine.round import Program
from fedzmg.models.kernels import MappedLayers
from fedzmg.models.kernels.determinism import bits_are_kept
from fedzmg.models.kernels.measurements import timer
from fedzmg.models.kernels.precision import precision
from fedzmg.models.objective import Batch, LossFunction, Objective, PrepareFunction
from fedzmg.tree import Tree, leaves, row, tree_map

WARM_UPS = 2
"""Runs before a capture: libraries set themselves up, the compiler compiles."""


class Plan(NamedTuple):
    """The round's batches on the card: ``[client, step, ...]``."""

    indices: Tensor
    weights: Tensor
    keys: Tensor
    lengths: Tensor


class Buffers(NamedTuple):
    """What a step works on, one row per client."""

    numbers: dict[str, Tensor]
    context: ClientContext
    work: Work


class _Code(NamedTuple):
    """The two halves of a step, which the compiler takes one at a time."""

    loss: Callable[..., Tensor]
    advance: Callable[..., None]


@dataclass
class _Held:
    """Buffers for one number of clients, and the graphs over them."""

    state: Buffers
    plan: Plan
    time: Tensor
    steps: dict[int, Callable[[], None]] = field(default_factory=dict)
    """By width: what does one step."""


class Captured:
    """Runs the steps of a round by replaying graphs.

    Args:
        program: what to train.
        compiled: let the compiler fuse what is captured.
    """

    def __init__(self, program: Program, *, compiled: bool) -> None:
        self._program, self._compiled = program, compiled
        self._held: dict[int, _Held] = {}
        self._pool: Any = None
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=1024)

    def rows_for(self, clients: int) -> int:
        """How many rows to compute for so many clients.

        Buffers that are less than twice too wide serve as well: to capture anew, and maybe to
        compile, takes longer than some rows more. Wider ones are halved, so that packs that shrink
        one after another come to the same few widths.
        """
        rows = min((rows for rows in self._held if rows >= clients), default=clients)
        while rows >= 2 * clients:
            rows = -(-rows // 2)
        return rows

    def load(self, padded: Padded, state: Buffers, widths: Iterable[int]) -> Buffers:
        """Put a round into the buffers, capturing what is missing first; the buffers' own state."""
        clients = len(padded.lengths)
        held = self._held.get(clients)
        if held is None or padded.indices.shape[1] > held.plan.indices.shape[1]:
            held = self._held[clients] = self._hold(padded, state)
        for width in widths:
            if width not in held.steps:
                held.steps[width] = self._capture(held, width)
        _copy_all(leaves(held.state), leaves(state))
        steps = padded.indices.shape[1]
        for kept, new in zip(
            held.plan[:3], (padded.indices, padded.weights, padded.keys), strict=True
        ):
            _upload(new, kept[:, :steps])
        _upload(padded.lengths, held.plan.lengths)
        held.time.zero_()
        return held.state

    def replay(self, clients: int, width: int) -> None:
        """One step of the first ``width`` clients."""
        self._held[clients].steps[width]()

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Mark the steps of a round on the device's own clock."""
        if self._program.device.type != "cuda":
            yield
            return
        span = timer(), timer()
        span[0].record()
        yield
        span[1].record()
        self._spans.append(span)

    def seconds(self) -> float:
        """What the device spent on steps since this was last asked; waits for it."""
        total = 0.0
        while self._spans:
            begin, end = self._spans.popleft()
            end.synchronize()
            total += begin.elapsed_time(end) / 1e3
        return total

    def _hold(self, padded: Padded, state: Buffers) -> _Held:
        program = self._program
        clients, steps, batch = padded.indices.shape
        steps = max(steps, program.longest)
        lengths = torch.zeros(clients, dtype=torch.int64, device=program.device)
        plan = Plan(
            lengths.new_zeros(clients, steps, batch),
            lengths.new_zeros(clients, steps, batch, dtype=program.dtype),
            lengths.new_zeros(clients, steps),
            lengths,
        )
        own: Buffers = tree_map(
            lambda leaf: torch.empty_like(leaf, memory_format=torch.contiguous_format).copy_(leaf),
            state,
        )
        return _Held(own, plan, lengths.new_zeros(()))

    def _capture(self, held: _Held, width: int) -> Callable[[], None]:
        state, plan = row(held.state, slice(width)), row(held.plan, slice(width))
        plain = _Code(_loss_function(_Learnt.of(self._program)), _advance(self._program.rule))
        if self._program.device.type != "cuda":  # the same step, called instead of replayed
            code = self._compile(plain, plan) if self._compiled else plain
            return lambda: _step(self._program, code, state, plan, held.time)
        stream = torch.cuda.Stream(self._program.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Once without the compiler: layers measure which kernels suit them.
            self._warm_up(held, plain, state, plan)
            code = self._compile(plain, plan) if self._compiled else plain
            for _ in range(WARM_UPS):
                self._warm_up(held, code, state, plan)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            _step(self._program, code, state, plan, held.time)
        self._pool = self._pool or graph.pool()
        return graph.replay

    def _warm_up(self, held: _Held, code: _Code, state: Buffers, plan: Plan) -> None:
        held.time.zero_()  # there may be fewer steps to train than to warm up with
        _step(self._program, code, state, plan, held.time)

    def _compile(self, plain: _Code, plan: Plan) -> _Code:
        learnt = _Learnt.of(self._program)
        shapes = tuple(part.shape for part in (plan.indices, *self._program.data.examples))
        try:
            loss = _compiled_loss(learnt, shapes, precision(), bits_are_kept())
        except TypeError:  # a user's function that has no hash
            loss = compile_apart(plain.loss)
        return _Code(loss, compile_apart(plain.advance))


def _copy_all(places: list[Tensor], values: list[Tensor]) -> None:
    """Copy tensors in few launches: mixed types would be copied one by one."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, value in zip(places, values, strict=True):
        own = by_type.setdefault(place.dtype, ([], []))
        own[0].append(place)
        own[1].append(value)
    for there, new in by_type.values():
        torch._foreach_copy_(there, new)


def _upload(array: npt.NDArray[Any], place: Tensor) -> None:
    """Copy to the device without waiting for it, which takes page-locked memory of that type."""
    new = torch.from_numpy(array).to(place.dtype)
    place.copy_(new.pin_memory() if place.is_cuda else new, non_blocking=True)


def _step(program: Program, code: _Code, state: Buffers, plan: Plan, time: Tensor) -> None:
    """One step on buffers, in place."""
    params = state.work.params
    tracked = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
    losses = code.loss(tracked, plan, time, *program.data.examples)
    slopes = torch.autograd.grad(losses.sum(), list(tracked.values()), allow_unused=True)
    grad = Tree(
        {
            name: torch.zeros_like(leaf) if slope is None else slope
            for (name, leaf), slope in zip(params.items(), slopes, strict=True)
        }
    )
    with torch.no_grad():
        code.advance(
            state.numbers, state.context, state.work, grad, losses.detach(), plan.lengths, time
        )
        time.add_(1)


@dataclass(frozen=True)
class _Learnt:
    """What the first half of a step depends on: the task, and nothing of the algorithm."""

    source: nn.Module
    loss: LossFunction
    layers_in: torch.dtype | None
    prepare: PrepareFunction
    dtype: torch.dtype
    device: torch.device
    objective: Objective = field(compare=False)
    """Any that is made of these."""

    @classmethod
    def of(cls, program: Program) -> _Learnt:
        goal = program.objective
        return cls(
            goal.model.source, goal.loss, goal.layers_in, program.prepare, program.dtype,
            program.device, goal,
        )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _compiled_loss(learnt: _Learnt, *circumstances: Any) -> Callable[..., Tensor]:
    """The compiled losses of a task: algorithms that train it one after another share them.

    Under other ``circumstances`` (shapes, rounding, choice of kernels) they are compiled anew.
    """
    del circumstances
    return compile_apart(_loss_function(learnt))


def _loss_function(learnt: _Learnt) -> Callable[..., Tensor]:
    """Losses of the clients on the batches of step ``time``."""
    objective, prepare, dtype = learnt.objective, learnt.prepare, learnt.dtype
    keyed = objective.model.needs_key

    def losses(params: dict[str, Tensor], plan: Plan, time: Tensor, x: Tensor, y: Tensor) -> Tensor:
        at = time.reshape(1)
        indices = plan.indices.index_select(1, at).squeeze(1)
        weights = plan.weights.index_select(1, at).squeeze(1)
        key = plan.keys.index_select(1, at).squeeze(1) if keyed else ()
        batch = Batch(prepare(x[indices], dtype), y[indices], weights, key)
        # Under the compiler, layers exchange themselves: it cannot trace all that the mode sees.
        quick = contextlib.nullcontext() if torch.compiler.is_compiling() else MappedLayers()
        with quick:
            return torch.vmap(objective.train)(Tree(params), batch)

    return losses


def _advance(rule: ClientRule) -> Callable[..., None]:
    """The rule's step and the tallies, written where they are kept."""

    def one(
        numbers: Any, context: ClientContext, params: Tree, scratch: Any, grad: Tree, active: Any
    ) -> Any:
        return local.step(bind(rule, numbers), context, params, scratch, grad, active)

    def advance(
        numbers: Any,
        context: ClientContext,
        work: Work,
        grad: Tree,
        loss: Tensor,
        lengths: Tensor,
        time: Any,
    ) -> None:
        active = (lengths > time) & work.active
        params, scratch = torch.vmap(one)(numbers, context, work.params, work.scratch, grad, active)
        after = local.count(work, loss, params, scratch, active)
        tree_map(lambda old, new: old.copy_(new), work, after)

    return advance
