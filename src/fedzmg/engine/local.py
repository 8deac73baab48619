"""Input and output of an engine, and local training as four pure functions.

Both engines run exactly these functions. ``sequential`` calls them client by client on
unpadded batches; ``vectorized`` maps them over clients. The gradient is taken outside of
:func:`step`, because the two engines differentiate in different ways.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedzmg.contract import ClientRule, map_rule
from fedzmg.data.federated import Examples, FederatedData
from fedzmg.data.plan import ClientBatch
from fedzmg.messages import Asked, BatchOutputs, ClientContext, FullPass, FullPassTiming, Upload
from fedzmg.models.gradients import eager_gradient
from fedzmg.models.objective import Batch, Objective, PrepareFunction
from fedzmg.tree import State, Tree, row, tree_map, vmap

T = TypeVar("T")
BatchT = TypeVar("BatchT")


class Work(NamedTuple):
    """One client's local training in progress."""

    params: Tree
    scratch: State
    steps: Tensor
    loss: Tensor  # sum of the batch losses since the epoch began
    epoch_steps: Tensor
    total_loss: Tensor
    active: Tensor


def add_full_pass(
    loss: Callable[[Tree, BatchT], Tensor], params: Tree, batches: Iterable[BatchT], start: Tensor,
    timing: FullPassTiming, gradient: Callable[..., tuple[Tensor, Tree]] = eager_gradient,
) -> FullPass:  # fmt: skip
    """Add losses to ``start``, and gradients unless the rule needs the loss alone."""
    grad = params.zeros() if timing == "start" else Tree({})
    for batch in batches:
        if timing != "start":
            with torch.no_grad():
                start = start + loss(params, batch)
        else:
            part, slope = gradient(loss, params, batch)
            start, grad = start + part, grad + slope
    return FullPass(start, grad)


def start(rule: ClientRule, context: ClientContext, full_pass: FullPass | tuple[()]) -> Work:
    """Begin a client's local training."""
    zero = torch.zeros_like(context.num_examples)
    no_loss = next(iter(context.params.values())).new_zeros(())
    scratch = rule.begin(context, full_pass)
    return Work(rule.start(context), scratch, zero, no_loss, zero, no_loss, zero == 0)


def keep(active: Tensor, new: T, old: T) -> T:
    """Take ``new`` for active clients and ``old`` for the others, without a branch."""
    return tree_map(lambda n, o: torch.where(active, n, o), new, old)


def client_loss(
    rule: ClientRule, objective: Objective, context: ClientContext, params: Tree, batch: Batch
) -> tuple[Tensor, Tree]:
    """Compute the rule's own loss of a batch, and running statistics after it."""
    compute = objective.with_features if "features" in rule.needs else objective.without_features
    moved: dict[str, Tensor] = {}
    outputs, features = compute(params, batch, moved)
    with torch.no_grad():
        models = [model.map(Tensor.detach) for model in rule.references(context)]
        others = [compute(model, batch) for model in models]
    references = tuple(zip(*others, strict=True)) or ((), ())
    own = BatchOutputs(objective.loss(outputs, batch.y), outputs, batch.y, features, *references)
    return (rule.loss(context, own) * batch.weights).sum(), Tree(moved)


def step(
    rule: ClientRule, context: ClientContext, params: Tree, scratch: State, grad: Tree,
    active: Tensor | None = None, before: State = None,
) -> tuple[Tree, State]:  # fmt: skip
    """Run one local step; ``active=None`` promises that the client is active.

    ``before`` is the state before the batch, if its first gradients have changed it.
    """
    after = rule.step(context, params, scratch, grad)
    if active is None:
        return after
    return keep(active, after, (params, scratch if before is None else before))


def full_step(
    rule: ClientRule, apply: Callable[..., Any], gradient: Callable[[Tree], tuple[Tensor, Tree]],
    context: ClientContext, params: Tree, scratch: State, *active: Tensor,
) -> tuple[Tensor, Tree, State]:  # fmt: skip
    """Compute the gradients of a batch and run a step; ``apply`` calls functions of a rule."""
    loss, grad = gradient(params)
    if rule.gradients_per_step == 1:
        return loss, *apply(step, context, params, scratch, grad, *active)
    state = scratch
    for _ in range(rule.gradients_per_step - 1):
        point, state = apply(lambda one, *own: one.next_point(*own), context, params, state, grad)
        grad = gradient(point)[1]
    mask = (*active, scratch) if active else ()
    return loss, *apply(step, context, params, state, grad, *mask)


def count(
    work: Work, loss: Tensor, params: Tree, scratch: State, active: Tensor | None = None
) -> Work:
    """Count a step in the tallies of active clients, which stay outside of the map."""
    one = torch.ones_like(work.steps) if active is None else active.to(work.steps.dtype)
    part = loss if active is None else torch.where(active, loss, torch.zeros_like(loss))
    steps, epoch_steps = work.steps + one, work.epoch_steps + one
    total = work.total_loss + part
    return Work(params, scratch, steps, work.loss + part, epoch_steps, total, work.active)


