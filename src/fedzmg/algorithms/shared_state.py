"""Rules for algorithms that share the state of an optimiser between server and clients.

With ``s`` that state, such as a momentum::

    client:  s_k <- s                                 then the rule's own steps change s_k and w_k
    server:  w, s <- means of w_k and s_k over the cohort, weighted alike

A client that was not sampled gets the new state the next time.
"""

from __future__ import annotations

from torch import Tensor

from fedzmg.contract import ClientContext, ClientRule, Cohort, FullPass, ServerRule, State, Upload
from fedzmg.tree import Tree


class SharedStateClient(ClientRule):
    """A client that starts from the state it receives, and sends its own state back."""

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        return context.shared

    def finish(
        self, context: ClientContext, params: Tree, scratch: State, steps: Tensor
    ) -> tuple[Upload, State]:
        return Upload(context.params - params, average=scratch), context.memory


class AverageSharedState(ServerRule):
    """A server that shares its state and replaces it by the mean of the clients' states."""

    def share(self, state: State) -> State:
        return state

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        return params - cohort.delta, cohort.average
