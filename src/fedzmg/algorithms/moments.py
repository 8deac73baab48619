"""Running moments of the pseudo-gradient and steps made of them, for adaptive servers.

``g`` is the averaged ``w_global - w_local`` of a round, ``t`` the number of server steps done.
A round that lost every upload is not a step.

Algorithms that share the state ``s`` of an optimiser between server and clients use two more rules.
A client that was not sampled gets the new state the next time::

    client:  s_k <- s                                 then the rule's own steps change s_k and w_k
    server:  w, s <- means of w_k and s_k over the cohort, weighted alike
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedzmg.contract import ClientRule, Number, ServerRule, number
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
    first, second, steps = moments
    return Moments(averaged(first, grad, beta1), averaged(second, grad * grad, beta2), steps + 1)


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


@dataclass(frozen=True)
class MomentServer(ServerRule):
    """Base of servers that step along moments of the pseudo-gradient."""

    lr: Number = number(0.1, above=0, doc="server learning rate")
    beta1: Number = number(0.9, low=0, below=1, doc="decay of the first moment")
    beta2: Number = number(0.99, low=0, below=1, doc="decay of the second moment")

    def init(self, params: Tree) -> State:
        return no_moments(params)

    def moments(self, before: Moments, grad: Tree) -> Moments:
        return adam_moments(before, grad, self.beta1, self.beta2)


@dataclass(frozen=True)
class ReddiServer(MomentServer):
    """Base of the servers of Reddi et al.: no bias correction, ``v0`` is ``tau^2``."""

    tau: Number = number(1e-3, low=0, doc="degree of adaptivity, added to the root")
    v0: Number | None = number(None, low=0, doc="initial second moment; tau^2 if absent")

    def init(self, params: Tree) -> State:
        return no_moments(params, self.tau * self.tau if self.v0 is None else self.v0)

    def update(self, params: Tree, state: Moments, cohort: Cohort) -> tuple[Tree, Moments]:
        state = self.moments(state, cohort.delta)
        return params - self.lr * direction(state, self.tau), state


class CorrectedClient(ClientRule):
    """A client that keeps a correction of its gradients, zero at first."""

    corrects = True

    def init_memory(self, params: Tree) -> State:
        return params.zeros()


class SharedStateClient(ClientRule):
    """A client that sends its state to be averaged; it starts from the one that it receives."""

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        return context.shared

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        return Upload(context.params - params, average=scratch), context.memory


class ZeroState(ServerRule):
    """A server whose state is zero at first."""

    def init(self, params: Tree) -> State:
        return params.zeros()


class SharesState(ZeroState):
    """A server that shares its state, which is zero at first."""

    def share(self, state: State) -> State:
        return state


@dataclass(frozen=True)
class SharingServer(SharesState):
    """A server with a learning rate that shares its state, which is zero at first."""

    lr: Number = number(1.0, above=0, doc="server learning rate")


class AverageSharedState(SharesState):
    """A server that shares its state and replaces it by the mean of the clients' states."""

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        return params - cohort.delta, cohort.average
