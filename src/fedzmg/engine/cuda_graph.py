"""Local steps as CUDA graphs: one replay per step, with no host round-trip in between.

A step reads and writes fixed buffers only: the plan of the round, the clients' work, and the number
of the step itself. Gathering the batch, gradient, update and tallies are one graph, captured once
per width. A narrower one is over the first rows of the same buffers: finished clients stay there.
"""

import contextlib
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedzmg.contract import map_rule
from fedzmg.data.plan import Padded
from fedzmg.engine import local
from fedzmg.engine.local import Program, Work
from fedzmg.engine.replay import capturing, copied, copy_all, unshared
from fedzmg.kernels import MappedLayers, convolution
from fedzmg.kernels.precision import bits_are_kept, code_hash, precision
from fedzmg.messages import ClientContext
from fedzmg.models.gradients import eager_gradient
from fedzmg.models.layout import warn_once
from fedzmg.models.objective import Batch
from fedzmg.tree import Inputs, State, Tree, leaves, row, tree_map

P = ParamSpec("P")
T = TypeVar("T")


def compile_apart(
    function: Callable[P, T], backend: str = "inductor", eager: Callable[P, T] | None = None
) -> Callable[P, T]:
    """Compile a function as one graph for fixed shapes, apart from all others of its code.

    A function that the compiler cannot trace is called as it is, or ``eager`` instead of it. The
    compiler limits recompilations per code object. A copy with its own code object keeps other
    tasks and algorithms from using up this limit.
    """
    assert isinstance(function, types.FunctionType)
    twin = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    torch._dynamo.config.allow_rnn = True  # ours are of matrix products, which it can trace
    compiled: Callable[P, T] | None = torch.compile(
        twin, fullgraph=True, dynamic=False, backend=_inductor if backend == "inductor" else backend
    )

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal compiled
        if compiled is not None:
            try:
                return compiled(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:
                reason = str(error).splitlines()[0]
                warn_once(f"a step runs without the compiler, which stopped: {reason}")
                compiled = None
        return (eager or function)(*args, **kwargs)

    return call


def _inductor(graph: Any, inputs: Any) -> Any:
    """Compile with inductor, with everything that our operators depend on in its cache key.

    Inductor finds cached code by the operators of the model. Ours, mapped over clients, also depend
    on this package's code and on measurements.
    """
    from torch._inductor.compile_fx import compile_fx

    own = f"fedzmg {code_hash()} {bits_are_kept()} {convolution.choices()}"
    config = torch.compiler.config
    with config.patch(cache_key_tag=f"{config.cache_key_tag} {own}"):  # type: ignore[attr-defined]
        return compile_fx(graph, inputs)


APART = 16  # alignment in bytes of the parts of a plan
WARM_UPS = 2  # runs before a capture: libraries set themselves up, the compiler compiles
MOST_LOSSES = 16
_LOSSES: dict[Any, Callable[..., tuple[Tensor, Tree]]] = {}
"""Compiled losses by everything that they depend on, the last used one at the end."""


class Plan(NamedTuple):
    """Batches of a round on the device: ``[client, step, ...]``."""

    indices: Tensor
    weights: Tensor
    closes: Tensor
    keys: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, program: Program, padded: Padded) -> "Plan":
        plan = cls(*(torch.from_numpy(part).to(program.device) for part in padded))
        return plan._replace(weights=plan.weights.to(program.dtype))

    def ending(self, t: int) -> Tensor:
        """Return a flag per client: whether its epoch ends with step ``t``."""
        return self.closes[:, t] & (self.lengths > t)


class ClientState(NamedTuple):
    """Tensors that a step works on, one row per client."""

    numbers: dict[str, Tensor]
    context: ClientContext
    work: Work


class _Code(NamedTuple):
    """The parts of a step, which are compiled one at a time."""

    loss: Callable[..., tuple[Tensor, Tree]]
    next_point: Callable[..., Any]
    advance: Callable[..., None]


@dataclass
class _Buffers:
    """Buffers for one number of clients, and the graphs over them."""

    state: ClientState
    plan: Plan
    block: Tensor  # bytes of the plan, which one copy fills
    empty: Padded  # the plan's form on the host
    time: Tensor
    even: bool = False  # whether all clients of the round train as many steps
    # By number of rows, and whether they are even.
    steps: dict[tuple[int, bool], Callable[[], None]] = field(default_factory=dict)


