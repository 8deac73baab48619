"""Convolutions on a CPU as products of matrices, for one client or for many with own weights.

A column of the second matrix is a patch of an image. The images of a batch lie next to each other
in memory, after rows and columns of pixels, so that patches are copied in runs; the outputs come in
the same layout, which later layers keep. Torch's own convolutions loop over images, or over clients
as groups, with small products.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedzmg.models.kernels.precision import clients_first

MOST_BYTES = 1 << 26  # of patches at a time
Pair = tuple[int, int]


def conv2d(x: Tensor, w: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """Convolve the images of one client, or of mapped ones."""
    found: Tensor = Patches.apply(x[None], w[None], stride, padding)  # type: ignore[no-untyped-call]
    # The gradient of a squeeze is a view, that of an index is a copy.
    return found.squeeze(0).permute(3, 0, 1, 2)


class _Form:
    """Shapes of a convolution of images ``[clients, batch, channels, height, width]``."""

    def __init__(self, x: Tensor, w: Tensor, stride: Pair, padding: Pair) -> None:
        self.clients, self.batch, self.channels = len(w), *x.shape[1:3]
        self.taps, self.stride, self.padding = tuple(w.shape[-2:]), stride, padding
        self.inside = tuple(x.shape[-2:])
        sizes = zip(self.inside, self.taps, stride, padding, strict=True)
        self.out = tuple((size + 2 * p - taps) // s + 1 for size, taps, s, p in sizes)
        self.rows, self.columns = self.channels * math.prod(self.taps), math.prod(self.out)
        # Parts do not depend on other clients: a client has the same bits alone and beside them.
        each = max(1, self.rows * self.columns * x.element_size())
        self.images_at_once = max(1, MOST_BYTES // each)
        self.clients_at_once = max(1, MOST_BYTES // (each * max(1, self.batch)))

    def padded(self, batch: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Make padded images of zeros, the batch last, and a view of what is inside."""
        (high, wide), (rows, columns) = self.inside, self.padding
        shape = len(like), self.channels, high + 2 * rows, wide + 2 * columns, batch
        whole = like.new_zeros(shape)
        return whole, whole[:, :, rows : rows + high, columns : columns + wide]

    def parts(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield some images and their patches: one row per channel and tap, one column each."""
        if x.stride(0) == 0:  # the same images for all
            x = x[:1]
        for first in range(0, max(1, self.batch), self.images_at_once):
            images = slice(first, first + self.images_at_once)
            some = x[:, images].permute(0, 2, 3, 4, 1)
            whole, inside = self.padded(some.shape[-1], some)
            inside.copy_(some)
            (down, across), (tall, broad) = self.stride, self.taps
            windows = whole.unfold(2, tall, down).unfold(3, broad, across)
            shape = len(x), self.rows, self.columns * some.shape[-1]
            patches = windows.permute(0, 1, 5, 6, 2, 3, 4).reshape(shape)
            yield images, patches.expand(self.clients, -1, -1)

    def images(self, patches: Tensor) -> Tensor:
        """Add patches up to images ``[clients, batch, channels, height, width]``."""
        (tall, broad), (down, across), (high, wide) = self.taps, self.stride, self.out
        each = patches.reshape(self.clients, self.channels, tall, broad, high, wide, -1)
        whole, inside = self.padded(each.shape[-1], patches)
        for i in range(tall):
            for j in range(broad):
                rows, columns = slice(i, i + down * high, down), slice(j, j + across * wide, across)
                whole[:, :, rows, columns] += each[:, :, i, j]
        return inside.permute(0, 4, 1, 2, 3)


class Patches(Function):
    """Convolution of ``[clients, batch, ...]`` images with own weights, stride and padding.

    The outputs are ``[clients, outputs, height, width, batch]``, and no view: models may change
    them in place.
    """

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: Pair, padding: Pair) -> Tensor:
        """Compute the outputs; without ``ctx``, so that it can be mapped."""
        form, flat = _Form(x, w, stride, padding), w.flatten(2)
        shape = form.clients, flat.shape[1], *form.out
        found = [
            torch.ops.aten._unsafe_view(torch.bmm(flat, patches), [*shape, len(x[0, images])])
            for images, patches in form.parts(x)
        ]
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        """Keep images and weights; patches are made again."""
        ctx.save_for_backward(*inputs[:2])
        ctx.rest = inputs[2:]

    @staticmethod
    def backward(ctx: Any, signal: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of images and weights."""
        x, w = ctx.saved_tensors
        form, flat = _Form(x, w, *ctx.rest), w.flatten(2)
        for_images, for_w = [], torch.zeros_like(flat)
        for images, patches in form.parts(x):
            some = signal[..., images]
            back = some.reshape(form.clients, flat.shape[1], some[0, 0].numel())
            if ctx.needs_input_grad[1]:
                for_w = torch.baddbmm(for_w, back, patches.mT)
            if ctx.needs_input_grad[0]:
                for_images.append(form.images(torch.bmm(flat.mT, back)))
        for_x = torch.cat(for_images, 1) if len(for_images) > 1 else (*for_images, None)[0]
        return for_x, for_w.reshape(w.shape), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        """Let mapped clients be clients."""
        size, pairs = info.batch_size, zip(inputs[:2], in_dims, strict=False)
        every = [t.expand(size, *t.shape) if d is None else clients_first(t, d) for t, d in pairs]
        x, w = (t.squeeze(1) if t.shape[1] == 1 else t.flatten(0, 1) for t in every)
        few, form = _Form(x, w, *inputs[2:]).clients_at_once, inputs[2:]
        parts = zip(x.split(few), w.split(few), strict=True)
        outs = [Patches.apply(*part, *form) for part in parts]  # type: ignore[no-untyped-call]
        found = outs[0] if len(outs) == 1 else torch.cat(outs)
        return found.reshape(size, -1, *found.shape[1:]), 0
