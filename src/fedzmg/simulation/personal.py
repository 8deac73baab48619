"""Clients' own models: personal ones, and models after fine-tuning on a client's training data."""

import functools
from collections.abc import Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedzmg.contract import ClientRule, Number, bind, chain, number, rule_class
from fedzmg.data.federated import Examples
from fedzmg.data.plan import ClientBatch, local_stream
from fedzmg.engine.local import Broadcast
from fedzmg.engine.sequential import Sequential
from fedzmg.engine.vectorized import Vectorized
from fedzmg.evaluation import CHUNK, total
from fedzmg.kernels import MappedLayers
from fedzmg.messages import ClientContext, Result, Stepped, Upload
from fedzmg.simulation.history import Watched
from fedzmg.tree import Inputs, State, Tree, row, vmap
from fedzmg.wrappers.parts import filled, pick
from fedzmg.wrappers.wrapper import rate_of

if TYPE_CHECKING:
    from fedzmg.simulation.rounds import Simulation

WIDTH = 64  # clients whose models are evaluated or fine-tuned at once
EXAMPLES = 256  # examples of every client that are evaluated at once


@rule_class
class FineTune(ClientRule):
    """Plain SGD on the model that a client keeps in its memory."""

    lr: Number = number(0.1, above=0, doc="learning rate")
    statistics: tuple[str, ...] = field(default=(), metadata={"derived": True})
    """Running statistics, which arrive in place of a gradient."""

    def start(self, context: ClientContext) -> Tree:
        model: Tree = context.memory
        return model

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        return filled(pick(grad, self.statistics), params - self.lr * grad), scratch

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        return Upload(Tree({})), params


def own_metrics(simulation: "Simulation", watched: Watched, data: Examples) -> list[dict[str, Any]]:
    """Evaluate every trial's ``personal`` models, and ``tuned`` ones, if there are any."""
    kinds = {"personal": 0} if simulation.program.rule.is_personal else {}
    if simulation.task.protocol.fine_tune:
        kinds["tuned"] = simulation.task.protocol.fine_tune
    return [
        {name: _metric(simulation, watched, data, trial, epochs) for name, epochs in kinds.items()}
        for trial in range(len(simulation.trials))
    ]


def _metric(
    simulation: "Simulation", watched: Watched, data: Examples, trial: int, epochs: int
) -> npt.NDArray[np.float64]:
    """Compute the metric of each client's own model on its own examples."""
    found, ends = np.empty(len(watched.clients)), np.cumsum(watched.counts)
    numbers = row(simulation.client_numbers, trial)
    rule, params = bind(simulation.program.rule, numbers), row(simulation.snapshot.params, trial)
    # Clients of similar size are evaluated together, since all are padded to the largest.
    order = np.argsort(watched.counts, kind="stable")
    for first in range(0, len(order), WIDTH):
        chosen = order[first : first + WIDTH]
        clients = watched.clients[chosen].tolist()
        memory = simulation.read_memory([(trial, client) for client in clients])
        with torch.no_grad():
            mapped = vmap(lambda _, own: rule.personal_model(params, own))
            models: Tree = mapped(torch.arange(len(clients), device=simulation.device), memory)
        if epochs:
            models = _fine_tuned(simulation, trial, clients, models, epochs)
        own = [watched.positions[ends[i] - watched.counts[i] : ends[i]] for i in chosen]
        found[chosen] = _evaluate(simulation, models, data, own)
    return found


def _fine_tuned(
    simulation: "Simulation", trial: int, clients: Sequence[int], models: Tree, epochs: int
) -> Tree:
    """Train the models of some clients on their own training data, at the client learning rate."""
    chosen = simulation.trials[trial]
    trained = chosen.algorithm.client
    own = (getattr(rule, "fine_tuning_rate", None) for rule in chain(trained))
    rate = next(filter(None, own), None) or rate_of(trained) or 0.1
    rule = FineTune(statistics=simulation.task.model.statistics)
    program = replace(simulation.program, rule=rule, longest=0)
    batching = replace(simulation.task.protocol.batching, epochs=epochs)
    offsets = simulation.task.train.offsets
    batches = []
    for client in clients:
        first, last = (int(o) for o in offsets[client : client + 2])
        # Training has no round 0, so batches differ from those of training.
        stream = local_stream(batching, chosen.seed, 0, client, 0, first, last - first)
        batches.append(ClientBatch(0, client, last - first, stream))
    stamp = torch.zeros(1, dtype=torch.int64, device=simulation.device)
    numbers = {"lr": next(iter(models.values())).new_full((1,), float(rate))}
    broadcast = Broadcast(row(models, slice(0, 1)), (), numbers, stamp)
    engine = Sequential(program) if simulation.choice.path == "sequential" else Vectorized(program)
    tuned = models.map(torch.clone)
    for chunk in engine.train(batches, broadcast, models):
        for name, leaf in row(chunk.outcomes.memory, chunk.rows).items():
            tuned[name][chunk.batches] = leaf
    return tuned


def _evaluate(
    simulation: "Simulation", models: Tree, data: Examples, own: Sequence[npt.NDArray[np.int64]]
) -> npt.NDArray[np.float64]:
    program, metric = simulation.program, simulation.task.metric

    def one(params: Tree, x: Inputs, y: Tensor, counts: Tensor) -> Tensor:
        real = counts if program.objective.model.norms.always_dependent else ()
        values = metric.function(program.objective.outputs(params, x, real), y)
        if metric.pooled:
            return values
        values = values.double()
        return total(torch.where(counts if values.ndim == 1 else counts[:, None], values, 0.0))

    chunk = simulation.task.examples_at_once
    at_once = EXAMPLES if chunk == CHUNK else max(1, chunk // WIDTH)
    sizes = torch.tensor([len(part) for part in own])
    # Padding, which comes after the examples of a client, repeats a real example.
    places = pad_sequence([*map(torch.from_numpy, own)], True, float(own[0][0]))
    flags = torch.arange(places.shape[1]) < sizes[:, None]
    found = []
    with torch.no_grad(), MappedLayers():
        for part in zip(
            torch.split(places, at_once, 1), torch.split(flags, at_once, 1), strict=True
        ):
            at, mask = (values.to(simulation.device) for values in part)
            given = models, program.prepare(row(data.x, at), program.dtype), data.y[at], mask
            if simulation.choice.path == "sequential":  # the model may not map
                found.append(torch.stack([one(*row(given, i)) for i in range(len(own))]))
            else:
                found.append(vmap(one)(*given))
        if metric.pooled:
            rows = zip(torch.cat(found, 1), sizes.tolist(), strict=True)
            values = torch.stack([metric.pooled_value(part[:size]) for part, size in rows])
        else:
            values = metric.value(functools.reduce(torch.add, found).cpu(), sizes)
    return values.cpu().numpy()
