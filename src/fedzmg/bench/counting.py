"""Operations and bytes of one local step of one client, counted, not measured."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedzmg.contract import Algorithm, ClientContext, FullPass
from fedzmg.models.objective import Batch
from fedzmg.tasks.task import Task
from fedzmg.tree import leaves, num_bytes


class Cost(NamedTuple):
    """What one step of one client cannot do without."""

    flops: int
    """Operations of its matrix products and convolutions, forward and backward."""
    bytes: int
    """Bytes of its parameters, gradients, state and kept activations, each moved as often as
    separate passes forward, backward and update must move it."""


def step_cost(task: Task, algorithm: Algorithm) -> Cost:
    """Count a step on a batch of the task's own size."""
    params = task.model.params()
    dtype = next(iter(params.values())).dtype
    size = task.protocol.batch_size
    rows = torch.arange(size) % task.train.examples.size
    x, y = (column[rows] for column in task.train.examples)
    key: Any = torch.zeros((), dtype=torch.int64) if task.model.needs_key else ()
    batch = Batch(task.prepare(x, dtype), y, torch.full((size,), 1 / size), key)
    tracked = params.map(lambda leaf: leaf.detach().clone().requires_grad_())
    own = {leaf.untyped_storage().data_ptr() for leaf in leaves(tracked)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = max(kept.get(place, 0), tensor.numel() * tensor.element_size())
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = task.objective.train(tracked, batch)
        torch.autograd.grad(loss, list(tracked.values()), allow_unused=True)
    model = num_bytes(params)
    fitted = algorithm.for_layout(task.model.layout)
    rule, server = fitted.client, fitted.server
    shared = server.share(server.init(params))
    context = ClientContext(
        params, shared, rule.init_memory(params), torch.tensor(1), torch.tensor(size)
    )
    full_pass = FullPass(torch.zeros(()), params.zeros()) if rule.full_pass != "never" else ()
    state = sum(t.numel() * t.element_size() for t in leaves(rule.begin(context, full_pass)))
    # Weights: read forward, read backward, read and written by the update. Gradients: written,
    # read. State: read, written. Activations: written forward, read backward.
    moved = 4 * model + 2 * model + 2 * state + 2 * sum(kept.values())
    return Cost(int(counter.get_total_flops()), int(moved))
