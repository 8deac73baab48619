"""FedDC (Gao et al. 2022): clients keep their drift from the global model and correct for it.

With ``S`` the cohort, ``N`` all clients, ``K`` the steps that client did; every ``h_k``, ``s_k``,
``s`` and ``h`` are zero at first::

    client:  x   <- x - lr (g + alpha (x - w + h_k) + s - s_k)     from x = w to x_k
             h_k <- h_k - (w - x_k)
             s_k <- s_k - s + (w - x_k) / (K lr)          client.state = "recursive"
             s_k <- (w - x_k) / (K lr)                    client.state = "last"
    server:  s   <- s + 1/N sum over S of the changes of s_k
             h   <- h - 1/N sum over S of (w - x_k)      the mean of all h_k
             w   <- mean over S of x_k + h

Travels down: the model and s. Travels up: the model difference and the change of s_k. Client state:
h_k and s_k. Server state: s and h. Weights are uniform.

``recursive`` is the authors' code, ``last`` the text of the paper as we remember it; they agree in
the first two rounds. The code also scales by ``q_k = n_k / mean(n)``: alpha and s are divided by
q_k, and the change of s_k is multiplied by it. ``client.mean_examples`` switches this on.
Differences from the authors' code: it divides by the learning rate before decay and by the steps of
a client of mean size, here it is the learning rate and the steps of that client. Its norm clipping
at 10 and its decay of the learning rate by 0.998 are ``client.clip_norm`` and ``client.schedule``.
Degenerate cases: with full participation the server moves by D and then also by the sum of all
updates so far, so the first round is twice FedAvg's. ``alpha = 0`` does not remove the drift that
the server adds; without that, it would be SCAFFOLD, option II.
"""

from typing import NamedTuple

from torch import Tensor

from fedzmg.contract import Algorithm, ClientRule, Number, ServerRule, choice, number, rule_class
from fedzmg.messages import ClientContext, Cohort, Result, Stepped, Upload
from fedzmg.tree import State, Tree


class Drift(NamedTuple):
    """Drift from the global model and gradient state: of a client, or means over all clients."""

    drift: Tree
    state: Tree


@rule_class
class FedDC(ClientRule):
    """SGD pulled to the global model less the client's drift, and corrected by gradient states."""

    pairing = "feddc"
    corrects = True

    lr: Number = number(0.1, above=0, doc="client learning rate")
    alpha: Number = number(0.01, low=0, doc="strength of the pull")
    state: str = choice("recursive", "last", doc="gradient state: corrected, or replaced")
    mean_examples: Number | None = number(None, above=0, doc="of all clients; absent: no scaling")

    def init_memory(self, params: Tree) -> Drift:
        return Drift(params.zeros(), params.zeros())

    def _share(self, context: ClientContext) -> Number:
        """Return the client's examples over the mean of all clients."""
        if self.mean_examples is None:
            return 1.0
        dtype = next(iter(context.params.values())).dtype
        return context.num_examples.to(dtype) / self.mean_examples

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        own: Drift = context.memory
        # A factor, not a divisor: a compiled step cannot divide a tree by a scalar tensor.
        unit = 1 / self._share(context)
        pull = (self.alpha * unit) * (params - context.params + own.drift)
        return params - self.lr * (grad + pull + context.shared * unit - own.state), scratch

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        own: Drift = context.memory
        share, delta = self._share(context), context.params - params
        state = delta / self.lr / steps.clamp(min=1)
        if self.state == "recursive":
            state = own.state - context.shared / share + state
        return Upload(delta, total=(state - own.state) * share), Drift(own.drift - delta, state)


@rule_class
class FedDCServer(ServerRule):
    """The mean of the clients' models, plus the mean drift of all clients."""

    pairing = "feddc"
    only_weights = "uniform"

    def init(self, params: Tree) -> Drift:
        return Drift(params.zeros(), params.zeros())

    def share(self, state: Drift) -> Tree:
        return state.state

    def update(self, params: Tree, state: Drift, cohort: Cohort) -> tuple[Tree, Drift]:
        # Weights are uniform, so the sum over the cohort is its mean times its size.
        drift = state.drift - cohort.delta * cohort.size / cohort.population
        after = Drift(drift, state.state + cohort.total / cohort.population)
        return params - cohort.delta + drift, after


ALGORITHMS = (Algorithm("feddc", FedDC(), FedDCServer(), weights="uniform"),)
