"""FedNova (Wang et al. 2020): updates normalised by the local work that made them.

With ``K_k`` the steps of client k, ``a_k`` the displacement of its optimiser on a constant gradient
of one, over ``-lr``, and terms in brackets optional::

    client:  g   <- g [+ mu (w_k - w)] ;   v_k <- [momentum v_k +] g
             w_k <- w_k - lr v_k
             a_k  =  K_k for plain SGD, else counted by the recursion of v_k and w_k
    server:  u   <- tau sum_k p_k (w - w_k) / a_k ;   tau = sum_k p_k a_k
             v   <- [beta v +] u ;   w <- w - server_lr v

Travels down: the model. Travels up: ``(w - w_k) / a_k``, and a_k or K_k as a scalar. Server state:
v, only with ``server.beta``.

With ``mu > 0`` the authors' code takes ``tau = sum_k p_k K_k``, which is the default here;
``client.tau = "norm"`` takes a_k as for every other optimiser. Weight decay, if a wrapper adds any,
is a part of the gradient and does not change a_k.
Differences from the authors' code: with momentum and ``mu`` both on, it adds the pull into the
momentum buffer in place and counts both terms at every step; here a_k follows from the recursion.
Degenerate cases: with equal a_k, so with equal steps, it is FedAvg with the same momentum and pull,
the pull with ``tau = "norm"``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.contract import Algorithm, ClientRule, Number, ServerRule, choice, number, rule_class
from fedzmg.messages import ClientContext, Cohort, FullPass, Result, Stepped, Upload
from fedzmg.tree import State, Tree


class Progress(NamedTuple):
    """Momentum of the model, and displacement and momentum of the constant gradient."""

    velocity: Any
    length: Tensor
    speed: Tensor


@rule_class
class Nova(ClientRule):
    """SGD that sends its mean direction, and the length of its way apart."""

    pairing = "fednova"

    lr: Number = number(0.1, above=0, doc="client learning rate")
    momentum: Number | None = number(None, low=0, below=1, doc="accumulating momentum")
    mu: Number | None = number(None, low=0, doc="strength of the pull to the global model")
    tau: str = choice("code", "norm", doc="common step's length: steps if mu > 0, or always a_k")

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> Progress:
        zero = next(iter(context.params.values())).new_zeros(())
        return Progress(() if self.momentum is None else context.params.zeros(), zero, zero)

    def step(self, context: ClientContext, params: Tree, scratch: Progress, grad: Tree) -> Stepped:
        velocity, length, speed = scratch
        slope: Tensor = torch.ones_like(length)
        if self.mu is not None:
            grad = grad + self.mu * (params - context.params)
            slope = slope - self.mu * self.lr * length
        if self.momentum is not None:
            velocity = grad = self.momentum * velocity + grad
            slope = self.momentum * speed + slope
        return params - self.lr * grad, Progress(velocity, length + slope, slope)

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        length = torch.where(steps > 0, scratch.length, torch.ones_like(scratch.length))
        tau = length
        if self.mu is not None and self.tau == "code":
            pulled = torch.as_tensor(self.mu, device=length.device) > 0
            tau = torch.where(pulled, steps.to(length.dtype), length)
        return Upload((context.params - params) / length, average=tau), context.memory


@rule_class
class NovaServer(ServerRule):
    """The mean direction times the mean length, with accumulating momentum as an option."""

    pairing = "fednova"

    lr: Number = number(1.0, above=0, doc="server learning rate")
    beta: Number | None = number(None, low=0, below=1, doc="share of the velocity that is kept")

    def init(self, params: Tree) -> State:
        return () if self.beta is None else params.zeros()

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        update = cohort.average * cohort.delta
        if self.beta is not None:
            state = update = self.beta * state + update
        return params - self.lr * update, state


ALGORITHMS = (Algorithm("fednova", Nova(), NovaServer()),)
