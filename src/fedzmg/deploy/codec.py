"""Named arrays of a message: any nested trees and tensors, as raw bytes with a type and a shape.

Both sides derive the structure from the algorithm and the model, so a message names its arrays but
does not describe how they nest. Whole numbers travel in the narrowest type that holds them.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedzmg.deploy.frames import Wire
from fedzmg.tree import named_leaves, refill

T = TypeVar("T")

_NARROW = ("int8", "int16", "int32", "int64")


class BadMessage(ValueError):
    """A message that does not have the expected arrays or values."""


def encode(value: Any) -> dict[str, Wire]:
    """Return every tensor of a value by its path."""
    return {name: wire(leaf) for name, leaf in named_leaves(value).items()}


def wire(leaf: Tensor) -> Wire:
    """Return the bytes of a tensor; whole numbers in the narrowest type."""
    array = leaf.detach().cpu().contiguous().view(_raw(leaf.dtype)).numpy()
    kind = str(leaf.dtype).removeprefix("torch.")
    if kind in _NARROW:
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        kind = next(k for k in _NARROW if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
        array = array.astype(kind)
    little = array.dtype.newbyteorder("<")
    return Wire(kind, tuple(leaf.shape), array.astype(little, copy=False).tobytes())


def _raw(dtype: torch.dtype) -> torch.dtype:
    """Return the type by which NumPy reads a tensor's bits."""
    return torch.int16 if dtype is torch.bfloat16 else dtype


def decode(arrays: Mapping[str, Wire], like: T) -> T:
    """Build a value of the structure, shapes and types of ``like``; check every array.

    Nothing is allocated before names, types, shapes and sizes are known to be right.
    """
    wanted = named_leaves(like)
    if arrays.keys() != wanted.keys():
        other = sorted(arrays.keys() ^ wanted.keys())
        raise BadMessage(f"{len(other)} arrays are missing or unknown, such as {other[0][:80]!r}")
    found: T = refill(like, {name: _tensor(name, arrays[name], t) for name, t in wanted.items()})
    return found


def _tensor(name: str, given: Wire, like: Tensor) -> Tensor:
    wanted = str(like.dtype).removeprefix("torch.")
    allowed = _NARROW if wanted in _NARROW else (wanted,)
    if given.dtype not in allowed or tuple(given.shape) != tuple(like.shape):
        shown = f"{str(given.dtype)[:20]} of shape {str(tuple(given.shape))[:80]}"
        raise BadMessage(f"{name} is {shown}: expected {wanted} of shape {tuple(like.shape)}")
    raw = torch.empty(0, dtype=_raw(like.dtype)).numpy().dtype
    kind = np.dtype(given.dtype if wanted in _NARROW else raw).newbyteorder("<")
    if len(given.data) != math.prod(given.shape) * kind.itemsize:
        raise BadMessage(f"{name} has {len(given.data)} bytes: expected {kind.itemsize} per number")
    if wanted == "bool" and any(byte not in (0, 1) for byte in set(given.data)):
        raise BadMessage(f"{name} is not a table of true and false")
    array = np.frombuffer(given.data, dtype=kind).astype(raw).reshape(given.shape)
    return torch.from_numpy(array).view(like.dtype).to(like.device)
