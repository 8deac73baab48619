"""Replacements of torch's layers in a functional model's private copy of a module.

* Dropout becomes keyed dropout, and every keyed layer is numbered.
* Layers that torch cannot map over clients, or maps by a slow loop, change their class for one
  that computes the same from operations that do map. Parameters and names stay.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedzmg.errors import InputError
from fedzmg.models.kernels import layers
from fedzmg.models.keyed import KeyedDropout, KeyedLayer
from fedzmg.models.recurrent import GRUCell, LSTMCell, RNNCell


class Bilinear(nn.Bilinear):
    """``nn.Bilinear`` as one sum of products."""

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        out = torch.einsum("...i,oij,...j->...o", input1, self.weight, input2)
        return out if self.bias is None else out + self.bias


class Conv2d(nn.Conv2d):
    """``nn.Conv2d`` that the compiler, too, computes with the kernels for clients on a GPU."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling() and input.is_cuda and self.padding_mode == "zeros":
            return layers.conv2d(
                input, weight, bias, self.stride, self.padding, self.dilation, self.groups
            )
        out: Tensor = super()._conv_forward(input, weight, bias)
        return out


class Linear(nn.Linear):
    """``nn.Linear`` whose compiled gradient, for clients on a GPU, is laid out like its weights."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and input.is_cuda:
            return layers.linear(input, self.weight, self.bias)
        return super().forward(input)


class EmbeddingBag(nn.EmbeddingBag):
    """``nn.EmbeddingBag`` of bags of equal size: look up, then reduce."""

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        if input.ndim != 2 or offsets is not None:
            raise InputError(
                f"an EmbeddingBag was given ids of shape {tuple(input.shape)}: give one row of "
                "ids per example, without offsets"
            )
        rows = F.embedding(input, self.weight)
        if per_sample_weights is not None:
            rows = rows * per_sample_weights[..., None]
        if self.mode == "max":
            return rows.amax(1)
        return rows.sum(1) if self.mode == "sum" else rows.mean(1)


class MultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` that always forms its weights: the fused kernel does not map."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        *rest: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        out, weights = super().forward(query, key, value, key_padding_mask, True, *rest, **options)
        return out, weights if need_weights else None


SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Bilinear: Bilinear,
    nn.Conv2d: Conv2d,
    nn.EmbeddingBag: EmbeddingBag,
    nn.GRUCell: GRUCell,
    nn.LSTMCell: LSTMCell,
    nn.Linear: Linear,
    nn.MultiheadAttention: MultiheadAttention,
    nn.RNNCell: RNNCell,
}
"""Replacements by exact type: a user's subclass keeps its forward pass.

Every class has the name of the one that it replaces, so that a model prints as before.
"""


def swap_layers(module: nn.Module) -> tuple[str, ...]:
    """Replace layers in place; return the names of the keys that training needs."""
    keys: list[str] = []
    for prefix, parent in list(module.named_modules()):
        parent.__class__ = SWAPS.get(type(parent), type(parent))
        # Not named_children(), which leaves out a module that is used a second time.
        for child_name, child in list(parent._modules.items()):
            name = f"{prefix}.{child_name}" if prefix else child_name
            if isinstance(child, nn.Dropout):
                setattr(parent, child_name, KeyedDropout(child.p, layer=len(keys)))
            elif isinstance(child, KeyedLayer):
                setattr(parent, child_name, child.numbered(len(keys)))
            elif isinstance(child, nn.modules.dropout._DropoutNd):
                raise InputError(
                    f"layer {name!r} is a {type(child).__name__}, which has no addressed version: "
                    "use nn.Dropout"
                )
            else:
                continue
            keys.append(f"{name}.key")
    return tuple(keys)
