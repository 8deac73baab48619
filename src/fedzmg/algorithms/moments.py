"""Running moments of the pseudo-gradient and steps made of them, for adaptive servers.

``g`` is the averaged ``w_global - w_local`` of a round, ``t`` the number of server steps done.
A round that lost every upload is not a step.

Algorithms that share the state ``s`` of an optimiser between server and clients use two more rules.
A client that was not sampled gets the new state the next time::

    client:  s_k <- s                                 then the rule's own steps change s_k and w_k
    server:  w, s <- means of w_k and s_k over the cohort, weighted alike
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedzmg.contract import ClientRule, Number, ServerRule
from fedzmg.messages import ClientContext, Cohort, FullPass, Result, Upload
from fedzmg.tree import State, Tree


class Moments(NamedTuple):
    """Server state: first and second moment of the pseudo-gradient, number of steps done."""

    first: Tree
    second: Tree
    steps: Tensor


class Statistics(NamedTuple):
    """Server state of rules that may keep one moment only; a moment that is not kept is ``()``."""

    first: State
    second: State


def no_moments(params: Tree, second: Number = 0.0) -> Moments:
    """Return the state before the first step; the second moment starts at ``second``."""
    # The count has the parameters' dtype, which the hyper-parameters have in engines.
    steps = next(iter(params.values())).new_zeros(())
    return Moments(params.zeros(), params.zeros() + second, steps)


def averaged(moment: Tree, value: Tree, beta: Number) -> Tree:
    """Return ``beta moment + (1 - beta) value``, one step of an exponential average."""
    return moment.map(lambda old, new: (beta * old).add_((1 - beta) * new), value)


def adam_moments(moments: Moments, grad: Tree, beta1: Number, beta2: Number) -> Moments:
    """Update both moments as exponential averages: ``v <- beta2 v + (1 - beta2) g^2``."""
    return Moments(
        averaged(moments.first, grad, beta1),
        averaged(moments.second, grad * grad, beta2),
        moments.steps + 1,
    )


def ratio(first: Tensor, root: Tensor) -> Tensor:
    """Return ``first / root``, zero where the root is: a coordinate without history stays."""
    return torch.where(root == 0, torch.zeros_like(first), first / root)


def direction(moments: Moments, added: Number) -> Tree:
    """Return ``m / (sqrt(v) + added)``: the addend is outside of the root."""
    return moments.first.map(ratio, moments.second.sqrt() + added)


def correction(beta1: Number, beta2: Number, steps: Tensor) -> Tensor:
    """Return the factor that corrects a learning rate for moments that start at zero."""
    factor: Tensor = (1 - beta2**steps) ** 0.5 / (1 - beta1**steps)
    return factor


class SharedStateClient(ClientRule):
    """A client that starts from the state it receives, and sends its own state back."""

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        return context.shared

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        return Upload(context.params - params, average=scratch), context.memory


class AverageSharedState(ServerRule):
    """A server that shares its state and replaces it by the mean of the clients' states."""

    def share(self, state: State) -> State:
        return state

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        return params - cohort.delta, cohort.average
