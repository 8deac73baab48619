"""Convolution of one client as an operator with a rule for mapping it over clients.

Mapped over clients whose weights differ, torch turns a convolution into a grouped one, for which
cuDNN has fast kernels for some shapes and very slow ones for others. Our own kernels are the
alternative. The faster one is measured once per shape, and cached.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from fedzmg.models.kernels import precision
from fedzmg.models.kernels.precision import HAS_TRITON, clients_first

MAX_CHANNELS = 128  # more do not fit in the tiles of our kernels
_chosen: dict[tuple[Any, ...], bool] = {}  # True if ours were faster, by shape and precision


def available(x: Tensor, w: Tensor) -> bool:
    """Tell whether our kernels can compute this convolution."""
    fits = x.dtype in (torch.float32, torch.bfloat16) and max(w.shape[-4:-2]) <= MAX_CHANNELS
    return x.is_cuda and fits and HAS_TRITON


@custom_op("fedzmg::conv2d", mutates_args=())
def conv2d(x: Tensor, w: Tensor, rows: int, columns: int, rounding: str) -> Tensor:  # noqa: ARG001
    """Convolve one client's images with stride one, ``rows`` and ``columns`` of padding."""
    return F.conv2d(x, w, padding=(rows, columns))


@conv2d.register_fake
def _(x: Tensor, w: Tensor, rows: int, columns: int, _rounding: str) -> Tensor:
    return x.new_empty(*_shape(x, w, rows, columns))


def _shape(x: Tensor, w: Tensor, rows: int, columns: int) -> tuple[int, ...]:
    high = x.shape[-2] + 2 * rows - w.shape[-2] + 1
    wide = x.shape[-1] + 2 * columns - w.shape[-1] + 1
    return (*x.shape[:-3], w.shape[-4], high, wide)


def _over_clients(
    info: Any, in_dims: Any, x: Tensor, w: Tensor, rows: int, columns: int, rounding: str
) -> tuple[Tensor, int]:
    if in_dims[1] is None:  # one set of weights: clients are more examples
        many = clients_first(x, in_dims[0])
        out = F.conv2d(many.flatten(0, 1), w, padding=(rows, columns))
        return out.reshape(*many.shape[:2], *out.shape[1:]), 0
    w = clients_first(w, in_dims[1])
    if in_dims[0] is None:  # one set of images: clients are more filters
        out = F.conv2d(x, w.flatten(0, 1), padding=(rows, columns))
        return out.reshape(len(x), info.batch_size, -1, *out.shape[2:]).transpose(0, 1), 0
    return _of_clients(clients_first(x, in_dims[0]), w, rows, columns, rounding), 0


conv2d.register_vmap(_over_clients)


def _of_clients(x: Tensor, w: Tensor, rows: int, columns: int, rounding: str) -> Tensor:
    # What is traced is trained; models are evaluated as they are.
    learns = torch.is_grad_enabled() or not _concrete(x)
    key = (tuple(x.shape), tuple(w.shape), rows, columns, x.dtype, rounding, learns)
    measured = not precision.bits_are_kept()
    if measured and key not in _chosen and _concrete(x):
        _chosen[key] = precision.cached_answer(
            f"{torch.cuda.get_device_name(x.device)} {key}",
            lambda: _ours_is_faster(x, w, rows, columns, rounding, learns=learns),
        )
    if not measured or _chosen.get(key, True):
        return clients_conv2d(_kernel_layout(x), w, rows, columns, rounding, False)  # type: ignore[no-any-return]
    return grouped_conv2d(x, w, rows, columns)


def choices() -> str:
    """Describe the choices so far, for caches of code that depends on them."""
    return repr(sorted(_chosen.items(), key=repr))


def _concrete(x: Tensor) -> bool:
    """Tell whether kernels can be timed: not while a graph is traced or captured."""
    return type(x) is Tensor and not torch.cuda.is_current_stream_capturing()


def _ours_is_faster(
    x: Tensor, w: Tensor, rows: int, columns: int, rounding: str, *, learns: bool
) -> tuple[bool, bool]:
    """Time the products of a step both ways, on tensors like these; and tell whether it is sure."""
    x, w = x.detach(), w.detach()
    clients, taps = len(x), list(w.shape[-2:])
    arranged = _kernel_layout(x)
    signal = _kernel_layout(torch.ones(_shape(x, w, rows, columns), dtype=x.dtype, device=x.device))
    # The first layer of a network has no inputs that need a gradient.
    first = x.shape[2] <= 4

    def ours() -> None:
        clients_conv2d(arranged, w, rows, columns, rounding, False)
        if learns:
            clients_conv2d_weight(arranged, signal, taps, rows, columns, rounding)
        if learns and not first:
            clients_conv2d(signal, w, rows, columns, rounding, True)

    def grouped() -> None:
        grouped_conv2d(x, w, rows, columns)
        if learns:
            wide, back = (each.transpose(0, 1).flatten(1, 2) for each in (x, signal))
            torch.ops.aten.convolution_backward(
                back, wide, w.flatten(0, 1), None, [1, 1], [rows, columns], [1, 1], False, [0, 0],
                clients, [not first, True, False],
            )  # fmt: skip

    return precision.is_faster(ours, grouped)


def grouped_conv2d(x: Tensor, w: Tensor, rows: int, columns: int) -> Tensor:
    """Convolve as torch does: clients as groups of one wide convolution."""
    clients, batch = x.shape[:2]
    wide = x.transpose(0, 1).reshape(batch, -1, *x.shape[3:])
    out = F.conv2d(wide, w.flatten(0, 1), padding=(rows, columns), groups=clients)
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
    from fedzmg.models.kernels.triton_convolution import convolve

    out = convolve(_channels_last(x), w, (rows, columns), rounding, turned=turned)
    return out.permute(0, 1, 4, 2, 3)


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
    from fedzmg.models.kernels.triton_convolution import weight_gradient

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
