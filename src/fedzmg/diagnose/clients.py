"""Gradients and local updates of some clients of a task, a few clients at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedzmg.algorithms.fedzmg import ZeroMean
from fedzmg.algorithms.sgd import SGD
from fedzmg.contract import (
    ClientContext,
    ClientRule,
    FullPass,
    FullPassTiming,
    State,
    Upload,
    numbers,
    structure,
)
from fedzmg.data.federated import Examples, FederatedData
from fedzmg.data.plan import ClientBatch, Stream, local_stream
from fedzmg.diagnose.measure import Part
from fedzmg.engine.round import Broadcast, Chunk, Program
from fedzmg.engine.sequential import Sequential
from fedzmg.engine.vectorized import Vectorized
from fedzmg.errors import InputError
from fedzmg.models.kernels import ONEDNN_BY_DEFAULT, onednn, rounding
from fedzmg.models.objective import PrepareFunction
from fedzmg.seeds import stream
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree, row

MEMORY = 128 * 2**20
"""Bytes that the models and gradients of clients side by side may take."""
MOST_CLIENTS = 8
LOOK_SIZE = 32
"""Examples of a client in one pass."""


class Where(NamedTuple):
    """What computes, and how precisely."""

    device: torch.device
    dtype: torch.dtype


def sample(task: Task, clients: int, seed: int) -> npt.NDArray[np.int64]:
    """Positions of some clients that have examples, drawn by a seed, in ascending order."""
    there = np.flatnonzero(task.train.counts)
    draw = stream(seed, "probe", "diagnose").permutation(len(there))[:clients]
    return np.sort(there[draw]).astype(np.int64)


def excerpt(
    task: Task, clients: npt.NDArray[np.int64], most: int, seed: int
) -> tuple[Task, npt.NDArray[np.float64]]:
    """The task with these clients alone and at most so many examples of each, and their sizes."""
    data, picked, counts = task.train, [], []
    for client in clients.tolist():
        first, last = (int(o) for o in data.offsets[client : client + 2])
        rng = stream(seed, "probe", "diagnose", client)
        own = np.sort(rng.permutation(last - first)[:most])
        picked.append(first + own)
        counts.append(len(own))
    places = torch.from_numpy(np.concatenate(picked))
    x, y = data.examples
    part = FederatedData(
        Examples(x[places], y[places]),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        tuple(data.names[client] for client in clients.tolist()),
    )
    # Fewer clients than a cohort are no fault here: nothing is trained on the excerpt.
    protocol = replace(task.protocol, cohort=1)
    return replace(task, train=part, protocol=protocol, test_owners=None), data.counts[
        clients
    ].astype(np.float64)


def gradients(
    task: Task, params: Tree, weights: npt.NDArray[np.float64], where: Where
) -> Iterator[Part]:
    """The gradient of every client's mean loss, dropout off, with the weights of the clients."""
    size = min(LOOK_SIZE, int(task.train.counts.max()))
    nothing = Stream(
        np.zeros((0, size), np.int64), np.zeros(0, np.int64), np.zeros(0, np.bool_),
        np.zeros(0, np.int64),
    )  # fmt: skip
    entries = [ClientBatch(0, k, int(n), nothing) for k, n in enumerate(task.train.counts)]
    yield from _uploads(task, FullGradient(), entries, params, weights, where)


def updates(
    task: Task,
    params: Tree,
    clients: npt.NDArray[np.int64],
    where: Where,
    *,
    lr: float,
    project: bool,
    seed: int,
) -> Iterator[Part]:
    """How far clients move in their local steps of one round of plain SGD, ``w - w_k``."""
    data, entries = task.train, []
    for client in clients.tolist():
        first, last = (int(o) for o in data.offsets[client : client + 2])
        steps = local_stream(task.protocol.batching, seed, 1, client, 0, first, last - first)
        if len(steps):
            entries.append(ClientBatch(0, client, last - first, steps))
    rule: ClientRule = ZeroMean(SGD(lr=lr)) if project else SGD(lr=lr)
    sizes = np.array([entry.examples for entry in entries], dtype=np.float64)
    yield from _uploads(task, rule, entries, params, sizes, where)


