"""A module as a pure function of its parameters; unsupported modules are rejected."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedzmg.contract import Layout
from fedzmg.errors import InputError
from fedzmg.models.keyed import KeyedLayer
from fedzmg.models.layer_swaps import swap_layers
from fedzmg.models.layout import layout_of
from fedzmg.tree import Tree, leaves


class Call:
    """Callable private module that takes its tensors as an argument.

    ``torch.func.functional_call`` does the same, but costs as much as a small model's forward
    pass; it is used where the compiler must see it. Not for several threads at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._keyed = [layer for layer in module.modules() if isinstance(layer, KeyedLayer)]
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
        """Compute the module's outputs."""
        out: Tensor
        for layer in self._keyed:
            layer.calls = 0
        if torch.compiler.is_compiling():
            out = functional_call(self._module, tensors, (x,))
            return out
        places = [(slot, tensor) for name, tensor in tensors.items() for slot in self._slots[name]]
        own = [table[name] for (table, name), _ in places]
        try:
            for (table, name), tensor in places:
                table[name] = tensor
            out = self._module(x)
        except RuntimeError as error:
            reason = _mapping_problem(str(error))
            if reason is None:
                raise
            raise InputError(reason) from None
        finally:
            for ((table, name), _), tensor in zip(places, own, strict=True):
                table[name] = tensor
        return out


HIDDEN_RANDOMNESS = (
    "the model draws random numbers by itself, which have no address and cannot be repeated: "
    "use layers (nn.Dropout, fedzmg.models.RandomFlip) instead of F.dropout and the like"
)


def _mapping_problem(message: str) -> str | None:
    """Explain torch's error about a mapped operation; None for any other error."""
    if not message.startswith("vmap:") and "Batching rule not implemented" not in message:
        return None
    if "random operation" in message:
        return HIDDEN_RANDOMNESS
    if "control flow" in message or ".item()" in message:
        return (
            "the model decides by the value of a tensor (if, float(), .item()), which cannot be "
            "mapped over clients: use torch.where, or engine='sequential'"
        )
    sentence = message.removeprefix("vmap: ").splitlines()[0].split(". ")[0].rstrip(".")
    return (
        f"the model cannot be mapped over clients ({sentence}): "
        "use other operations, or engine='sequential'"
    )


def check_module(module: nn.Module) -> None:
    """Reject layers that keep state, or that cannot be mapped over clients."""
    if isinstance(module, type):
        raise InputError(f"the model is the class {module.__name__}: give {module.__name__}(...)")
    if not isinstance(module, nn.Module):
        raise InputError(f"the model is a {type(module).__name__}: give an nn.Module")
    for prefix, child in module.named_modules():
        layer, kind = f"layer {prefix or 'model'!r}", type(child).__name__
        _check_buffers(child, layer, kind)
        if isinstance(child, nn.MultiheadAttention) and child.dropout:
            raise InputError(
                f"{layer} is a {kind} with dropout inside, whose masks have no address: set its "
                "dropout to 0; nn.Dropout layers around it are fine"
            )
        table = child if isinstance(child, nn.Embedding | nn.EmbeddingBag) else None
        if table is not None and (table.padding_idx is not None or table.max_norm is not None):
            raise InputError(
                f"{layer} is an {kind} with padding_idx or max_norm, which do not map over "
                "clients: leave them out"
            )
        if isinstance(child, nn.RNNBase):
            remedy = "fedzmg.models.GRU" if isinstance(child, nn.GRU) else "cells (nn.LSTMCell)"
            raise InputError(
                f"{layer} is a fused {kind}, which cannot be mapped over clients: "
                f"use {remedy} instead"
            )


def _check_buffers(child: nn.Module, layer: str, kind: str) -> None:
    if isinstance(child, nn.modules.batchnorm._BatchNorm):
        raise InputError(
            f"{layer} is a {kind}, whose running statistics average badly over clients: "
            "use nn.GroupNorm instead"
        )
    own = [name for name, _ in child.named_buffers(recurse=False)]
    if not own or isinstance(child, KeyedLayer):
        return
    remedy = "leave the layer out, or make it a plain attribute if it never changes"
    if isinstance(child, nn.modules.batchnorm._NormBase):
        remedy = "use track_running_stats=False"
    raise InputError(
        f"{layer} ({kind}) has the buffer {own[0]!r}; buffers are not trained or averaged: {remedy}"
    )


