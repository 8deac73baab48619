"""Bounded gradients: clipping around any client rule.

::

    ClipNorm:   g <- g min(1, clip_norm / |g|)            |g|: over all parameters together
    ClipValue:  g <- min(max(g, -clip_value), clip_value)   each entry for itself

The gradient of the loss is clipped before anything else happens to it, so these wrappers are
outermost: clipping and projection do not commute. So is every gradient of a step with several, and
the gradient of a full pass, because it is the same loss.

Entries that are not finite stay as they are, so that a client whose gradient overflowed is dropped
and counted. A gradient that is finite but whose squares overflow is clipped like any other.

Differences from torch: ``clip_grad_norm_`` divides by ``|g| + 1e-6`` and so stays a little below
its bound, and clears a gradient whose norm overflows; ``clip_grad_value_`` replaces infinities.
Degenerate cases: below the bound nothing changes, bit for bit.
"""

import math

import torch
from torch import Tensor

from fedzmg.contract import Number, number, rule_class
from fedzmg.tree import Tree
from fedzmg.wrappers.wrapper import GradientWrapper


def clip_norm(grad: Tree, bound: Number) -> Tree:
    """Shorten a gradient to a Euclidean norm of at most ``bound``, keeping its direction."""
    leaves = list(grad.values())
    peak = torch.stack([torch.linalg.vector_norm(leaf, math.inf) for leaf in leaves]).amax()
    # Relative to the largest entry, so that squares neither overflow nor vanish.
    unit = torch.where(peak > 0, peak, torch.ones_like(peak))
    norms = [torch.linalg.vector_norm(leaf / unit) for leaf in leaves]
    length = torch.linalg.vector_norm(torch.stack(norms))
    # NaN compares false, so a gradient that is not finite is multiplied by one.
    factor = torch.where(length > bound / unit, bound / length / unit, torch.ones_like(length))
    return grad * factor


def clip_value(grad: Tensor, bound: Number) -> Tensor:
    """Bring every finite entry into ``[-bound, bound]``."""
    high = torch.as_tensor(bound, dtype=grad.dtype, device=grad.device)
    return torch.where(grad.isfinite(), grad.clamp(-high, high), grad)


@rule_class
class ClipNorm(GradientWrapper):
    """Any client rule, on gradients of bounded Euclidean norm."""

    wrapper_kind = "clip"

    clip_norm: Number = number(1.0, above=0, doc="largest norm of a gradient, over all parameters")

    def changed(self, grad: Tree) -> Tree:
        return clip_norm(grad, self.clip_norm)


@rule_class
class ClipValue(GradientWrapper):
    """Any client rule, on gradients whose every entry is bounded."""

    wrapper_kind = "clip"

    clip_value: Number = number(1.0, above=0, doc="largest size of a gradient's entries")

    def changed(self, grad: Tree) -> Tree:
        return grad.map(lambda leaf: clip_value(leaf, self.clip_value))
