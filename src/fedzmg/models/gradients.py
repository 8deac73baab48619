"""Gradients of a loss: of one client or of mapped ones, and by a module's own parameters."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedzmg.models.behaviour import opened
from fedzmg.tree import Tree, leaves

if TYPE_CHECKING:
    from fedzmg.models.functional import FunctionalModel

_backward: Any = torch.autograd.Variable._execution_engine.run_backward
Loss = Callable[[Tree, Any], Tensor | tuple[Tensor, Tree]]


def eager_gradient(loss: Loss, params: Tree, batch: Any) -> tuple[Tensor, Tree]:
    """Compute losses (one per mapped client) and each one's gradient for its own parameters.

    A loss may come with running statistics after the batch, which take the place of a gradient.
    Clients share no parameter, so one backward pass of the summed loss gives every client's
    gradient. This avoids ``torch.func.grad``, whose eager overhead is larger than a small model.
    """
    is_tracked = all(leaf.requires_grad for leaf in params.values())
    tracked = params if is_tracked else params.map(lambda leaf: leaf.detach().requires_grad_())
    result = loss(tracked, batch)
    losses, moved = result if isinstance(result, tuple) else (result, Tree({}))
    total = losses.sum() if losses.ndim else losses
    # As torch.autograd.grad(..., allow_unused=True), whose checks take longer than a small layer.
    ones = (torch.ones_like(total),)  # flags: keep and create graphs; allow unused; accumulate
    grads = _backward((total,), ones, False, False, tuple(tracked.values()), True, False)
    return losses.detach(), _gradients(tracked, grads, moved)


def own_gradient(
    model: "FunctionalModel", loss: Loss, params: Tree, batch: Any
) -> tuple[Tensor, Tree]:
    """Compute the same as a plain loop does: by the backward pass of the module's parameters."""
    with model.holding(params) as own:
        try:
            result = loss(own, batch)
            losses, moved = result if isinstance(result, tuple) else (result, Tree({}))
            losses.backward()  # type: ignore[no-untyped-call]
            found = _gradients(own, [p.grad for p in own.values()], moved)
            return losses.detach(), found.map(real_view)
        finally:
            for p in own.values():
                p.grad = None


def real_view(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, which rules train; others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _gradients(params: Tree, grads: Any, moved: Tree) -> Tree:
    """Name gradients; unused parameters have zeros, statistics their new values."""
    new, both = dict(moved.items()), zip(params.items(), grads, strict=True)
    found = {n: torch.zeros_like(t) if g is None and n not in new else g for (n, t), g in both}
    return Tree(found | new)


def gradients_differ(model: "FunctionalModel", params: Tree, x: Any, key: Any) -> bool:
    """Tell whether a module's own parameters have gradients that those in their place have not."""

    def total(own: Tree, _: None) -> Tensor:
        outputs = (v for v in leaves(model.train(own, x, key)) if isinstance(v, Tensor))
        flat = torch.cat([v.real.flatten() for v in outputs if v.requires_grad])
        return flat.dot(torch.linspace(0.5, 1.5, len(flat), dtype=flat.dtype))

    params = opened(params).map(lambda leaf: 0.7 * leaf.roll(1))  # not the module's own numbers
    with torch.enable_grad():
        try:
            plain = own_gradient(model, total, params.map(torch.clone), None)[1]
        except Exception:
            return False  # training says where
        try:
            found = eager_gradient(total, params, None)[1]
        except Exception:
            return True
    most = max(_largest(leaf) for leaf in plain.values())
    return any(_largest(found[n] - leaf) > 1e-3 * most + 1e-12 for n, leaf in plain.items())


def _largest(leaf: Tensor) -> float:
    return float(leaf.nan_to_num().abs().max()) if leaf.numel() else 0.0
