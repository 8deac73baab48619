"""FedRep (Collins et al. 2021): clients train their own head first, then the common body.

With ``phi`` the shared part of the model and ``h_k`` the client's personal one::

    client:  h_k   <- h_k - lr g_h           head_epochs, phi fixed
             phi_k <- phi_k - lr g_phi       epochs of the protocol, new h_k fixed
    server:  phi   <- phi - server_lr sum_k p_k (phi - phi_k)

Travels down: phi. Travels up: the difference of phi. Client state: h_k.
``parts.personal`` says which layers are personal: ``last:1``, the last one, by default.

Differences from the paper: all heads start from the same initial values. Clipping the norm bounds
the gradient of both parts together.
Degenerate cases: with ``head_epochs = 0`` the heads keep their initial values, as in FedBABU.
"""

import torch
from torch import Tensor

from fedzmg.algorithms.fedavg import SGD, Average
from fedzmg.contract import Algorithm, Parts, rule_class, whole
from fedzmg.errors import InputError
from fedzmg.messages import ClientContext, FullPass, Stepped
from fedzmg.tree import State, Tree
from fedzmg.wrappers.wrapper import PartsAware, StatefulWrapper


@rule_class
class HeadFirst(StatefulWrapper, PartsAware):
    """Any client rule, on the personal parameters first and on the shared ones afterwards."""

    uses_epoch_end = True

    head_epochs: int = whole(4, doc="epochs for the head, before those of the protocol")

    @property
    def extra_epochs(self) -> int:
        return self.head_epochs + self.inner.extra_epochs

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        if not self.personal:
            raise InputError("FedRep needs personal parameters: set parts.personal, such as last:1")
        return torch.zeros_like(context.num_examples), self.inner.begin(context, full_pass)

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        epochs, inside = scratch
        is_head = epochs < self.head_epochs
        moved, after = self.inner.step(context, params, inside, grad)
        return self._chosen(is_head, moved, params), (epochs, self._chosen(is_head, after, inside))

    def _chosen(self, is_head: Tensor, new: State, old: State) -> State:
        """Take new values of the part that trains, by name; of all others, without a name."""
        if isinstance(new, Tree):
            trains = {n: is_head if n in (self.personal or ()) else ~is_head for n in new}
            return Tree({n: torch.where(trains[n], w, old[n]) for n, w in new.items()})
        if isinstance(new, tuple):
            parts = [self._chosen(is_head, n, o) for n, o in zip(new, old, strict=True)]
            return type(new)(*parts) if hasattr(new, "_fields") else tuple(parts)
        return new

    def end_epoch(self, scratch: State, loss: Tensor) -> tuple[State, Tensor | bool]:
        (epochs, inside), proceeds = super().end_epoch(scratch, loss)
        return (epochs + 1, inside), proceeds


ALGORITHMS = (Algorithm("fedrep", HeadFirst(SGD()), Average(), parts=Parts(personal=("last:1",))),)
