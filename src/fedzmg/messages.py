"""Values that engines pass to rules, and that rules return.

Sign of a client's result, everywhere: ``delta = w_global - w_local``, a pseudo-gradient.
"Nothing" is ``()``, never ``None``, so that every value maps over clients.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from fedzmg.tree import State, Tree

FullPassTiming = Literal["never", "start", "epochs"]
"""``start``: loss and gradient at the global model. ``epochs``: loss there and after each epoch."""


class FullPass(NamedTuple):
    """Loss and gradient over all of a client's data, dropout off, computed on request."""

    loss: Tensor
    grad: Tree
    """Empty for rules that ask for ``epochs``: they need the loss alone, a third of the work."""


class ClientContext(NamedTuple):
    """Everything a client knows before it trains; constant during the round."""

    params: Tree
    shared: State
    memory: State
    round: Tensor
    num_examples: Tensor


class Upload(NamedTuple):
    """Message of one client to the server."""

    delta: Tree
    average: State = ()
    total: State = ()


Stepped: TypeAlias = tuple[Tree, State]
"""Parameters and state after a local step."""
Result: TypeAlias = tuple[Upload, State]
"""Upload of a client, and its memory until it is sampled again."""


class Cohort(NamedTuple):
    """Uploads of one round, merged over the clients that count."""

    delta: Tree
    average: State
    total: State
    size: Tensor
    population: Tensor
    round: Tensor
