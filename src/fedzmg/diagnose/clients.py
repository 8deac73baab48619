"""Compute gradients and local updates of some clients, and the order in which layers are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.fedzmg import ZeroMean
from fedzmg.algorithms.mimelite import MimeLite
from fedzmg.contract import ClientRule, Layout, numbers, structure
from fedzmg.data.federated import Examples, FederatedData
from fedzmg.data.plan import ClientBatch, Stream, local_stream
from fedzmg.diagnose.measure import Part
from fedzmg.engine.local import Broadcast, Program, Sequential
from fedzmg.engine.vectorized import Vectorized
from fedzmg.errors import InputError
from fedzmg.models.kernels import ONEDNN_BY_DEFAULT, onednn, rounding
from fedzmg.models.objective import PrepareFunction
from fedzmg.seeds import stream
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree, row

MEMORY = 128 * 2**20
"""Memory limit for models and gradients of clients trained side by side, in bytes."""
MOST_CLIENTS = 8
PASS_SIZE = 32
"""Examples per forward pass."""


class Where(NamedTuple):
    """Device and precision."""

    device: torch.device
    dtype: torch.dtype


def sample(task: Task, clients: int, seed: int) -> npt.NDArray[np.int64]:
    """Draw clients that have examples; return their sorted positions."""
    present = np.flatnonzero(task.train.counts)
    drawn = stream(seed, "probe", "diagnose").permutation(len(present))[:clients]
    return np.sort(present[drawn]).astype(np.int64)


def excerpt(
    task: Task, clients: npt.NDArray[np.int64], most: int, seed: int
) -> tuple[Task, npt.NDArray[np.float64]]:
    """Restrict a task to some clients and examples; return it and the clients' full sizes."""
    data = task.train
    sizes = data.counts[clients]
    drawn = [
        stream(seed, "probe", "diagnose", client).permutation(size)[:most]
        for client, size in zip(clients.tolist(), sizes.tolist(), strict=True)
    ]
    rows = [data.offsets[client] + np.sort(own) for client, own in zip(clients, drawn, strict=True)]
    x, y = (column[torch.from_numpy(np.concatenate(rows))] for column in data.examples)
    part = FederatedData(
        Examples(x, y),
        np.cumsum([0, *map(len, drawn)], dtype=np.int64),
        tuple(data.names[client] for client in clients.tolist()),
    )
    # Nothing is trained on the excerpt: it may be smaller than a cohort.
    protocol = replace(task.protocol, cohort=1)
    made = replace(task, train=part, protocol=protocol, test_owners=None)
    return made, sizes.astype(np.float64)


def gradients(
    task: Task, params: Tree, weights: npt.NDArray[np.float64], where: Where
) -> Iterator[Part]:
    """Yield the gradients of every client's mean loss, without dropout, and the weights."""
    size = min(PASS_SIZE, int(task.train.counts.max()))
    none = np.zeros(0, np.int64)
    nothing = Stream(np.zeros((0, size), np.int64), none, np.zeros(0, np.bool_), none)
    entries = [ClientBatch(0, k, int(n), nothing) for k, n in enumerate(task.train.counts)]
    # Without local steps, MimeLite only uploads its full gradient.
    yield from _uploads(task, MimeLite(), entries, params, weights, where)


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
    """Yield the clients' updates ``w - w_k`` after one round of local SGD."""
    data, entries = task.train, []
    for client in clients.tolist():
        first, size = int(data.offsets[client]), int(data.counts[client])
        steps = local_stream(task.protocol.batching, seed, 1, client, 0, first, size)
        if len(steps):
            entries.append(ClientBatch(0, client, size, steps))
    rule: ClientRule = ZeroMean(SGD(lr=lr)) if project else SGD(lr=lr)
    sizes = np.array([entry.examples for entry in entries], dtype=np.float64)
    yield from _uploads(task, rule, entries, params, sizes, where)


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
        full_pass_size=PASS_SIZE,
    )
    values = {
        path: torch.tensor([value], dtype=where.dtype, device=where.device)
        for path, value in numbers(fitted).items()
    }
    own = params.map(lambda leaf: leaf.to(where.device, where.dtype)[None])
    sent = Broadcast(own, (), values, torch.ones(1, dtype=torch.int64, device=where.device))
    # Each client holds model, scratch, gradient and update at once.
    size = 4 * sum(leaf.numel() * leaf.element_size() for leaf in own.values())
    width = max(2, min(MOST_CLIENTS, MEMORY // size))
    for first in range(0, len(entries), width):
        batch = list(entries[first : first + width])
        with onednn(ONEDNN_BY_DEFAULT), rounding("float32"):
            try:
                chunks = list(Vectorized(program).train(batch, sent, ()))
            except InputError:  # the model cannot be vectorized over clients
                chunks = list(Sequential(program).train(batch, sent, ()))
        for chunk in chunks:
            positions = first + np.array(chunk.batches)
            upload = chunk.outcomes.upload
            yield row(upload.average or upload.delta, chunk.rows), weights[positions]


@dataclass(frozen=True)
class Centred:
    """Wrapper of a prepare function that subtracts each example's own mean."""

    prepare: PrepareFunction
    axes: int
    """Number of trailing axes of one example."""

    def __call__(self, x: Tensor, dtype: torch.dtype, /) -> Tensor:
        made = self.prepare(x, dtype)
        return made - made.mean(tuple(range(-self.axes, 0)), keepdim=True)


def centred(task: Task) -> Task | None:
    """Centre every input of a task; None for token ids."""
    made = _some_inputs(task, 2)
    return None if made is None else replace(task, prepare=Centred(task.prepare, made.ndim - 1))


def input_share(task: Task, examples: int = 2048) -> float | None:
    """Compute the mean component's share of the inputs' energy; None for token ids."""
    x = _some_inputs(task, examples)
    if x is None:
        return None
    flat = x.double().flatten(1)
    energy = float(flat.square().sum())
    return flat.shape[1] * float(flat.mean(1).square().sum()) / energy if energy > 0 else None


def _some_inputs(task: Task, examples: int) -> Tensor | None:
    x = task.train.examples.x
    every = max(1, len(x) // examples)
    dtype = next(iter(task.model.params().values())).dtype
    # A prepare function may work in place.
    made = task.prepare(x[::every][:examples].clone(), dtype)
    return made if made.is_floating_point() and made.ndim > 1 else None


def in_order_of_use(task: Task, params: Tree) -> Layout:
    """Order a model's layout by use; parameters without a part in the loss come last."""
    own = params.map(lambda leaf: leaf.detach().clone().requires_grad_())
    dtype = next(iter(own.values())).dtype
    x, y = Examples(*(c[:1].clone() for c in task.train.examples)).to(torch.device("cpu"), dtype)
    seen: list[str] = []
    for name, leaf in own.items():
        # A gradient is complete as soon as the first use of its parameter is differentiated.
        leaf.register_hook(lambda _, name=name: seen.append(name))  # type: ignore[no-untyped-call]
    with torch.enable_grad():
        loss = task.loss(task.model.evaluate(own, task.prepare(x, dtype)), y).sum()
        torch.autograd.backward(loss)
    layout = task.model.layout
    return {name: layout[name] for name in dict.fromkeys([*reversed(seen), *layout])}
