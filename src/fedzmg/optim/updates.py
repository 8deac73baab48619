"""FedZMG's step on lists of tensors, as plain tensor arithmetic.

Every function does the same to all tensors of a group::

    g <- g - mean(g over the layer's inputs)
    v <- momentum v + g
    w <- w (1 - decay lr) - lr v             (nesterov: g + momentum v in place of v)

They differ in how often memory is read and written, which is nearly all of the cost. In model
sizes, with momentum, without and with decay:

==========  ===  ===  ======================================================================
one by one  11   13   the rule as written
foreach     11   13   the sum is one read, and it is taken off ``v`` in place
fused       8    10   on CPUs; as foreach, but ``v`` and ``w`` are written in one pass
==========  ===  ===  ======================================================================

``torch.optim.SGD`` has 8 and 11 (foreach), 5 and 5 (fused).

Kernels walk addresses, not indices, so strides matter. A mean over an axis that is sharded over
processes (FSDP2, tensor parallelism) needs a sum over processes; everything else works on the local
part. DTensors are recognised by their attributes, so that nothing distributed is imported for
models in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fedzmg.errors import InputError
from fedzmg.optim.axes import Axes, inputs

HALF = (torch.float16, torch.bfloat16)
MIN_MOMENTUM = 1e-6
"""Smallest momentum that a mean can be divided by without overflow in float32."""


def without_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Check that a tensor fills a block of memory, in any order of its axes."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def alike(one: Tensor, other: Tensor) -> bool:
    """Check that equal indices of two tensors of one shape have equal offsets in memory."""
    return one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())


def with_strides_of(tensor: Tensor, model: Tensor) -> Tensor:
    """Return the tensor, or a copy with the strides of ``model``."""
    return tensor if alike(tensor, model) else torch.empty_like(model).copy_(tensor)


def is_sharded(tensor: Tensor) -> bool:
    """Check whether a tensor is sharded over processes."""
    # hasattr is slow for missing attributes, and a step asks for every parameter.
    return type(tensor) not in (Tensor, Parameter) and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, in the same memory."""
    part: Any = tensor
    return part.to_local() if is_sharded(tensor) else tensor


