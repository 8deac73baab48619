"""Gradient Centralization in federated learning: Local GC, Global GC, GC-Fed (Seo et al. 2025).

Gradient Centralization itself is by Yong et al. 2020. With ``C`` for "minus the mean over all axes
but the output's", and uniform weights::

    local-gc   client:  g <- C(g) + l2 w_k ;   v <- momentum v + g ;   w_k <- w_k - lr v
               server:  w <- w - server_lr mean_k (w - w_k)
    global-gc  client:  the same without C
               server:  w <- w - server_lr C(mean_k (w - w_k))
    gc-fed     client:  local-gc's, C on every layer but the last
               server:  global-gc's

The decay ``l2`` is coupled: it enters the momentum, after centring, as in ``torch.optim.SGD``.
Travels down: the model. Travels up: the model difference. State: none.
Momentum 0.9 and decay 1e-5 are those of the authors' scripts; ``None`` switches a term off.

As in the code of GC-Fed's authors, the mean is over all axes but the first of every tensor, and for
a bias over all entries. So biases are centred (``biases = "free"`` exempts them, as FedZMG does)
and embeddings are centred per token (``embedding_axis = "vocab"`` is FedZMG's choice).
Differences: transposed convolutions are centred over their real inputs; the authors name the layer
that GC-Fed spares, here it is the last. The article could not be read.
Degenerate cases: Local GC with free biases and no decay is FedZMG without decay and with uniform
weights; Local GC that projects nothing is FedAvg; Global GC around Local GC without decay changes
nothing; GC-Fed of a single layer is Global GC.
"""

from dataclasses import replace

from fedzmg.algorithms.fedavg import SGD, Average
from fedzmg.algorithms.fedzmg import ZeroMean
from fedzmg.contract import Algorithm, Number, number, rule_class
from fedzmg.messages import ClientContext, Stepped
from fedzmg.tree import State, Tree
from fedzmg.wrappers.wrapper import Projected, Wrapper


@rule_class
class CoupledDecay(Wrapper):
    """Any client rule with coupled weight decay: ``inner`` sees ``g + l2 w``."""

    wrapper_kind = "pull"

    l2: Number | None = number(None, low=0, doc="weight decay that enters the gradient")

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        if self.l2 is not None:
            grad = grad + self.l2 * params
        return self.inner.step(context, params, scratch, grad)


PLAIN = CoupledDecay(SGD(lr=0.1, momentum=0.9), l2=1e-5)
CENTRED = ZeroMean(PLAIN, embedding_axis="dim", biases="centred")
SERVER = Projected(Average(), embedding_axis="dim", biases="centred")

ALGORITHMS = (
    Algorithm("local-gc", CENTRED, Average(), weights="uniform"),
    Algorithm("global-gc", PLAIN, SERVER, weights="uniform"),
    Algorithm("gc-fed", replace(CENTRED, project="all_but_last"), SERVER, weights="uniform"),
)