@final
@dataclass(frozen=True)
class FullGradient(ClientRule):
    """A client that sends the gradient of all of its examples and makes no step."""

    @property
    def full_pass(self) -> FullPassTiming:
        return "start"

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        del context
        assert isinstance(full_pass, FullPass)
        return full_pass.grad

    def step(
        self, context: ClientContext, params: Tree, scratch: State, grad: Tree
    ) -> tuple[Tree, State]:
        del context, grad
        return params, scratch

    def finish(
        self, context: ClientContext, params: Tree, scratch: State, steps: Tensor
    ) -> tuple[Upload, State]:
        del params, steps
        return Upload(scratch), context.memory


def _uploads(
    task: Task,
    rule: ClientRule,
    entries: Sequence[ClientBatch],
    params: Tree,
    weights: npt.NDArray[np.float64],
    where: Where,
) -> Iterator[Part]:
    fitted = rule.for_layout(task.model.layout)
    program = Program(
        rule=structure(fitted),
        objective=replace(task.objective, model=task.model.to(where.device, where.dtype)),
        data=task.train.to(where.device, where.dtype),
        prepare=task.prepare,
        dtype=where.dtype,
        device=where.device,
        full_pass_size=LOOK_SIZE,
    )
    values = {
        path: torch.tensor([value], dtype=where.dtype, device=where.device)
        for path, value in numbers(fitted).items()
    }
    own = params.map(lambda leaf: leaf.to(where.device, where.dtype)[None])
    sent = Broadcast(own, (), values, torch.ones(1, dtype=torch.int64, device=where.device))
    # Model, momentum-sized scratch and gradient of each client are there at once.
    size = 4 * sum(leaf.numel() * leaf.element_size() for leaf in own.values())
    width = max(2, min(MOST_CLIENTS, MEMORY // size))
    for first in range(0, len(entries), width):
        for chunk in _train(program, list(entries[first : first + width]), sent):
            places = first + np.array(chunk.batches)
            yield row(chunk.outcomes.upload.delta, chunk.rows), weights[places]


def _train(program: Program, entries: list[ClientBatch], sent: Broadcast) -> list[Chunk]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(onednn(ONEDNN_BY_DEFAULT))
        stack.enter_context(rounding("float32"))
        try:
            return list(Vectorized(program).train(entries, sent, ()))
        except InputError:  # a model that does not map over clients: one after another
            return list(Sequential(program).train(entries, sent, ()))


@dataclass(frozen=True)
class Centred:
    """Inputs whose own mean is subtracted, over everything that belongs to one example."""

    prepare: PrepareFunction
    axes: int
    """How many of the last axes belong to one example."""

    def __call__(self, x: Tensor, dtype: torch.dtype, /) -> Tensor:
        """Convert a batch of stored inputs."""
        made = self.prepare(x, dtype)
        return made - made.mean(tuple(range(-self.axes, 0)), keepdim=True)


def centred(task: Task) -> Task | None:
    """The task with inputs centred one by one; None for inputs that are no real numbers."""
    made = _some_inputs(task, 2)
    if not made.is_floating_point() or made.ndim < 2:
        return None
    return replace(task, prepare=Centred(task.prepare, made.ndim - 1))


def input_share(task: Task, examples: int = 2048) -> float | None:
    """Share of the inputs' energy that is the mean of each example; None for token ids."""
    x = _some_inputs(task, examples)
    if not x.is_floating_point() or x.ndim < 2:
        return None
    flat = x.double().flatten(1)
    energy = float(flat.square().sum())
    return flat.shape[1] * float(flat.mean(1).square().sum()) / energy if energy > 0 else None


def _some_inputs(task: Task, examples: int) -> Tensor:
    x = task.train.examples.x
    every = max(1, len(x) // examples)
    dtype = next(iter(task.model.params().values())).dtype
    # A copy: a prepare function may work in place.
    return task.prepare(x[::every][:examples].clone(), dtype)