def private_copy(module: nn.Module) -> nn.Module:
    """Copy a module completely."""
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"the model cannot be copied ({reason}): keep only parameters and plain values in "
            "its modules; for weight norm, use torch.nn.utils.parametrizations"
        ) from None


def check_independence(batch: Any, alone: Any, examples: int) -> None:
    """Reject outputs that change with the other examples of a batch.

    Engines pad and split batches; such a model would learn from the padding.
    """
    for among, lone in zip(leaves(batch), leaves(alone), strict=True):
        if not isinstance(among, Tensor) or among.shape[:1] != (examples,):
            continue  # not one output per example, which the loss will say better
        scale = float(among.abs().nan_to_num().max()) if among.numel() else 0.0
        same = among[:1].shape == lone.shape and torch.allclose(
            among[:1].double(), lone.double(), rtol=0, atol=1e-3 * scale + 1e-12, equal_nan=True
        )
        if not same:
            raise InputError(
                "the model's outputs for an example depend on the other examples of its batch: "
                "treat each by itself (attention with batch_first=True, nn.GroupNorm, no squeeze)"
            )


def _global_generators() -> tuple[object, ...]:
    # NumPy's old generator is read because models draw from it; nothing is drawn here.
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    words, position = numpy["state"]["key"].tobytes(), numpy["state"]["pos"]
    return random.getstate(), words, position, torch.get_rng_state().numpy().tobytes()


class FunctionalModel:
    """A module as a pure function ``model(params, x)``.

    The module is copied and never changed. Trainable parameters enter as a tree, parameters with
    ``requires_grad=False`` stay constant, ``nn.Dropout`` becomes keyed dropout.

    Raises:
        InputError: for buffers (batch normalisation), recurrent layers that fuse what must be
            mapped over clients, parameters of unknown layout, or nothing to train.
    """

    def __init__(
        self, module: nn.Module, axes: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        check_module(module)
        self.layout: Layout = layout_of(module, axes)
        if not self.layout:
            raise InputError("the model has no trainable parameter: set requires_grad on some")
        self.source = private_copy(module)
        self.module = private_copy(module)
        self.layer_keys = swap_layers(self.module)
        self._prepare_calls()

    def _prepare_calls(self) -> None:
        self._training = Call(copy.deepcopy(self.module).train())
        self._evaluating = Call(copy.deepcopy(self.module).eval())

    @property
    def needs_key(self) -> bool:
        """Training needs a key for every step: for dropout or any other keyed layer."""
        return bool(self.layer_keys)

    def params(self) -> Tree:
        """Copy the module's own trainable parameters."""
        named = dict(self.module.named_parameters())
        return Tree({name: named[name].detach().clone() for name in self.layout})

    def frozen(self) -> list[Tensor]:
        """Return the parameters that are not trained."""
        named = self.module.named_parameters()
        return [p.detach() for name, p in named if name not in self.layout]

    def train(self, params: Tree, x: Tensor, key: Tensor | tuple[()] = ()) -> Tensor:
        """Compute outputs with dropout on; ``key`` is the step's key."""
        inputs: dict[str, Tensor] = dict(params.items())
        if isinstance(key, Tensor):
            inputs |= dict.fromkeys(self.layer_keys, key)
        return self._training(inputs, x)

    def evaluate(self, params: Tree, x: Tensor) -> Tensor:
        """Compute outputs with dropout off."""
        return self._evaluating(dict(params.items()), x)

    def try_out(self, params: Tree, x: Tensor) -> Tensor:
        """Compute outputs with dropout off, and check the model on a few examples."""
        before = _global_generators()
        with torch.no_grad():
            trained, outputs = self.train(params, x), self.evaluate(params, x)
            lone = self.train(params, x[:1]), self.evaluate(params, x[:1])
        if _global_generators() != before:
            raise InputError(HIDDEN_RANDOMNESS)
        check_independence((trained, outputs), lone, len(x))
        return outputs

    def to(self, device: torch.device, dtype: torch.dtype) -> FunctionalModel:
        """Copy the model to a device; constants become ``dtype``."""
        moved = copy.copy(self)
        moved.module = module_to(self.module, device, dtype)
        moved._prepare_calls()
        return moved


def module_to(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Copy a module to a device; floating point tensors, plain attributes too, become ``dtype``."""
    moved = copy.deepcopy(module).to(device, dtype)
    for child in moved.modules():
        for name, value in list(vars(child).items()):
            if isinstance(value, Tensor):  # nn.Module.to() leaves plain attributes as they are
                real = value.is_floating_point()
                setattr(child, name, value.to(device, dtype if real else value.dtype))
    return moved