def move(work: Work, loss: Tensor, params: Tree, scratch: State) -> Work:
    """Replace the model after a step, for rules that need no tallies of an epoch."""
    total = work.total_loss + loss
    return Work(params, scratch, work.steps, work.loss, work.epoch_steps, total, work.active)


def close_epoch(
    rule: ClientRule, work: Work, closes: Tensor, full_loss: Tensor | None = None
) -> Work:
    """Let the rule react to the end of an epoch, for clients whose epoch ends here."""
    mean = work.loss / work.epoch_steps.clamp(min=1)
    scratch, continues = rule.end_epoch(work.scratch, mean if full_loss is None else full_loss)
    loss, steps = torch.zeros_like(work.loss), torch.zeros_like(work.epoch_steps)
    active = work.active & continues
    closed = work._replace(scratch=scratch, loss=loss, epoch_steps=steps, active=active)
    return keep(closes & work.active, closed, work)


class Outcome(NamedTuple):
    """Result of one client's local training."""

    upload: Upload
    memory: State
    steps: Tensor
    loss: Tensor  # mean batch loss over the local training


def finish(
    rule: ClientRule, context: ClientContext, work: Work, *, subtract: bool = True
) -> Outcome:
    """Turn finished work into an upload and a memory; the merger may subtract models itself."""
    upload, memory = Upload(work.params), context.memory
    if subtract:
        upload, memory = rule.finish(context, work.params, work.scratch, work.steps)
    return Outcome(upload, memory, work.steps, work.total_loss / work.steps.clamp(min=1))


@dataclass(frozen=True)
class Program:
    """Everything about local training that does not change from round to round."""

    rule: ClientRule  # its structure: its numbers arrive per trial, as tensors
    objective: Objective
    data: FederatedData
    prepare: PrepareFunction
    dtype: torch.dtype
    device: torch.device
    full_pass_size: int = 256
    longest: int = 0  # steps of the longest stream that any client can have
    label_counts: Tensor | tuple[()] = ()  # examples of each class by client, if a rule needs them

    def batch_inputs(self, indices: Tensor) -> Examples:
        """Gather examples by position and convert stored inputs to model inputs."""
        x, y = self.data.examples
        if indices.ndim == 1 and isinstance(x, Tensor):  # three times as fast as indexing
            x, y = x.index_select(0, indices), y.index_select(0, indices)
        else:
            x, y = row((x, y), indices)
        return Examples(self.prepare(x, self.dtype), y)

    def facts(self, batches: Sequence[ClientBatch]) -> list[list[int]]:
        """Return numbers of examples; if the rule needs more, also clients, keys and steps."""
        facts = [[b.examples for b in batches]]
        if self.rule.needs:
            facts += [[b.client for b in batches], [b.key for b in batches]]
            facts.append([len(b.stream) for b in batches])
        return facts

    def context(
        self, broadcast: "Broadcast", memory: State, examples: Tensor, *others: Tensor
    ) -> ClientContext:
        """Put together what clients know; the last arguments are those of :meth:`facts`."""
        asked: Asked | tuple[()] = ()
        if others:
            needs = self.rule.needs
            counts = self.label_counts[others[0]] if "label_counts" in needs else ()
            known = zip(Asked._fields, (*others, counts), strict=True)
            asked = Asked(*(value if name in needs else () for name, value in known))
        sent = broadcast.params, broadcast.shared, memory, broadcast.round
        return ClientContext(*sent, examples, asked)


def mapped_losses(program: Program) -> Callable[..., tuple[Tensor, Tree]]:
    """Build the function of all clients' losses; their own ones need numbers and context."""
    rule, objective = program.rule, program.objective
    if not rule.own_loss:
        return vmap(objective.train)

    def one(rule: ClientRule, *own: Any) -> tuple[Tensor, Tree]:
        return client_loss(rule, objective, *own)

    return lambda params, batch, *known: map_rule(rule, one, *known, params, batch)


class Broadcast(NamedTuple):
    """Message of every trial to its clients; first axis trials."""

    params: Tree
    shared: State
    numbers: Mapping[str, Tensor]
    round: Tensor


class Models(NamedTuple):
    """Flat models of clients, one per row, and parts of the global model that they began with."""

    rows: Tensor
    origin: list[Tensor]


class Chunk(NamedTuple):
    """Outcomes of some clients of a round; batch ``batches[i]`` has row ``rows[i]``."""

    batches: list[int]  # positions in the round's list of client batches
    rows: list[int]
    outcomes: Outcome
    models: Models | None = None  # given if ``delta`` has models that are not yet subtracted


class Engine(Protocol):
    """Runs local training for the clients of a round."""

    def train(
        self, batches: list[ClientBatch], broadcast: Broadcast, memory: State
    ) -> Iterator[Chunk]:
        """Yield the outcome of every batch exactly once; ``memory`` has one row per batch."""
