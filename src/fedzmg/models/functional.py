"""A module as a pure function of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedzmg.contract import Layout
from fedzmg.errors import InputError
from fedzmg.models.dropout import KeyedDropout
from fedzmg.models.layout import layout_of
from fedzmg.tree import Tree


class FunctionalModel:
    """``model(params, x)``: what engines, evaluation and deployed clients call.

    The module given is copied and never changed. Trainable parameters enter as a tree, parameters
    with ``requires_grad=False`` stay constant, ``nn.Dropout`` is exchanged for keyed dropout.

    Raises:
        InputError: for buffers (batch normalisation), recurrent layers that fuse what must be
            mapped over clients, parameters of unknown layout, or nothing to train.
    """

    def __init__(
        self, module: nn.Module, axes: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        _refuse_buffers(module)
        _refuse_fused(module)
        self.source = copy.deepcopy(module)
        self.module = copy.deepcopy(module)
        self.layout: Layout = layout_of(self.module, axes)
        if not self.layout:
            raise InputError("the model has no trainable parameter: set requires_grad on some")
        self.dropout_keys = _exchange_dropout(self.module)
        self._training = _Call(copy.deepcopy(self.module).train())
        self._evaluating = _Call(copy.deepcopy(self.module).eval())

    @property
    def has_dropout(self) -> bool:
        """Whether training needs a key for every step."""
        return bool(self.dropout_keys)

    def params(self) -> Tree:
        """The module's own trainable parameters."""
        named = dict(self.module.named_parameters())
        return Tree({name: named[name].detach().clone() for name in self.layout})

    def train(self, params: Tree, x: Tensor, key: Tensor | tuple[()] = ()) -> Tensor:
        """Outputs with dropout on; ``key`` is the step's dropout key."""
        inputs: dict[str, Tensor] = dict(params.items())
        if isinstance(key, Tensor):
            inputs |= dict.fromkeys(self.dropout_keys, key)
        return self._training(inputs, x)

    def evaluate(self, params: Tree, x: Tensor) -> Tensor:
        """Outputs with dropout off."""
        return self._evaluating(dict(params.items()), x)

    def to(self, device: torch.device, dtype: torch.dtype) -> FunctionalModel:
        """A copy whose constant parameters and keys live on another device or dtype."""
        moved = copy.copy(self)
        moved.module = copy.deepcopy(self.module).to(device, dtype)
        moved._training = _Call(copy.deepcopy(moved.module).train())
        moved._evaluating = _Call(copy.deepcopy(moved.module).eval())
        return moved


class _Call:
    """Calls a private module with other tensors in the place of its own.

    ``torch.func.functional_call`` does the same, but costs as much as a small model's forward
    pass; it is used where the compiler must see it. Not for several threads at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._slots: dict[str, list[tuple[dict[str, Any], str]]] = {}
        for prefix, child in module.named_modules():
            for table in (child._parameters, child._buffers):
                for own_name, tensor in table.items():
                    if tensor is not None:
                        name = f"{prefix}.{own_name}" if prefix else own_name
                        self._slots.setdefault(name, []).append((table, own_name))
        tied: dict[int, str] = {}
        for name, slots in list(self._slots.items()):
            first = tied.setdefault(id(slots[0][0][slots[0][1]]), name)
            if first != name:
                self._slots[first] += self._slots.pop(name)

    def __call__(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor
        if torch.compiler.is_compiling():
            out = functional_call(self._module, tensors, (x,))
            return out
        places = [(slot, tensor) for name, tensor in tensors.items() for slot in self._slots[name]]
        own = [table[name] for (table, name), _ in places]
        try:
            for (table, name), tensor in places:
                table[name] = tensor
            out = self._module(x)
        finally:
            for ((table, name), _), tensor in zip(places, own, strict=True):
                table[name] = tensor
        return out


def _refuse_buffers(module: nn.Module) -> None:
    for prefix, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            raise InputError(
                f"layer {prefix or 'model'!r} is a {type(child).__name__}, whose running "
                "statistics average badly over clients: use nn.GroupNorm instead"
            )
        own = [name for name, _ in child.named_buffers(recurse=False)]
        if own:
            raise InputError(
                f"layer {prefix or 'model'!r} ({type(child).__name__}) has the buffer {own[0]!r}; "
                "buffers are not trained or averaged: make it a constant or a parameter"
            )


def _refuse_fused(module: nn.Module) -> None:
    for prefix, child in module.named_modules():
        if isinstance(child, nn.MultiheadAttention) and child.dropout:
            raise InputError(
                f"layer {prefix or 'model'!r} is a MultiheadAttention with dropout, whose masks "
                "have no address: use dropout=0 and an nn.Dropout of its own"
            )
        table = child if isinstance(child, nn.Embedding | nn.EmbeddingBag) else None
        if table is not None and (table.padding_idx is not None or table.max_norm is not None):
            raise InputError(
                f"layer {prefix or 'model'!r} is an {type(child).__name__} with padding_idx or "
                "max_norm, which do not map over clients: leave them out"
            )
        if isinstance(child, nn.RNNBase):
            remedy = "fedzmg.models.GRU" if isinstance(child, nn.GRU) else "cells (nn.LSTMCell)"
            raise InputError(
                f"layer {prefix or 'model'!r} is a fused {type(child).__name__}, which cannot be "
                f"mapped over clients: use {remedy} instead"
            )


def _exchange_dropout(module: nn.Module) -> tuple[str, ...]:
    """Put keyed dropout in place of every ``nn.Dropout``; the names of the keys."""
    names: list[str] = []
    for prefix, parent in list(module.named_modules()):
        # Not named_children(), which leaves out a module that is used a second time.
        for child_name, child in list(parent._modules.items()):
            name = f"{prefix}.{child_name}" if prefix else child_name
            if isinstance(child, nn.Dropout):
                setattr(parent, child_name, KeyedDropout(child.p, layer=len(names)))
                names.append(f"{name}.key")
            elif isinstance(child, nn.modules.dropout._DropoutNd):
                raise InputError(
                    f"layer {name!r} is a {type(child).__name__}, which has no addressed version: "
                    "use nn.Dropout"
                )
    return tuple(names)
