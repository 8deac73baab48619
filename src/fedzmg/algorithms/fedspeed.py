"""FedSpeed (Sun et al. 2023): proximal steps, a dual correction and an ascent step.

With ``h_k`` the client's correction, zero at first, and ``K`` local steps from ``x = w``::

    client:  g1  <- gradient at x ;   g2 <- gradient of the same batch at x + rho g1
             x   <- x - lr ((1 - alpha) g1 + alpha g2 - h_k + (x - w) / lam)
             h_k <- h_k - (x - w) / lam                  after the last step
    server:  w   <- mean over S of (x_k - lam h_k)       fedspeed, with the new h_k
             s   <- s + 1/N sum over S of (w - x_k)      fedspeed:all
             w   <- mean over S of x_k - s

``fedspeed`` is the published server: the corrections of the cohort S alone. ``fedspeed:all`` is the
one of the authors' code, FedDyn's: corrections of absent clients count too. The two agree if
everyone takes part. ``client.perturbation = "unit"`` moves by ``rho g1 / (|g1| + 1e-12)`` instead,
as the authors' code does (with alpha = 1 and lam = 10); prefer it for networks.

Travels down: the model. Travels up: the model difference, with ``fedspeed`` shifted by ``lam h_k``.
Client state: h_k. Server state: none, with ``fedspeed:all`` s. Weights are uniform. Steps are
stable for ``lr (L + 1 / lam) < 2``, L the largest curvature.

Differences from the paper: its text could not be read; the equations are those of a port that keeps
its symbols. The authors report that ``fedspeed`` needs decaying learning rates when few clients
take part. In their code the proximal term is partly outside of clipping; here all of it is.
Degenerate cases: ``alpha`` absent or 0, or ``rho = 0``, with everyone taking part, is FedDyn with
coefficient ``1 / lam``. Without ``alpha`` a step takes one gradient only.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedzmg.algorithms.ditto import SEVERAL_POINTS
from fedzmg.algorithms.fedavg import Average
from fedzmg.algorithms.feddyn import FedDynServer
from fedzmg.algorithms.fedsam import unit_ascent
from fedzmg.algorithms.moments import CorrectedClient
from fedzmg.contract import Algorithm, Number, choice, number, rule_class
from fedzmg.messages import ClientContext, FullPass, Result, Stepped, Upload
from fedzmg.tree import State, Tree


@dataclass(frozen=True)
class DualSteps(CorrectedClient):
    """Local steps of FedSpeed; base of the rules that differ in what they upload."""

    incompatible = SEVERAL_POINTS

    lr: Number = number(0.1, above=0, doc="client learning rate")
    rho: Number = number(0.1, low=0, doc="length of the ascent to the second gradient")
    alpha: Number | None = number(None, low=0, high=1, doc="weight of the second gradient")
    lam: Number = number(10.0, above=0, doc="inverse strength of the pull to the global model")
    perturbation: str = choice("raw", "unit", doc="ascent by rho times the gradient, or by rho")

    @property
    def gradients_per_step(self) -> int:
        return 1 if self.alpha is None else 2

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        return () if self.alpha is None else context.params.zeros()

    def next_point(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Stepped:
        if self.perturbation == "unit":
            return unit_ascent(params, grad, self.rho, 1e-12), grad
        return params + self.rho * grad, grad

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        if self.alpha is not None:
            grad = (1 - self.alpha) * scratch + self.alpha * grad
        pull = (params - context.params) * (1 / self.lam)
        return params - self.lr * (grad - context.memory + pull), scratch

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        delta = context.params - params
        return Upload(delta), context.memory + delta * (1 / self.lam)


@rule_class
class FedSpeed(DualSteps):
    """FedSpeed's steps, and an upload that holds the client's correction."""

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        upload, memory = super().finish(context, params, scratch, steps)
        return Upload(upload.delta + self.lam * memory), memory


@rule_class
class FedSpeedAll(DualSteps):
    """FedSpeed's steps, and the model difference for a server that keeps all corrections."""

    pairing = "feddyn"


ALGORITHMS = (
    Algorithm("fedspeed", FedSpeed(alpha=0.9), Average(), weights="uniform"),
    Algorithm("fedspeed:all", FedSpeedAll(alpha=0.9), FedDynServer(), weights="uniform"),
)
