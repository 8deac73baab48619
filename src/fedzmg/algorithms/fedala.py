"""FedALA (Zhang et al. 2023): clients learn how much of the common model they take over.

With ``w`` the received model, ``w_k`` the client's model after its last round and ``W`` weights
between 0 and 1 for the last ``layers`` of the model::

    client:  t   <- w_k + (w - w_k) W              last layers; others start at w
             W   <- clip(W - weight_lr g(t) (w - w_k), 0, 1)  one epoch; t follows
             w_k <- w_k - lr g                     epochs of the protocol, from t
    server:  w   <- w - server_lr sum_k p_k (w - w_k)

Travels down: the model. Travels up: the model difference. Client state: w_k and W. The first round
of a client is FedAvg's. In its second one, W is learned for ``start_epochs``. A client uses t with
the newest common model.

Differences from the paper: W is learned on all of the client's data instead of 80 %, the first time
for a fixed number of epochs instead of until the loss is steady.
Degenerate cases: ``weight_lr = 0`` is FedAvg. Inside ``ZeroMean`` column sums are not conserved,
because entries are mixed one by one.
"""

from dataclasses import field, replace
from typing import Self

import torch
from torch import Tensor

from fedzmg.algorithms.ditto import OwnModel, OwnModelClient
from fedzmg.algorithms.fedavg import Average
from fedzmg.contract import Algorithm, Layout, Number, number, rule_class, whole
from fedzmg.messages import ClientContext, FullPass, Result, Stepped, Upload
from fedzmg.parts import matches
from fedzmg.tree import State, Tree
from fedzmg.wrappers.parts import filled, pick
from fedzmg.wrappers.wrapper import known


@rule_class
class FedALA(OwnModelClient):
    """SGD from a learned mixture of the received model and the client's own."""

    uses_epoch_end = True

    lr: Number = number(0.1, above=0, doc="client learning rate")
    weight_lr: Number = number(1.0, low=0, doc="learning rate of the mixture's weights")
    layers: int = whole(1, low=1, doc="last layers that are mixed")
    start_epochs: int = whole(1, low=1, doc="epochs for the weights when they are first learned")
    mixed: tuple[str, ...] | None = field(default=None, repr=False, metadata={"derived": True})
    """Names of the parameters that are mixed, once the model is known."""

    def for_layout(self, layout: Layout) -> Self:
        return replace(self, mixed=tuple(matches(f"last:{self.layers}", layout)))

    @property
    def extra_epochs(self) -> int:
        return self.start_epochs

    def _mixed(self, tree: Tree) -> Tree:
        return pick(tree, known(self, self.mixed))

    def _mixture(self, params: Tree, own: Tree, weights: Tree) -> Tree:
        """Return the received model with its last layers mixed."""
        mixed = {n: own[n] + (params[n] - own[n]) * weight for n, weight in weights.items()}
        return filled(Tree(mixed), params)

    def init_memory(self, params: Tree) -> State:
        rounds = next(iter(params.values())).new_zeros(())
        return params.zeros(), self._mixed(params).map(torch.ones_like), rounds

    def _own(self, params: Tree, memory: State) -> Tree:
        return OwnModel(memory[0], memory[2]).or_else(params)

    def start(self, context: ClientContext) -> Tree:
        own = self._own(context.params, context.memory)
        return self._mixture(context.params, own, context.memory[1])

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        return torch.zeros_like(context.num_examples), context.memory[1]

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        epoch, weights = scratch
        own = self._own(context.params, context.memory)
        mixing = epoch < self.start_epochs
        learning = epoch < torch.where(context.memory[2] == 1, self.start_epochs, 1)
        slope = self.weight_lr * self._mixed(grad)
        apart = self._mixed(context.params) - self._mixed(own)
        new = (weights - slope * apart).map(lambda leaf: leaf.clamp(0, 1))
        weights = new.map(lambda n, o: torch.where(learning, n, o), weights)
        start, trained = self._mixture(context.params, own, weights), params - self.lr * grad
        return start.map(lambda s, t: torch.where(mixing, s, t), trained), (epoch, weights)

    def end_epoch(self, scratch: State, loss: Tensor) -> tuple[State, Tensor | bool]:
        return (scratch[0] + 1, scratch[1]), True

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        return Upload(context.params - params), (params, scratch[1], context.memory[2] + 1)

    def personal_model(self, params: Tree, memory: State) -> Tree:
        return self._mixture(params, self._own(params, memory), memory[1])


ALGORITHMS = (Algorithm("fedala", FedALA(), Average()),)
