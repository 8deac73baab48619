"""FedZMG's step on lists of tensors, as plain tensor arithmetic.

Every function takes the step that :class:`fedzmg.optim.ZeroMeanSGD` documents. They differ in how
often memory is read and written, nearly all of the cost: with momentum and decay 13 model sizes
one by one and foreach, 10 fused on CPUs (``torch.optim.SGD``: 11 and 5).

Kernels walk addresses, not indices, so strides matter. A mean over an axis that is sharded over
processes (FSDP2, tensor parallelism) needs a sum over processes. DTensors are recognised by their
attributes: nothing distributed is imported for models in one process.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from fedzmg.errors import InputError
from fedzmg.models.layout import Axes

Options: TypeAlias = Mapping[str, Any]
"""Options of a group; ``lr`` is a tensor only where reading it would block a device or compiler."""
HALF = (torch.float16, torch.bfloat16)
MIN_MOMENTUM = 1e-6  # smallest momentum that a mean can be divided by without overflow in float32


def inputs(shape: Sequence[int], axes: Axes) -> int:
    """Count the entries that share one mean."""
    found = 1
    for axis in axes:  # a loop, which torch.compile can follow
        found *= shape[axis]
    return found


def alike(one: Tensor, other: Tensor) -> bool:
    """Check that equal indices of two tensors of one shape have equal offsets in memory."""
    return one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())


def with_strides_of(tensor: Tensor, model: Tensor) -> Tensor:
    """Return the tensor, or a copy with the strides of ``model``."""
    return tensor if alike(tensor, model) else torch.empty_like(model).copy_(tensor)


def without_gaps(tensor: Tensor) -> bool:
    """Check that a tensor fills a block of memory, in any order of its axes."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def is_sharded(tensor: Tensor) -> bool:
    """Check whether a tensor is sharded over processes."""
    # hasattr is slow for missing attributes, and a step asks for every parameter.
    return type(tensor) not in (Tensor, Parameter) and hasattr(tensor, "placements")


