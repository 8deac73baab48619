"""SCAFFOLD (Karimireddy et al. 2020): control variates against client drift.

With ``c`` the server's and ``c_i`` the client's variate, all zero at first, ``K`` the steps that
client did, ``S`` the cohort and ``N`` all clients::

    client:  y   <- y - lr (g - c_i + c)                                 K times from y = w
             c_i <- c_i - c + (w - y) / (K lr)       scaffold            (option II)
             c_i <- gradient of F_i at w             scaffold:option-1   (option I)
    server:  w   <- w - server_lr mean over S of (w - y_i)
             c   <- c + 1/N sum over S of the changes of c_i

Travels down: the model and c. Travels up: the model difference and the change of c_i. Option I
needs one more pass over the client's data. Client state: c_i. Server state: c. Weights are uniform.

The mean of all ``c_i`` is ``c`` after every round, whatever the participation, as long as nobody
is drawn twice in a round; clients that never took part count with ``c_i = 0``.

Differences from the paper: none in the equations; clients may do different numbers of steps. There
is no momentum because option II divides by the learning rate: ``(w - y) / (K lr)`` is a mean of
gradients for plain SGD only.
Degenerate cases: the first round is FedAvg's with uniform weights; with ``N = 1`` every round is,
since ``c = c_i``; with one full-batch step a round the two options agree. Inside ``ZeroMean`` it is
SCAFFOLD with projected variates, and column sums are kept.
"""

from torch import Tensor

from fedzmg.algorithms.moments import CorrectedClient, SharingServer
from fedzmg.contract import Algorithm, Number, choice, number, rule_class
from fedzmg.messages import ClientContext, Cohort, FullPass, FullPassTiming, Result, Stepped, Upload
from fedzmg.tree import State, Tree


@rule_class
class Scaffold(CorrectedClient):
    """SGD along ``g - c_i + c``; the received ``c`` and the own ``c_i`` stay fixed in a round."""

    pairing = "scaffold"

    lr: Number = number(0.1, above=0, doc="client learning rate")
    variate: str = choice("path", "start", doc="gradients that make a control variate")

    @property
    def full_pass(self) -> FullPassTiming:
        return "start" if self.variate == "start" else "never"

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        return full_pass.grad if isinstance(full_pass, FullPass) and self.variate == "start" else ()

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        return params - self.lr * (grad - context.memory + context.shared), scratch

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        delta = context.params - params
        if self.variate == "start":
            new = scratch
        else:
            new = context.memory - context.shared + delta / self.lr / steps.clamp(min=1)
        return Upload(delta, total=new - context.memory), new


@rule_class
class ScaffoldServer(SharingServer):
    """Average the models, and keep the mean of all clients' variates."""

    pairing = "scaffold"

    def update(self, params: Tree, state: Tree, cohort: Cohort) -> tuple[Tree, Tree]:
        return params - self.lr * cohort.delta, state + cohort.total / cohort.population


ALGORITHMS = (
    Algorithm("scaffold", Scaffold(), ScaffoldServer(), weights="uniform"),
    Algorithm("scaffold:option-1", Scaffold(variate="start"), ScaffoldServer(), weights="uniform"),
)
