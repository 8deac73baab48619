"""FedSAM (Qu et al. 2022; Caldarola et al. 2022): clients look for flat minima.

Every local step takes two gradients of the same batch::

    client:  g1  <- gradient at w_k
             g2  <- gradient at w_k + rho g1 / (|g1| + eps)
             w_k <- w_k - lr g2                  (momentum and decay as options)
    server:  w   <- w - server_lr sum_k p_k (w - w_k)

The norm is over all parameters together.
``SAM`` is a wrapper: the rule inside sees ``g2`` alone and steps from ``w_k``, so its momentum and
decay act there. Both gradients have the same dropout mask. ``ZeroMean`` around it projects both
gradients. Clipping bounds both; that of the norm keeps the direction of ``g1``, so only ``g2``
feels it.

Travels down: the model. Travels up: the model difference. State: none.
Differences from the paper: weights are examples, as in FedAvg; Qu et al. use equal ones
(``weights = "uniform"``). The FL-Simulator adds 1e-7 to the norm and clips every gradient to 10.
Degenerate cases: ``rho = 0`` is FedAvg, bit for bit; a zero gradient is not perturbed.
"""

from typing import Any

import torch
from torch import Tensor

from fedzmg.algorithms.fedavg import SGD, Average
from fedzmg.contract import Algorithm, Number, number, rule_class
from fedzmg.errors import InputError
from fedzmg.messages import ClientContext, Stepped
from fedzmg.tree import Tree
from fedzmg.wrappers.wrapper import Wrapper


def unit_ascent(params: Tree, grad: Tree, rho: Number, eps: Number) -> Tree:
    """Move by ``rho`` along a gradient; ``eps`` keeps a zero gradient from a division by zero."""
    norms = torch.stack([torch.linalg.vector_norm(leaf) for leaf in grad.values()])
    length: Tensor = torch.linalg.vector_norm(norms)
    return params + grad * (rho / (length + eps))


@rule_class
class SAM(Wrapper):
    """Any client rule, on gradients at the worst point nearby."""

    gradients_per_step = 2

    rho: Number = number(0.05, low=0, doc="distance to the point of the second gradient")
    eps: Number = number(1e-12, above=0, doc="added to the norm of the first gradient")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.gradients_per_step != 1:
            name = type(self.inner).__name__
            raise InputError(f"SAM around {name}, which has its own second gradient: choose one")

    def next_point(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Stepped:
        return unit_ascent(params, grad, self.rho, self.eps), scratch


ALGORITHMS = (Algorithm("fedsam", SAM(SGD(lr=0.1)), Average()),)
