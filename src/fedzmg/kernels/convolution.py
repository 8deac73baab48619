"""Convolution of one client as an operator with a rule for mapping it over clients.

Mapped over clients whose weights differ, torch turns a convolution into a grouped one, for which
cuDNN has fast kernels for some shapes and very slow ones for others. Our own kernels, and products
of patches, are the alternatives. The fastest one is measured once per shape, and cached; small
convolutions are products of patches.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from fedzmg.kernels import patches, precision
from fedzmg.kernels.precision import clients_first

SMALL = 1 << 20  # bytes of a client's outputs, or values of its patches: measuring does not pay
MAX_CHANNELS = 128  # more do not fit in the tiles of our kernels
_chosen: dict[tuple[Any, ...], str] = {}  # the fastest way by shape and precision


@custom_op("fedzmg::conv2d", mutates_args=())
def conv2d(x: Tensor, w: Tensor, stride: list[int], padding: list[int], rounding: str) -> Tensor:  # noqa: ARG001
    """Convolve the images of one client."""
    return F.conv2d(x, w, None, stride, padding)


@conv2d.register_fake
def _(x: Tensor, w: Tensor, stride: list[int], padding: list[int], _rounding: str) -> Tensor:
    return x.new_empty(len(x), len(w), *patches.out_size(x, w, stride, padding))


@conv2d.register_vmap
def _(
    info: Any, in_dims: Any, x: Tensor, w: Tensor, stride: list[int], padding: list[int],
    rounding: str,
) -> tuple[Tensor, int]:  # fmt: skip
    if in_dims[1] is None:  # one set of weights: clients are more examples
        many = clients_first(x, in_dims[0])
        out = F.conv2d(many.flatten(0, 1), w, None, stride, padding)
        return out.reshape(*many.shape[:2], *out.shape[1:]), 0
    w = clients_first(w, in_dims[1])
    if in_dims[0] is None:  # one set of images: clients are more filters
        out = F.conv2d(x, w.flatten(0, 1), None, stride, padding)
        return out.reshape(len(x), info.batch_size, -1, *out.shape[2:]).transpose(0, 1), 0
    return _of_clients(clients_first(x, in_dims[0]), w, stride, padding, rounding), 0


def _of_clients(
    x: Tensor, w: Tensor, stride: list[int], padding: list[int], rounding: str
) -> Tensor:
    # What is traced is trained; models are evaluated as they are.
    learns = torch.is_grad_enabled() or not _concrete(x)
    shapes = precision.crowd(len(x)), tuple(x.shape[1:]), tuple(w.shape[1:])
    key = (*shapes, *stride, *padding, x.dtype, rounding, learns)
    form = stride, padding, rounding
    ways = _ways(x, w, stride, padding)
    measured = len(ways) > 1 and not precision.bits_are_kept()
    if measured and key not in _chosen and _concrete(x):
        _chosen[key] = precision.cached_answer(
            f"{torch.cuda.get_device_name(x.device)} {key}",
            lambda: _fastest({name: _WAYS[name] for name in ways}, x, w, form, learns=learns),
        )
    chosen = _chosen.get(key, ways[0]) if measured else ways[0]
    return _WAYS[chosen](x, w, *form)


def _ways(x: Tensor, w: Tensor, stride: list[int], padding: list[int]) -> list[str]:
    """Name the ways to compute a convolution; the first one wherever bits must not move."""
    pixels = x.shape[1] * math.prod(patches.out_size(x, w, stride, padding))
    size = pixels * max(4 * w.shape[1], w[0, 0].numel())  # of one client
    if size < SMALL:
        return ["patches"]
    if max(stride) > 1 or max(w.shape[1:3]) > MAX_CHANNELS:
        return ["patches", "grouped"]
    return ["kernels", "grouped", *["patches"] * (size < 2 * SMALL)]


def choices() -> str:
    """Describe the choices so far, for caches of code that depends on them."""
    return repr(sorted(_chosen.items(), key=repr))


def _concrete(x: Tensor) -> bool:
    """Tell whether kernels can be timed: not while a graph is traced or captured."""
    return type(x) is Tensor and not torch.cuda.is_current_stream_capturing()


def _fastest(
    ways: dict[str, Callable[..., Tensor]], x: Tensor, w: Tensor, form: Any, *, learns: bool
) -> tuple[str, bool]:
    """Time every way on tensors like these; return the fastest, and whether it is sure."""
    # The first layer of a network has no inputs that need a gradient.
    inner = learns and x.shape[2] > 4

    def timed(name: str) -> Callable[[], object]:
        weights = torch.ones(w.shape, dtype=w.dtype, device=w.device).requires_grad_(learns)
        images = torch.ones(x.shape, dtype=x.dtype, device=x.device)
        if name == "kernels":
            from fedzmg.kernels.triton_convolution import compile_ahead

            compile_ahead(_channels_last(images), weights, *form[1:], learns=learns, inner=inner)
            images = _kernel_layout(images)
        images = images.requires_grad_(inner)
        needed = [images, weights] if inner else [weights]
        signal = torch.ones_like(ways[name](images, weights, *form))

        def call() -> object:
            out = ways[name](images, weights, *form)
            return torch.autograd.grad(out, needed, signal) if learns else out

        return call

    def fastest() -> tuple[str, bool]:
        with torch.cuda.device(x.device), torch.set_grad_enabled(learns):
            return precision.fastest({name: timed(name) for name in ways})

    with ThreadPoolExecutor(1) as outside:  # of the map, which excludes autograd
        return outside.submit(fastest).result()


def by_groups(x: Tensor, w: Tensor, stride: list[int], padding: list[int], *_: object) -> Tensor:
    """Convolve as torch does: clients as groups of one wide convolution."""
    clients, batch = x.shape[:2]
    wide = x.transpose(0, 1).reshape(batch, -1, *x.shape[3:])
    out = F.conv2d(wide, w.flatten(0, 1), None, stride, padding, groups=clients)
    return out.reshape(batch, clients, -1, *out.shape[2:]).transpose(0, 1)


def _kernel_layout(x: Tensor) -> Tensor:
    """Change the memory layout to that of our kernels; inside of an operator it would be a copy."""
    return _channels_last(x).permute(0, 1, 4, 2, 3)


def _channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 1, 3, 4, 2).contiguous()


@custom_op("fedzmg::clients_conv2d", mutates_args=())
def clients_conv2d(
    x: Tensor, w: Tensor, rows: int, columns: int, rounding: str, turned: bool
) -> Tensor:
    """Convolve ``[clients, batch, ...]`` images with own weights; ``turned``: transposed."""
    from fedzmg.kernels.triton_convolution import convolve

    return convolve(_channels_last(x), w, (rows, columns), rounding, turned=turned)


@clients_conv2d.register_fake
def _(x: Tensor, w: Tensor, rows: int, columns: int, _rounding: str, turned: bool) -> Tensor:
    clients, batch, _, high, wide = x.shape
    outputs, more = (w.shape[2], -1) if turned else (w.shape[1], 1)
    high += more * (2 * rows - w.shape[3] + 1)
    wide += more * (2 * columns - w.shape[4] + 1)
    return x.new_empty(clients, batch, high, wide, outputs).permute(0, 1, 4, 2, 3)


@custom_op("fedzmg::clients_conv2d_weight", mutates_args=())
def clients_conv2d_weight(
    x: Tensor, signal: Tensor, taps: list[int], rows: int, columns: int, rounding: str
) -> Tensor:
    """Compute the gradient of the weights."""
    from fedzmg.kernels.triton_convolution import weight_gradient

    inputs, back = _channels_last(x), _channels_last(signal)
    out = weight_gradient(inputs, back, (taps[0], taps[1]), (rows, columns), rounding)
    return out.to(x.dtype).contiguous()


@clients_conv2d_weight.register_fake
def _(x: Tensor, signal: Tensor, taps: list[int], *_: object) -> Tensor:
    return x.new_empty(x.shape[0], signal.shape[2], x.shape[2], *taps)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, w, *ctx.rest, ctx.turned = inputs
    ctx.save_for_backward(x, w)


def _backward(ctx: Any, signal: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    signal = _kernel_layout(signal)
    for_x = for_w = None
    if ctx.needs_input_grad[0]:
        for_x = clients_conv2d(signal, w, *ctx.rest, not ctx.turned)
    if ctx.needs_input_grad[1]:
        ends = (signal, x) if ctx.turned else (x, signal)
        for_w = clients_conv2d_weight(*ends, list(w.shape[-2:]), *ctx.rest)
    return for_x, for_w, None, None, None, None


clients_conv2d.register_autograd(_backward, setup_context=_setup_context)

_WAYS: dict[str, Callable[..., Tensor]] = {  # our kernels, torch's convolution, matrix products
    "kernels": lambda x, w, _, *own: clients_conv2d(_kernel_layout(x), w, *own[0], own[1], False),
    "grouped": by_groups,
    "patches": lambda x, w, *form: patches.of_clients(x, w, *form[:2]).permute(0, 4, 1, 2, 3),
}
