"""Layers as operators that map over clients; their form changes speed and last bits only.

Each form was found by measurement on small models (``benchmarks/engines.py``):

* A dense layer is computed as ``(W xᵀ)ᵀ``: its gradient has the memory layout of ``W``.
* oneDNN prepares some matrix products anew at every call, about 0.6 ms each on ARM. Without it,
  convolutions run as one product of unfolded patches; torch's own fallback loops over clients.
* Random bits are one operator: the compiler would repeat the value of every ``x ^ (x >> n)``.
"""

import contextlib
import functools
import platform
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch as functorch
from torch._C._functorch import maybe_current_level
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.backends.mkldnn import set_flags
from torch.library import custom_op
from torch.overrides import TorchFunctionMode

from fedzmg.kernels import convolution, patches
from fedzmg.kernels.precision import HAS_TRITON, clients_first, precision, suits_kernels

WIDE = 1 << 16  # weights of a convolution above which patches are faster for one client
# Each constant is below 2^31, so that a product with a 32-bit value stays inside a signed 64-bit
# lane: no overflow, hence the same bits eager, compiled, on CPU and on GPU.
MULTIPLIERS = (0x7FEB352D, 0x45D9F3B3 & 0x7FFFFFFF, 0x31848BAB)
_MASK32 = 0xFFFFFFFF
RANGE = _MASK32 + 1  # random bits are whole numbers from 0 up to, not including, this one
BLOCK = 1 << 15  # places that a CPU works on at a time: they stay in its cache
Whole = TypeVar("Whole", int, Tensor)
Words = npt.NDArray[np.uint32]
Array = npt.NDArray[Any]
ONEDNN_BY_DEFAULT = platform.machine().lower() not in ("aarch64", "arm64")


@contextlib.contextmanager
def onednn(enabled: bool) -> Iterator[None]:
    """Turn oneDNN's CPU kernels on or off inside a ``with`` block."""
    before, *_ = set_flags(enabled, _fp32_precision=None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        set_flags(before, _fp32_precision=None)  # type: ignore[no-untyped-call]


_FORMAT = SimpleNamespace(channels_last=False)  # for all threads


@contextlib.contextmanager
def channels_last(enabled: bool) -> Iterator[None]:
    """Set the memory format of the loop's convolutions on a CPU inside a ``with`` block."""
    before, _FORMAT.channels_last = _FORMAT.channels_last, enabled
    try:
        yield
    finally:
        _FORMAT.channels_last = before


def in_format(values: Tensor) -> Tensor:
    """Return images or weights in the memory format of the loop; later layers keep it."""
    if not _FORMAT.channels_last or values.ndim != 4 or not values.is_cpu or mapped():
        return values
    if values.shape[1] == 1:  # the formats differ in strides alone
        return values.squeeze(1)[..., None].permute(0, 3, 1, 2)
    return values.contiguous(memory_format=torch.channels_last)


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Set the number of torch's CPU threads inside a ``with`` block; 0: as it is."""
    if not number:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class MappedLayers(TorchFunctionMode):
    """Mode that computes layers in the fast form for weights that differ between clients."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace dense layers and convolutions; leave everything else."""
        return _SWAPS.get(func, func)(*args, **(kwargs or {}))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear`` as ``(W xᵀ)ᵀ`` for a batch of vectors."""
    if input.ndim != 2:
        return F.linear(input, weight, bias)
    out = (weight @ input.mT).mT
    return out if bias is None else out + bias


def conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Compute ``F.conv2d`` in the fast form for weights that differ between clients."""
    plain = groups == 1 and _pair(dilation) == (1, 1) and not isinstance(padding, str)
    if plain and input.ndim == 4 and input.is_cuda:
        return _on_gpu(input, weight, bias, list(_pair(stride)), list(_pair(padding)))
    if not plain or not uses_patches(input, weight):
        if plain and input.is_cpu and input.ndim == 4 and input.shape[1] == 1:
            return _one_channel(input, weight, bias, stride, padding)
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    out = patches.conv2d(input, weight, _pair(stride), _pair(padding))
    if not mapped():
        out = out.contiguous()  # as models expect it
    return out if bias is None else out + bias[:, None, None]


def _one_channel(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any
) -> Tensor:
    """Convolve images of one channel as groups; with channels last, oneDNN takes half the time."""
    given, level = (input, weight, *([] if bias is None else [bias])), maybe_current_level()
    here = level is not None and all(functorch.is_batchedtensor(t) for t in given)
    if not here or any(functorch.maybe_get_level(t) != level for t in given):
        return F.conv2d(input, weight, bias, stride, padding)
    pairs = ((functorch.get_unwrapped(t), functorch.maybe_get_bdim(t)) for t in given)
    x, w, *biases = (clients_first(*pair) for pair in pairs)
    with temporarily_pop_interpreter_stack():
        images = x.squeeze(2).movedim(0, -1).contiguous().permute(0, 3, 1, 2)
        own: Any = biases[0].flatten() if biases else None
        outs: Any = F.conv2d(images, w.flatten(0, 1), own, stride, padding, 1, len(w))
        found = outs.contiguous().unflatten(1, (len(w), -1))
    return functorch._add_batch_dim(found, 1, level)  # type: ignore[arg-type]


def uses_patches(input: Tensor, weight: Tensor) -> bool:
    """Tell whether a convolution is a product of patches: without oneDNN, mapped or wide."""
    if torch._C._get_mkldnn_enabled() or input.ndim != 4 or not input.is_cpu:  # the fastest first
        return False
    return mapped() or weight.numel() >= WIDE


def _on_gpu(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int]
) -> Tensor:
    if torch.is_autocast_enabled("cuda"):
        kind = torch.get_autocast_dtype("cuda")
        input, weight = input.to(kind), weight.to(kind)
        bias = None if bias is None else bias.to(kind)
    if not suits_kernels(input):
        return F.conv2d(input, weight, bias, stride, padding)
    out: Tensor = convolution.conv2d(input, weight, stride, padding, precision())
    return out if bias is None else out + bias[:, None, None]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (*value, *value)[:2]