def local(tensor: Any) -> Tensor:
    """Return the part of a tensor that this process holds, in the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def inputs_sharded(parameter: Any, axes: Axes) -> bool:
    """Check whether entries that share a mean are on different processes."""
    if not axes or not is_sharded(parameter):
        return False
    if any(placement.is_partial() for placement in parameter.placements):
        raise InputError("a parameter is a partial sum over processes: its mean is not known")
    return any(p.is_shard() and p.dim % parameter.ndim in axes for p in parameter.placements)


def usable(grad: Any, parameter: Any, axes: Axes) -> Tensor:
    """Return a gradient that is dense, and sharded as its parameter is."""
    if grad.layout is not torch.strided:
        if axes:
            raise InputError(
                f"a gradient of shape {tuple(grad.shape)} is sparse, and minus its mean it is "
                "dense: build the layer with sparse=False, call grad.to_dense() before the step, "
                "or leave the weight uncentred with axes ()"
            )
        grad = grad.to_dense()
    if is_sharded(parameter) != is_sharded(grad):
        kinds = f"{type(parameter).__name__}, {type(grad).__name__}"
        unlike = f"a parameter and its gradient are not sharded alike ({kinds})"
        raise InputError(f"{unlike}: shard the model before training")
    if is_sharded(parameter) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return grad  # type: ignore[no-any-return]


def sum_of_inputs(grad: Tensor, axes: Axes) -> Tensor:
    """Sum over ``axes``, which stay; if split, over all processes, in the same order in each."""
    if inputs_sharded(grad, axes):
        from torch.distributed.tensor import Replicate

        part: Any = _sum(grad, axes)
        whole = [Replicate() if p.is_partial() else p for p in part.placements]
        return part.redistribute(placements=whole).to_local()  # type: ignore[no-any-return]
    opaque = torch.compiler.is_compiling() and grad.device.type == "cpu"
    return (_opaque_sum if opaque else _sum)(local(grad), axes)


def _sum(grad: Tensor, axes: Axes) -> Tensor:
    wide = torch.float32 if grad.dtype in HALF else grad.dtype
    return grad.sum(dim=axes, keepdim=True, dtype=wide)


# Inductor of torch 2.13 fails on CPUs (KeyError: 'buf2') when it fuses a sum with the in-place
# updates of velocity and weight after it. It does not look into an operator of our own.
_opaque_sum = torch.library.custom_op(
    "fedzmg::sum_of_inputs", _sum, mutates_args=(), schema="(Tensor grad, int[] axes) -> Tensor"
)
_opaque_sum.register_fake(_sum)


class Weights(NamedTuple):
    """Tensors of a step in parallel lists; ``velocities`` is empty without momentum."""

    params: list[Tensor]
    grads: list[Tensor]
    velocities: list[Tensor]
    axes: list[Axes]
    sharded: bool = False

    def sums(self) -> list[tuple[int, Tensor, int]]:
        """Return index, sum over the inputs and number of inputs of every centred tensor."""
        return [
            (i, sum_of_inputs(grad, axes), inputs(grad.shape, axes))
            for i, (grad, axes) in enumerate(zip(self.grads, self.axes, strict=True))
            if axes and grad.numel()
        ]

    def some(self, indices: list[int]) -> "Weights":
        """Select tensors by index."""
        lists: Any = ([each[i] for i in indices] if each else [] for each in self[:4])
        return Weights._make([*lists, self.sharded])

    def local(self) -> "Weights":
        """Return the parts that this process holds."""
        if not self.sharded:
            return self
        lists: Any = ([local(tensor) for tensor in each] for each in self[:3])
        return Weights._make([*lists, self.axes, False])

    def centred(self) -> "Weights":
        """Return the local parts, with centred copies of the gradients."""
        here = self.local()
        grads = list(here.grads)
        for i, total, count in self.sums():
            grads[i] = grads[i].sub(total, alpha=1 / count).to(grads[i].dtype)
        return here._replace(grads=grads)


def one_by_one(weights: Weights, options: Options) -> None:
    """Step tensor by tensor, as the rule is written: the reference, and the form for compilers."""
    here, lr, momentum = weights.centred(), options["lr"], options["momentum"]
    for i, (param, grad) in enumerate(zip(here.params, here.grads, strict=True)):
        if options["maximize"]:
            grad = -grad
        if here.velocities:
            velocity = here.velocities[i].mul_(momentum).add_(grad)
            grad = grad.add(velocity, alpha=momentum) if options["nesterov"] else velocity
        if options["weight_decay"]:
            param.mul_(1 - options["weight_decay"] * lr)
        _descend(param, grad, lr)


def _descend(param: Tensor, direction: Tensor, lr: float | Tensor, by: float = 1) -> None:
    if isinstance(lr, Tensor):
        param.addcmul_(direction.to(param.dtype), lr.to(param.dtype), value=-by)
    else:
        param.add_(direction, alpha=-by * lr)


def foreach(weights: Weights, options: Options) -> None:
    """Step with torch's functions on lists, without copies."""
    lr, momentum, nesterov = options["lr"], options["momentum"], options["nesterov"]
    sign = -1 if options["maximize"] else 1
    # In half precision, a velocity that temporarily contains the mean would lose digits.
    half = weights.params[0].dtype in HALF
    here, sums = (weights.centred(), []) if half else (weights.local(), weights.sums())
    if here.velocities:
        torch._foreach_mul_(here.velocities, momentum)
        torch._foreach_add_(here.velocities, here.grads, alpha=sign)
        for i, total, count in sums:
            here.velocities[i].sub_(total, alpha=sign / count)
    if options["weight_decay"]:
        torch._foreach_mul_(here.params, 1 - options["weight_decay"] * lr)
    if not here.velocities or nesterov:
        _descend_all(here.params, here.grads, lr, sign)
        for i, total, count in sums:
            _descend(here.params[i], total, lr, -sign / count)
    if here.velocities:
        _descend_all(here.params, here.velocities, lr, momentum if nesterov else 1)


def _descend_all(params: list[Tensor], along: list[Tensor], lr: float | Tensor, by: float) -> None:
    if not isinstance(lr, Tensor):
        torch._foreach_add_(params, along, alpha=-by * lr)
        return
    # In pairs: a list times a tensor would copy the model.
    for param, direction in zip(params, along, strict=True):
        _descend(param, direction, lr, by)


def fused_on_cpu(weights: Weights, options: Options) -> bool:
    """Step with torch's fused CPU kernel; return False if it cannot do this step.

    That kernel ignores strides and computes ``v <- momentum v + g``, so the mean divided by the
    momentum is subtracted from ``v`` first. It has only coupled decay; ours is a pass before.
    """
    here, momentum, first = weights.local(), options["momentum"], local(weights.params[0])
    if not (
        here.velocities
        and not options["nesterov"]
        and momentum >= MIN_MOMENTUM
        and first.device.type == "cpu"
        and first.dtype in (torch.float32, torch.float64)
        and all(
            alike(p, v) and (p.is_contiguous() or without_gaps(p))
            for p, v in zip(here.params, here.velocities, strict=True)
        )
    ):
        return False
    sums = weights.sums()
    if options["weight_decay"]:
        torch._foreach_mul_(here.params, 1 - options["weight_decay"] * options["lr"])
    for i, total, count in sums:
        sign = -1 if options["maximize"] else 1
        here.velocities[i].sub_(total, alpha=sign / (momentum * count))
    torch._fused_sgd_(
        here.params, [with_strides_of(g, p) for g, p in zip(here.grads, here.params, strict=True)],
        here.velocities, weight_decay=0.0, momentum=momentum, lr=float(options["lr"]),
        dampening=0.0, nesterov=False, maximize=options["maximize"], is_first_step=False,
    )  # fmt: skip
    return True