class StepGraphs:
    """Runs the steps of a round by replaying CUDA graphs."""

    def __init__(self, program: Program, *, compiled: bool) -> None:
        self._program, self._compiled = program, compiled
        self._buffers: dict[int, _Buffers] = {}
        self._pool: Any = None

    def rows_for(self, clients: int) -> int:
        """Count the rows to compute for a number of clients.

        Buffers that are less than twice too wide are used again: capturing and compiling take
        longer than some extra rows. Wider ones are halved, so a shrinking pack has few widths.
        """
        rows = min((rows for rows in self._buffers if rows >= clients), default=clients)
        while rows >= 2 * clients:
            rows = -(-rows // 2)
        return rows

    def state(self, clients: int) -> ClientState | None:
        """Return the buffers of so many clients, if there are any."""
        buffers = self._buffers.get(clients)
        return None if buffers is None else buffers.state

    def load(
        self, padded: Padded, state: ClientState, widths: Iterable[int]
    ) -> tuple[ClientState, Plan]:
        """Copy a round into the buffers and return them; capture missing graphs first."""
        clients, steps, _ = padded.indices.shape
        buffers = self._buffers.get(clients)
        if buffers is None or steps > buffers.plan.indices.shape[1]:
            buffers = self._buffers[clients] = self._allocate(padded, state)
        # A mask is nearly free once compiled, and one graph per width is worth more.
        ends = self._compiled or self._program.rule.uses_epoch_end
        buffers.even = not ends and bool((padded.lengths == steps).all())
        missing = [width for width in widths if (width, buffers.even) not in buffers.steps]
        if missing and state is buffers.state:
            state = copied(state)  # captures take steps in the buffers
        for width in missing:
            buffers.steps[width, buffers.even] = self._capture(buffers, width)
        if state is not buffers.state:
            copy_all(leaves(buffers.state), leaves(state))
        cuda = buffers.block.is_cuda  # which copies page-locked memory without waiting
        host = torch.zeros(len(buffers.block), dtype=torch.uint8, pin_memory=cuda)
        for target, part in zip(_parts(host.numpy(), buffers.empty), padded, strict=True):
            (target[:, :steps] if part.ndim > 1 else target)[...] = part
        buffers.block.copy_(host, non_blocking=True)
        buffers.time.zero_()
        return buffers.state, buffers.plan

    def replay(self, clients: int, width: int) -> None:
        """Run one step of the first ``width`` clients."""
        buffers = self._buffers[clients]
        buffers.steps[width, buffers.even]()

    def _allocate(self, padded: Padded, state: ClientState) -> _Buffers:
        clients, steps, batch = padded.indices.shape
        shape = clients, max(steps, self._program.longest), batch
        empty = Padded._make(np.zeros(shape[: part.ndim], part.dtype) for part in padded)
        if self._program.dtype != torch.float64:
            empty = empty._replace(weights=empty.weights.astype(np.float32))
        size, device = sum(-(-part.nbytes // APART) * APART for part in empty), self._program.device
        block = torch.zeros(size, dtype=torch.uint8, device=device)
        plan = Plan(*_parts(block, [torch.from_numpy(part) for part in empty]))
        own = tree_map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), state)
        return _Buffers(own, plan, block, empty, plan.lengths.new_zeros(()))

    def _capture(self, buffers: _Buffers, width: int) -> Callable[[], None]:
        state, plan = row(buffers.state, slice(width)), row(buffers.plan, slice(width))
        plain = _code(self._program, masked=not buffers.even)
        if self._program.device.type != "cuda":  # the same step, called instead of replayed
            code = self._compile(plain, plan) if self._compiled else plain
            return lambda: _step(self._program, code, state, plan, buffers.time)

        def warm_up(code: _Code) -> None:
            buffers.time.zero_()  # there may be fewer steps to train than to warm up with
            _step(self._program, code, state, plan, buffers.time)

        stream = torch.cuda.Stream(self._program.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Once without the compiler: layers measure which kernels suit them.
            warm_up(plain)
            code = self._compile(plain, plan) if self._compiled else plain
            for _ in range(WARM_UPS):
                warm_up(code)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._pool):
            _step(self._program, code, state, plan, buffers.time)
        self._pool = self._pool or graph.pool()
        return graph.replay

    def _compile(self, plain: _Code, plan: Plan) -> _Code:
        """Compile a step; algorithms that train a task one after another share its losses."""
        program, goal = self._program, self._program.objective
        shapes = tuple(part.shape for part in (plan.indices, *leaves(program.data.examples)))
        task = goal.model.source, goal.loss, goal.layers_in, program.prepare, program.dtype
        own = program.rule if program.rule.own_loss else None
        key = (*task, program.device, shapes, precision(), bits_are_kept(), own)
        try:
            loss = _LOSSES.pop(key, None) or compile_apart(plain.loss)
            _LOSSES[key] = loss
        except TypeError:  # a user's function that has no hash
            loss = compile_apart(plain.loss)
        if len(_LOSSES) > MOST_LOSSES:
            del _LOSSES[next(iter(_LOSSES))]
        return _Code(loss, compile_apart(plain.next_point), compile_apart(plain.advance))


def _parts(block: Any, like: Iterable[Any]) -> list[Any]:
    """Return arrays or tensors of these forms in a block of bytes."""
    found, first = [], 0
    for part in like:
        found.append(block[first : first + part.nbytes].view(part.dtype).reshape(part.shape))
        first += -(-part.nbytes // APART) * APART
    return found


def _step(program: Program, code: _Code, state: ClientState, plan: Plan, time: Tensor) -> None:
    known = (state.numbers, state.context) if program.rule.own_loss else ()
    own = plan, time, *program.data.examples, *known

    def gradient(point: Tree) -> tuple[Tensor, Tree]:
        return eager_gradient(lambda p, _: code.loss(dict(p.items()), *own), point, None)

    losses, grad = gradient(state.work.params)
    changed: tuple[State, ...] = ()
    with torch.no_grad():
        for _ in range(program.rule.gradients_per_step - 1):
            scratch = changed[0] if changed else state.work.scratch
            point, scratch = code.next_point(
                state.numbers, state.context, state.work.params, scratch, grad
            )
            changed = (scratch,)
            with torch.enable_grad():
                grad = gradient(point)[1]
        now = state.numbers, state.context, state.work, grad, losses, plan.lengths, time
        code.advance(*now, *changed)
        time.add_(1)


def _code(program: Program, *, masked: bool) -> _Code:
    rule, objective = program.rule, program.objective
    prepare, dtype = program.prepare, program.dtype
    keyed, losses_of = objective.model.needs_key, local.mapped_losses(program)
    dependent = objective.model.norms.dependent

    def losses(
        params: dict[str, Tensor], plan: Plan, time: Tensor, x: Inputs, y: Tensor, *own: Any
    ) -> tuple[Tensor, Tree]:
        at = time.reshape(1)
        indices = plan.indices.index_select(1, at).squeeze(1)
        weights = plan.weights.index_select(1, at).squeeze(1).to(dtype)
        key = plan.keys.index_select(1, at).squeeze(1) if keyed else ()
        real = weights > 0 if dependent else ()
        batch = Batch(prepare(row(x, indices), dtype), y[indices], weights, key, real)
        # Compiled layers swap themselves: the compiler cannot trace all that the mode sees.
        swaps = contextlib.nullcontext() if torch.compiler.is_compiling() else MappedLayers()
        with swaps:
            return losses_of(Tree(params), batch, *own)

    def next_point(numbers: Any, *own: Any) -> Any:
        return map_rule(rule, lambda one, *rest: one.next_point(*rest), numbers, *own)

    def advance(
        numbers: Any, context: ClientContext, work: Work, grad: Tree, loss: Tensor, lengths: Tensor,
        time: Any, *changed: State,
    ) -> None:  # fmt: skip
        """Update the model and the tallies in place."""
        active = (lengths > time) & work.active if masked else None
        flags = () if active is None else (active,)
        own: tuple[Any, ...] = (context, work.params, work.scratch, grad, *flags)
        if changed:  # by the first gradients of the batch
            before = (*flags, work.scratch) if flags else ()
            own = (context, work.params, *changed, grad, *before)
        params, scratch = map_rule(rule, local.step, numbers, *own)
        after = local.count(work, loss, params, scratch, active)
        if masked:  # and so maybe compiled: parts of a foreach kernel would read what others write
            tree_map(lambda old, new: old.copy_(new), work, after)
            return
        copy_all(leaves(work), leaves(unshared(after, work)))  # a rule may keep its last model

    return _Code(losses, next_point, advance)
