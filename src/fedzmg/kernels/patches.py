"""Convolutions as products of matrices, for one client or for many with own weights.

A column of the second matrix is a patch of an image. The images of a batch lie next to each other
in memory, after rows and columns of pixels, so that patches are copied in runs; the outputs come in
the same layout, which later layers keep. Torch's own convolutions loop over images, or over clients
as groups, with small products.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import Function
from torch.library import custom_op

from fedzmg.kernels.precision import clients_first

MOST_BYTES = 1 << 26  # of patches at a time
Pair = Sequence[int]


def conv2d(x: Tensor, w: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """Convolve the images of one client, or of mapped ones."""
    level = functorch.maybe_current_level()
    mapped = functorch.is_batchedtensor(x) and functorch.is_batchedtensor(w)
    if mapped and functorch.maybe_get_level(x) == level == functorch.maybe_get_level(w):
        # As in the method vmap below, which torch takes half a millisecond to call.
        axes = map(functorch.maybe_get_bdim, (x, w))
        x, w = map(clients_first, map(functorch.get_unwrapped, (x, w)), axes)
        with temporarily_pop_interpreter_stack():
            out = of_clients(x, w, stride, padding).permute(0, 4, 1, 2, 3)
        return functorch._add_batch_dim(out, 0, level)
    # The gradient of a squeeze is a view, that of an index is a copy.
    return _OnCPU.apply(x[None], w[None], stride, padding).squeeze(0).permute(3, 0, 1, 2)  # type: ignore[no-any-return, no-untyped-call]


def of_clients(x: Tensor, w: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """Convolve ``[clients, batch, ...]`` images with own weights, some clients at a time."""
    few = _Form(x, w, stride, padding).clients_at_once
    parts = zip(torch.split(x, few), torch.split(w, few), strict=True)
    convolve: Any = clients_patches if x.is_cuda else _OnCPU.apply
    outs = [convolve(*part, stride, padding) for part in parts]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def out_size(x: Tensor, w: Tensor, stride: Pair, padding: Pair) -> Pair:
    """Return height and width of the outputs."""
    sizes = zip(x.shape[-2:], w.shape[-2:], stride, padding, strict=True)
    return [(size + 2 * pad - taps) // step + 1 for size, taps, step, pad in sizes]


class _Form:
    """Shapes of a convolution of images ``[clients, batch, channels, height, width]``."""

    def __init__(self, x: Tensor, w: Tensor, stride: Pair, padding: Pair) -> None:
        self.clients, self.batch, self.channels = len(w), *x.shape[1:3]
        self.taps, self.stride, self.padding = tuple(w.shape[-2:]), stride, padding
        self.inside, self.out = tuple(x.shape[-2:]), out_size(x, w, stride, padding)
        self.rows, self.columns = self.channels * math.prod(self.taps), math.prod(self.out)
        # Parts do not depend on other clients: a client has the same bits alone and beside them.
        each = max(1, self.rows * self.columns * x.element_size())
        self.images_at_once = max(1, MOST_BYTES // each)
        self.clients_at_once = max(1, MOST_BYTES // (each * max(1, self.batch)))

    def padded(self, batch: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Make padded images of zeros, the batch last, and a view of what is inside.

        On a GPU they are not padded and not zero: our kernels pad, and write every pixel.
        """
        (high, wide), (rows, columns) = self.inside, (0, 0) if like.is_cuda else self.padding
        shape = len(like), self.channels, high + 2 * rows, wide + 2 * columns, batch
        whole = like.new_empty(shape) if like.is_cuda else like.new_zeros(shape)
        return whole, whole[:, :, rows : rows + high, columns : columns + wide]

    def parts(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield some images and their patches: one row per channel and tap, one column each."""
        if x.stride(0) == 0:  # the same images for all
            x = x[:1]
        for first in range(0, max(1, self.batch), self.images_at_once):
            images = slice(first, first + self.images_at_once)
            if x.is_cuda:
                from fedzmg.kernels.triton_patches import cut

                yield images, cut(self, x[:, images]).expand(self.clients, -1, -1)
                continue
            some = x[:, images].permute(0, 2, 3, 4, 1)
            whole, inside = self.padded(some.shape[-1], some)
            inside.copy_(some)
            (down, across), (tall, broad) = self.stride, self.taps
            windows = whole.unfold(2, tall, down).unfold(3, broad, across)
            shape = len(x), self.rows, self.columns * some.shape[-1]
            patches = windows.permute(0, 1, 5, 6, 2, 3, 4).reshape(shape)
            yield images, patches.expand(self.clients, -1, -1)

    def add(self, whole: Tensor, patches: Tensor) -> None:
        """Add patches to padded images, each where it was cut."""
        if whole.is_cuda:
            from fedzmg.kernels.triton_patches import add

            add(self, whole, patches)
            return
        (tall, broad), (down, across), (high, wide) = self.taps, self.stride, self.out
        each = patches.reshape(self.clients, self.channels, tall, broad, high, wide, -1)
        for i in range(tall):
            for j in range(broad):
                rows, columns = slice(i, i + down * high, down), slice(j, j + across * wide, across)
                whole[:, :, rows, columns] += each[:, :, i, j]


def _convolve(x: Tensor, w: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """Convolve ``[clients, batch, ...]`` images with own weights.

    The outputs are ``[clients, outputs, height, width, batch]``, and no view: models may change
    them in place.
    """
    form, flat = _Form(x, w, stride, padding), w.flatten(2)
    shape = form.clients, flat.shape[1], *form.out
    found = [
        torch.ops.aten._unsafe_view(torch.bmm(flat, patches), [*shape, len(x[0, images])])
        for images, patches in form.parts(x)
    ]
    return found[0] if len(found) == 1 else torch.cat(found, -1)


clients_patches = custom_op("fedzmg::clients_patches", mutates_args=())(_convolve)


@clients_patches.register_fake
def _(x: Tensor, w: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    return x.new_empty(*w.shape[:2], *out_size(x, w, stride, padding), x.shape[1])


def _gradients(
    x: Tensor, w: Tensor, signal: Tensor, stride: list[int], padding: list[int], needed: list[bool]
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of images and weights that are needed; patches are made again."""
    form, flat = _Form(x, w, stride, padding), w.flatten(2)
    (whole, inside), for_w = form.padded(form.batch, w), flat.new_empty(flat.shape)
    for images, patches in form.parts(x):
        some = signal[..., images]
        back = some.reshape(form.clients, flat.shape[1], some[0, 0].numel())
        if needed[1]:
            part = torch.bmm(back, patches.mT)
            for_w = for_w + part if images.start else part
        if needed[0]:
            form.add(whole[..., images], torch.bmm(flat.mT, back))
    return inside.permute(0, 4, 1, 2, 3), for_w.reshape(w.shape)


clients_patches_back = custom_op("fedzmg::clients_patches_back", mutates_args=())(_gradients)


@clients_patches_back.register_fake
def _(
    x: Tensor, w: Tensor, _: Tensor, stride: list[int], padding: list[int], _needed: list[bool]
) -> tuple[Tensor, Tensor]:
    form = _Form(x, w, stride, padding)
    return form.padded(form.batch, w)[1].permute(0, 4, 1, 2, 3), w.new_empty(w.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, w, *ctx.form = inputs
    ctx.save_for_backward(x, w)


def _backward(ctx: Any, signal: Tensor) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:2])
    gradients: Any = clients_patches_back if signal.is_cuda else _gradients
    found = gradients(*ctx.saved_tensors, signal, *ctx.form, needed)
    return *(grad if need else None for grad, need in zip(found, needed, strict=True)), None, None


clients_patches.register_autograd(_backward, setup_context=_setup_context)


class _OnCPU(Function):
    """The same, transformed and differentiated twice; first calls of operators take two seconds."""

    forward, setup_context = staticmethod(_convolve), staticmethod(_setup_context)
    backward = staticmethod(_backward)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        """Use the mapped axis as the axis of clients."""
        size, pairs = info.batch_size, zip(inputs[:2], in_dims, strict=False)
        every = [t.expand(size, *t.shape) if d is None else clients_first(t, d) for t, d in pairs]
        x, w = (t.squeeze(1) if t.shape[1] == 1 else t.flatten(0, 1) for t in every)
        found = of_clients(x, w, *inputs[2:])
        return found.reshape(size, -1, *found.shape[1:]), 0