_SWAPS: dict[Any, Callable[..., Any]] = {F.linear: linear, F.conv2d: conv2d}


def hash32(value: Whole) -> Whole:
    """Scramble 32-bit integers (in int64 lanes): three rounds of xor-shift and multiply."""
    for multiplier in MULTIPLIERS:
        value = value ^ (value >> 16)
        value = (value * multiplier) & _MASK32
    return value ^ (value >> 15)


def random_bits(
    key: Tensor, layer: int, shape: torch.Size, device: torch.device, call: int = 0
) -> Tensor:
    """Compute 32 random bits for every place of a batch of shape ``shape`` (examples first)."""
    place = torch.arange(shape.numel(), device=device).reshape(shape)
    (first, stride), (salt, factor) = of_key(key), of_call(layer, call)
    return (hash32(place * stride + first & _MASK32) ^ salt) * factor & _MASK32


def of_key(key: Whole) -> tuple[Whole, Whole]:
    """Return the first number that a batch's places hash, and the odd step to the next."""
    low, high = key & _MASK32, key >> 32 & _MASK32
    first = hash32(hash32(low) ^ high)
    return first, hash32(first ^ low) >> 1 | 1


@functools.cache
def of_call(layer: int, call: int) -> tuple[int, int]:
    """Return the salt and the odd factor that turn a batch's bits into those of one call."""
    salt = hash32(hash32(layer + 1) ^ call)
    return salt, hash32(salt) >> 1 | 1


def mapped() -> bool:
    """Tell whether this code runs inside of a map over clients, or is compiled for one."""
    return torch.compiler.is_compiling() or maybe_current_level() is not None


def draws(keys: Tensor, layer: int, call: int, places: int, below: int | None = None) -> Tensor:
    """Draw random bits ``[*keys, places]`` of batches with these keys, or compare with a number."""
    # Calling a custom operator takes torch a tenth of a millisecond.
    draw = _draw if type(keys) is Tensor and not mapped() else _draw_op
    found: Tensor = draw(keys, layer, call, places, below)
    return found


def dropout_factors(
    key: Tensor, layer: int, call: int, places: int, below: int, kind: torch.dtype, kept: float
) -> Tensor:
    """Draw factors of a batch's places on a GPU: zero for bits below a number, or ``kept``."""
    from fedzmg.kernels import triton_draws

    return triton_draws.draws(key.reshape(1), layer, call, places, below, kind, kept)[0]


def _draw(keys: Tensor, layer: int, call: int, places: int, below: int | None = None) -> Tensor:
    if keys.is_cuda and HAS_TRITON:
        from fedzmg.kernels import triton_draws

        found = triton_draws.draws(keys.reshape(-1), layer, call, places, below)
    elif keys.device.type == "cpu":
        found = torch.from_numpy(_on_cpu(keys.reshape(-1).tolist(), layer, call, places, below))
    else:
        found = random_bits(keys[..., None], layer, torch.Size((places,)), keys.device, call)
        found = found if below is None else found < below
    return found.reshape(*keys.shape, places)


_draw_op = custom_op("fedzmg::draws", mutates_args=())(_draw)


@_draw_op.register_fake
def _(keys: Tensor, _layer: int, _call: int, places: int, below: int | None = None) -> Tensor:
    kind = torch.int64 if below is None else torch.bool
    return keys.new_empty(*keys.shape, places, dtype=kind)


@_draw_op.register_vmap
def _(_info: Any, in_dims: Any, keys: Tensor, *rest: Any) -> tuple[Tensor, int]:
    return _draw_op(clients_first(keys, in_dims[0]), *rest), 0


def _on_cpu(keys: list[int], layer: int, call: int, places: int, below: int | None) -> Array:
    """Draw in place on 32-bit words, whose products overflow as wanted."""
    kind: type[np.generic] = np.int64 if below is None else np.bool_
    out = np.empty((len(keys), places), dtype=kind)
    spare, (salt, factor) = np.empty(min(BLOCK, places), dtype=np.uint32), of_call(layer, call)
    words_of = _words_of if places <= 8 * BLOCK else _words_of.__wrapped__
    for client, key in enumerate(keys):
        known = words_of(places, key)
        for first in range(0, places, BLOCK):
            last = min(first + BLOCK, places)
            bits = np.bitwise_xor(known[first:last], salt, out=spare[: last - first])
            bits *= factor
            out[client, first:last] = bits if below is None else bits < below
    return out


@functools.lru_cache(64)
def _words_of(places: int, key: int) -> Words:
    """Combine every place with a batch's key, once for all layers."""
    start, stride = of_key(key)
    words = np.arange(places, dtype=np.uint32)
    spare = np.empty_like(words[:BLOCK])
    for first in range(0, places, BLOCK):
        bits = words[first : first + BLOCK]
        bits *= stride
        bits += start
        _scramble(bits, spare[: len(bits)])
    return words


def _scramble(bits: Words, spare: Words) -> None:
    """Apply :func:`hash32` in place."""
    for multiplier in MULTIPLIERS:
        np.right_shift(bits, 16, out=spare)
        np.bitwise_xor(bits, spare, out=bits)
        np.multiply(bits, multiplier, out=bits)
    np.right_shift(bits, 15, out=spare)
    np.bitwise_xor(bits, spare, out=bits)