def sharded_like(grad: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient that is sharded as its parameter is."""
    if is_sharded(parameter) != is_sharded(grad):
        raise InputError(
            "a parameter and its gradient are not sharded alike "
            f"({type(parameter).__name__}, {type(grad).__name__}): shard the model before training"
        )
    wanted: Any = parameter
    given: Any = grad
    if is_sharded(parameter) and given.placements != wanted.placements:
        given = given.redistribute(placements=wanted.placements)
    return given  # type: ignore[no-any-return]


def inputs_sharded(parameter: Tensor, axes: Axes) -> bool:
    """Check whether entries that share a mean are on different processes."""
    if not axes or not is_sharded(parameter):
        return False
    spread: Any = parameter
    for placement in spread.placements:
        if placement.is_partial():
            raise InputError("a parameter is a partial sum over processes: its mean is not known")
        if placement.is_shard() and placement.dim % parameter.ndim in axes:
            return True
    return False


def dense(grad: Tensor, axes: Axes) -> Tensor:
    """Return a dense gradient; reject a sparse one that has to be centred."""
    if grad.layout is torch.strided:
        return grad
    if axes:
        raise InputError(
            f"a gradient of shape {tuple(grad.shape)} is sparse, and minus its mean it is dense: "
            "build the layer with sparse=False, call grad.to_dense() before the step, or leave the "
            "weight uncentred with axes ()"
        )
    return grad.to_dense()


def sum_of_inputs(grad: Tensor, axes: Axes) -> Tensor:
    """Sum over ``axes``, which stay with length one; over all processes if they are split.

    If they are, every process calls this in the same order.
    """
    if inputs_sharded(grad, axes):
        from torch.distributed.tensor import Replicate

        part: Any = _sum(grad, axes)
        whole = [Replicate() if p.is_partial() else p for p in part.placements]
        return part.redistribute(placements=whole).to_local()  # type: ignore[no-any-return]
    if torch.compiler.is_compiling() and grad.device.type == "cpu":
        total: Tensor = _opaque_sum(local(grad), axes)
        return total
    return _sum(local(grad), axes)


def _sum(grad: Tensor, axes: Axes) -> Tensor:
    wide = torch.float32 if grad.dtype in HALF else grad.dtype
    return grad.sum(dim=axes, keepdim=True, dtype=wide)


# Inductor of torch 2.13 fails on CPUs (KeyError: 'buf2') when it fuses a sum with the in-place
# updates of velocity and weight after it. It does not look into an operator of our own.
_opaque_sum = torch.library.custom_op(
    "fedzmg::sum_of_inputs", _sum, mutates_args=(), schema="(Tensor grad, int[] axes) -> Tensor"
)
_opaque_sum.register_fake(_sum)


class Numbers(NamedTuple):
    """The hyper-parameters of one step of one group."""

    lr: float | Tensor
    """A tensor only where reading its value would block a device or a compiler."""
    momentum: float
    weight_decay: float
    nesterov: bool
    sign: int
    """-1 to ascend."""

    @property
    def kept(self) -> float | Tensor:
        """Factor of a weight after decay."""
        return 1 - self.weight_decay * self.lr


class Weights(NamedTuple):
    """Tensors of a step in parallel lists; ``velocities`` is empty without momentum."""

    params: list[Tensor]
    grads: list[Tensor]
    velocities: list[Tensor]
    axes: list[Axes]
    sharded: bool = False
    """True if some are sharded over processes."""

    def sums(self) -> list[tuple[int, Tensor, int]]:
        """Return index, sum over the inputs and number of inputs of every centred tensor."""
        return [
            (i, sum_of_inputs(grad, axes), inputs(grad.shape, axes))
            for i, (grad, axes) in enumerate(zip(self.grads, self.axes, strict=True))
            if axes and grad.numel()
        ]

    def some(self, indices: list[int]) -> Weights:
        """Select tensors by index."""
        if not indices:
            return NOTHING
        return Weights(
            [self.params[i] for i in indices],
            [self.grads[i] for i in indices],
            [self.velocities[i] for i in indices] if self.velocities else [],
            [self.axes[i] for i in indices],
            self.sharded,
        )

    def centred(self) -> Weights:
        """Return the local parts, with centred copies of the gradients."""
        here = self.local()
        grads = list(here.grads)
        for i, total, count in self.sums():
            grads[i] = grads[i].sub(total, alpha=1 / count).to(grads[i].dtype)
        return here._replace(grads=grads)

    def local(self) -> Weights:
        """Return the parts that this process holds."""
        if not self.sharded:
            return self
        return Weights(
            [local(p) for p in self.params],
            [local(g) for g in self.grads],
            [local(v) for v in self.velocities],
            self.axes,
        )


NOTHING = Weights([], [], [], [])


def one_by_one(weights: Weights, numbers: Numbers) -> None:
    """Step tensor by tensor, as the rule is written: the reference, and the form for compilers."""
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
    """Step with torch's functions on lists, without copies."""
    if weights.params[0].dtype in HALF:
        # A velocity that temporarily contains the mean would lose digits.
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
    """Apply decay and step, given updated velocities."""
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
        # In pairs: a list times a tensor would copy the model.
        for param, direction in zip(params, directions, strict=True):
            _descend(param, direction, lr, by)
    else:
        torch._foreach_add_(params, directions, alpha=-by * lr)


def fused_on_cpu(weights: Weights, numbers: Numbers) -> None:
    """Update velocity and weights in one pass of torch's fused CPU kernel.

    That kernel computes ``v <- momentum v + g``, so the mean divided by the momentum is subtracted
    from ``v`` first. It has only coupled decay; ours is a pass before.
    """
    sums, here = weights.sums(), weights.local()
    if numbers.weight_decay:
        torch._foreach_mul_(here.params, numbers.kept)
    for i, total, count in sums:
        here.velocities[i].sub_(total, alpha=numbers.sign / (numbers.momentum * count))
    torch._fused_sgd_(
        here.params,
        [with_strides_of(g, p) for g, p in zip(here.grads, here.params, strict=True)],
        here.velocities,
        weight_decay=0.0,
        momentum=numbers.momentum,
        lr=float(numbers.lr),
        dampening=0.0,
        nesterov=False,
        maximize=numbers.sign < 0,
        is_first_step=False,
    )


def can_use_fused_on_cpu(weights: Weights, numbers: Numbers) -> bool:
    """Check that torch's fused CPU kernel can do this step; it ignores strides."""
    if not weights.velocities or numbers.nesterov or numbers.momentum < MIN_MOMENTUM:
        return False
    here = weights.local()
    first = here.params[0]
    if first.device.type != "cpu" or first.dtype not in (torch.float32, torch.float64):
        return False
    return all(
        alike(p, v) and (p.is_contiguous() or without_gaps(p.shape, p.stride()))
        for p, v in zip(here.params, here.velocities, strict=True)
    )
