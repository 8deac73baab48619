"""FedZMG (Zantalis, Zervas, Koulouras 2026): zero-mean gradients on the clients.

::

    client:  g   <- g - mean(g over the layer's inputs)     for every weight, not for biases
             v   <- momentum v + g
             w_k <- w_k (1 - decay lr) - lr v
    server:  w   <- w - server_lr sum_k p_k (w - w_k)

Travels down: the model. Travels up: the model difference. State: none.
Defaults are the paper's: momentum 0.9, decay 0.0005.

Differences from the paper: its pseudo-code has neither momentum nor a server learning rate, its
experiments have both; the form here is the one its experiments need.
Degenerate cases: without projection, momentum and decay it is FedAvg bit for bit. With ``decay=0``
the sum of every projected column is conserved through training; with decay it shrinks by
``1 - decay lr`` a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self, final

import torch
from torch import Tensor

from fedzmg.algorithms.entry import Entry
from fedzmg.algorithms.fedadam import Adam
from fedzmg.algorithms.fedavg import Average
from fedzmg.algorithms.sgd import SGD
from fedzmg.algorithms.wrapper import Wrapper
from fedzmg.contract import Algorithm, Given, Layout, Look, State
from fedzmg.errors import InputError
from fedzmg.tree import Tree


def zero_mean(grad: Tensor, input_axes: tuple[int, ...]) -> Tensor:
    """Project a gradient onto the hyperplane of zero mean over ``input_axes``.

    The mean of a half-precision gradient is taken in float32.

    >>> zero_mean(torch.tensor([[1.0, 3.0, 5.0], [2.0, -4.0, 8.0]]), (1,))
    tensor([[-2.,  0.,  2.],
            [ 0., -6.,  6.]])
    """
    if not input_axes:
        return grad
    wide = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
    return grad - grad.mean(dim=input_axes, keepdim=True, dtype=wide).to(grad.dtype)


@final
@dataclass(frozen=True)
class ZeroMean(Wrapper):
    """Any client rule, on zero-mean gradients: ``inner`` sees the projected gradient."""

    axes: Mapping[str, tuple[int, ...]] | None = field(
        default=None, repr=False, metadata={"derived": True}
    )

    def for_layout(self, layout: Layout) -> Self:
        axes = {name: info.input_axes for name, info in layout.items()}
        return replace(self, inner=self.inner.for_layout(layout), axes=axes)

    def project(self, grad: Tree) -> Tree:
        """The zero-mean part of a gradient."""
        if self.axes is None:
            raise InputError("ZeroMean does not know the model yet: call for_layout(layout) first")
        axes = self.axes
        return Tree({name: zero_mean(leaf, axes[name]) for name, leaf in grad.items()})

    def begin(self, given: Given, look: Look | tuple[()]) -> State:
        seen = look._replace(grad=self.project(look.grad)) if isinstance(look, Look) else look
        return self.inner.begin(given, seen)

    def step(self, given: Given, params: Tree, scratch: State, grad: Tree) -> tuple[Tree, State]:
        return self.inner.step(given, params, scratch, self.project(grad))


CLIENT = ZeroMean(SGD(lr=0.1, momentum=0.9, decay=5e-4))

ENTRIES = (
    Entry(
        Algorithm("fedzmg", CLIENT, Average()),
        summary="zero-mean client gradients, momentum, decoupled decay; server average",
        source="Zantalis, Zervas, Koulouras 2026",
        about=__doc__,
    ),
    Entry(
        Algorithm("fedzmg-adam", CLIENT, Adam()),
        summary="FedZMG's clients with FedAdam's server",
        source="named as future work by Zantalis et al. 2026",
        about=__doc__,
        server_keeps=2,
    ),
)
