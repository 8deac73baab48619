"""FedZMG's step on lists of tensors, as plain tensor arithmetic.

Every function does the same to all tensors of a group::

    g <- g - mean(g over the layer's inputs)
    v <- momentum v + g
    w <- w (1 - decay lr) - lr v             (nesterov: g + momentum v in place of v)

What differs is how often memory is read and written, which is nearly all of the cost. Counted in
model sizes, with momentum, without and with decay:

==========  ===  ===  ======================================================================
one by one  11   13   the rule as it is written
foreach     11   13   the sum is one read, and it is taken off ``v`` in place
fused       8    10   on processors; as foreach, but ``v`` and ``w`` are written in one pass
==========  ===  ===  ======================================================================

``torch.optim.SGD`` has 8 and 11 (foreach), 5 and 5 (fused).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedzmg.optim.axes import Axes, inputs
from fedzmg.optim.memory import alike, laid_like, without_gaps
from fedzmg.optim.projection import sum_of_inputs
from fedzmg.optim.shards import local

HALF = (torch.float16, torch.bfloat16)
LEAST_MOMENTUM = 1e-6
"""A mean divided by less could be more than float32 can say."""


class Numbers(NamedTuple):
    """The hyper-parameters of one step of one group."""

    lr: float | Tensor
    """A tensor only where reading its value would hold up a device or a compiler."""
    momentum: float
    weight_decay: float
    nesterov: bool
    sign: int
    """-1 to climb."""

    @property
    def kept(self) -> float | Tensor:
        """What decay leaves of a weight."""
        return 1 - self.weight_decay * self.lr


class Weights(NamedTuple):
    """What a step reads and writes, in parallel lists; ``velocities`` is empty without momentum."""

    params: list[Tensor]
    grads: list[Tensor]
    velocities: list[Tensor]
    axes: list[Axes]
    spread: bool = False
    """Whether some lie on several processes."""

    def sums(self) -> list[tuple[int, Tensor, int]]:
        """Place, sum over the inputs and number of inputs of every tensor that is centred."""
        return [
            (i, sum_of_inputs(grad, axes), inputs(grad.shape, axes))
            for i, (grad, axes) in enumerate(zip(self.grads, self.axes, strict=True))
            if axes and grad.numel()
        ]

    def some(self, places: list[int]) -> Weights:
        """The tensors at some places."""
        if not places:
            return NOTHING
        return Weights(
            [self.params[i] for i in places],
            [self.grads[i] for i in places],
            [self.velocities[i] for i in places] if self.velocities else [],
            [self.axes[i] for i in places],
            self.spread,
        )

    def with_grads(self, grads: list[Tensor]) -> Weights:
        """The same with other gradients."""
        return self._replace(grads=grads)

    def centred(self) -> Weights:
        """The local parts with copies of the gradients that are zero-mean already."""
        here = self.local()
        grads = list(here.grads)
        for i, total, count in self.sums():
            grads[i] = grads[i].sub(total, alpha=1 / count).to(grads[i].dtype)
        return here._replace(grads=grads)

    def local(self) -> Weights:
        """The parts that this process holds."""
        if not self.spread:
            return self
        return Weights(
            [local(p) for p in self.params],
            [local(g) for g in self.grads],
            [local(v) for v in self.velocities],
            self.axes,
        )


NOTHING = Weights([], [], [], [])


def one_by_one(weights: Weights, numbers: Numbers) -> None:
    """The rule as it is written: the reference for the others, and what a compiler is given."""
    here = weights.centred()
    for i, (param, grad) in enumerate(zip(here.params, here.grads, strict=True)):
        if numbers.sign < 0:
            grad = -grad
        if here.velocities:
            velocity = here.velocities[i].mul_(numbers.momentum).add_(grad)
            grad = grad.add(velocity, alpha=numbers.momentum) if numbers.nesterov else velocity
        if numbers.weight_decay:
            param.mul_(numbers.kept)
        _descend(param, grad, numbers.lr)


def _descend(param: Tensor, direction: Tensor, lr: float | Tensor, by: float = 1) -> None:
    if isinstance(lr, Tensor):
        param.addcmul_(direction.to(param.dtype), lr.to(param.dtype), value=-by)
    else:
        param.add_(direction, alpha=-by * lr)


def foreach(weights: Weights, numbers: Numbers) -> None:
    """Lists at a time where torch can, without a copy of anything."""
    if weights.params[0].dtype in HALF:
        # A velocity that has the mean in it for a moment would lose digits for good.
        here = weights.centred()
        sums: list[tuple[int, Tensor, int]] = []
    else:
        here, sums = weights.local(), weights.sums()
    if here.velocities:
        torch._foreach_mul_(here.velocities, numbers.momentum)
        torch._foreach_add_(here.velocities, here.grads, alpha=numbers.sign)
        for i, total, count in sums:
            here.velocities[i].sub_(total, alpha=numbers.sign / count)
    finish(here, sums, numbers)


def finish(here: Weights, sums: list[tuple[int, Tensor, int]], numbers: Numbers) -> None:
    """Decay and step, given velocities that are up to date."""
    if numbers.weight_decay:
        torch._foreach_mul_(here.params, numbers.kept)
    if not here.velocities or numbers.nesterov:
        _step(here.params, here.grads, numbers.lr, numbers.sign)
        for i, total, count in sums:
            _descend(here.params[i], total, numbers.lr, -numbers.sign / count)
    if here.velocities:
        _step(here.params, here.velocities, numbers.lr, numbers.momentum if numbers.nesterov else 1)


def _step(params: list[Tensor], directions: list[Tensor], lr: float | Tensor, by: float) -> None:
    if isinstance(lr, Tensor):
        # In pairs, since a list times a tensor would be another copy of the model.
        for param, direction in zip(params, directions, strict=True):
            _descend(param, direction, lr, by)
    else:
        torch._foreach_add_(params, directions, alpha=-by * lr)


def fused_on_cpu(weights: Weights, numbers: Numbers) -> None:
    """Velocity and weights in one pass of torch's own kernel for processors.

    That kernel computes ``v <- momentum v + g``, so the mean is taken off ``v`` beforehand, divided
    by the momentum. It knows only decay that enters the gradient; ours is a pass before.
    """
    sums, here = weights.sums(), weights.local()
    if numbers.weight_decay:
        torch._foreach_mul_(here.params, numbers.kept)
    for i, total, count in sums:
        here.velocities[i].sub_(total, alpha=numbers.sign / (numbers.momentum * count))
    torch._fused_sgd_(
        here.params,
        [laid_like(g, p) for g, p in zip(here.grads, here.params, strict=True)],
        here.velocities,
        weight_decay=0.0,
        momentum=numbers.momentum,
        lr=float(numbers.lr),
        dampening=0.0,
        nesterov=False,
        maximize=numbers.sign < 0,
        is_first_step=False,
    )


def fits_fused_on_cpu(weights: Weights, numbers: Numbers) -> bool:
    """Whether torch's kernel can do this group's step.

    It walks memory from end to end and does not look at strides, so they are looked at here.
    """
    if not weights.velocities or numbers.nesterov or numbers.momentum < LEAST_MOMENTUM:
        return False
    here = weights.local()
    first = here.params[0]
    if first.device.type != "cpu" or first.dtype not in (torch.float32, torch.float64):
        return False
    return all(
        alike(p, v) and (p.is_contiguous() or without_gaps(p.shape, p.stride()))
        for p, v in zip(here.params, here.velocities, strict=True)
    )
