"""Weight decay on the server, around any server rule that has an ``lr``.

::

    w'  <- inner(w, updates)
    w   <- w' - decay server_lr w

Decay on clients is a part of their updates: it enters the moments of an adaptive server, and a
projected server undoes its effect on column sums. Here it is decoupled from both. A schedule around
this rule scales the decay along with the learning rate.

Travels and state: as the rule inside.
Degenerate cases: ``decay = 0`` is the rule inside, bit for bit. Around a step that conserves sums
of columns, they shrink by ``1 - decay server_lr`` a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fedzmg.algorithms.wrapper import ServerWrapper, rate_of
from fedzmg.contract import Cohort, Number, State, chain, number
from fedzmg.errors import InputError
from fedzmg.tree import Tree


@final
@dataclass(frozen=True)
class ServerDecay(ServerWrapper):
    """Any server rule with an ``lr``, and decoupled weight decay of the global model."""

    decay: Number = number(5e-4, low=0, doc="decoupled weight decay, times lr per round")

    def __post_init__(self) -> None:
        """Reject a rule without a learning rate."""
        super().__post_init__()
        if rate_of(self.inner) is None:
            name = type(chain(self.inner)[-1]).__name__
            raise InputError(f"decay is measured in units of lr, which {name} does not have")

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        after, state = self.inner.update(params, state, cohort)
        rate = rate_of(self.inner)
        assert rate is not None, "checked by the constructor"
        return after - self.decay * rate * params, state
