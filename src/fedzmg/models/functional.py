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
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from fedzmg.contract import Layout
from fedzmg.errors import InputError
from fedzmg.models.batch_norm import BatchNormPolicy, NormLayers, with_statistics
from fedzmg.models.layers import KeyedLayer, swap_layers
from fedzmg.models.layout import layout_of
from fedzmg.tree import Tree, leaves

HIDDEN_RANDOMNESS = (
    "the model draws random numbers by itself, which cannot be repeated: use layers (nn.Dropout, "
    "fedzmg.models.RandomFlip) instead of F.dropout and the like"
)


class Call:
    """Callable private module that takes its tensors as an argument.

    ``torch.func.functional_call`` does the same, but costs as much as a small model's forward
    pass; it is used where the compiler must see it. Not for several threads at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._keyed = [layer for layer in module.modules() if isinstance(layer, KeyedLayer)]
        names: dict[int, str] = {}
        self._slots: dict[str, list[tuple[dict[str, Any], str]]] = {}
        for prefix, child in module.named_modules():
            for table in (child._parameters, child._buffers):
                for own_name, tensor in table.items():
                    if tensor is not None:  # a tied weight has one name and several slots
                        name = names.setdefault(id(tensor), f"{prefix}.{own_name}".lstrip("."))
                        self._slots.setdefault(name, []).append((table, own_name))

    def __call__(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """Compute the module's outputs."""
        for layer in self._keyed:
            layer.calls = 0
        if torch.compiler.is_compiling():
            return functional_call(self._module, tensors, (x,))  # type: ignore[no-any-return]
        slots = [(slot, tensor) for name, tensor in tensors.items() for slot in self._slots[name]]
        before = [table[name] for (table, name), _ in slots]
        try:
            for (table, name), tensor in slots:
                table[name] = tensor
            out: Tensor = self._module(x)
        except RuntimeError as error:
            reason = _mapping_problem(str(error))
            if reason is None:
                raise
            raise InputError(reason) from None
        finally:
            for ((table, name), _), tensor in zip(slots, before, strict=True):
                table[name] = tensor
        return out


def _mapping_problem(message: str) -> str | None:
    """Explain torch's error about a mapped operation; None for any other error."""
    if not message.startswith("vmap:") and "Batching rule not implemented" not in message:
        return None
    if "random operation" in message:
        return HIDDEN_RANDOMNESS
    reason = message.removeprefix("vmap: ").splitlines()[0].split(". ")[0].rstrip(".")
    remedy = "use other operations"
    if "control flow" in message or ".item()" in message:
        reason = "it decides by the value of a tensor: if, float(), .item()"
        remedy = "use torch.where"
    return f"the model cannot be mapped over clients ({reason}): {remedy}, or engine='sequential'"


def check_module(module: nn.Module) -> None:
    """Reject layers that keep state, or that cannot be mapped over clients."""
    if isinstance(module, type):
        raise InputError(f"the model is the class {module.__name__}: give {module.__name__}(...)")
    if not isinstance(module, nn.Module):
        raise InputError(f"the model is a {type(module).__name__}: give an nn.Module")
    for prefix, child in module.named_modules():
        if problem := _problem(child):
            kind = type(child).__name__
            article = "an" if kind[0] in "AEIO" else "a"
            raise InputError(f"layer {prefix or 'model'!r} is {article} {kind} {problem}")


def _problem(child: nn.Module) -> str:
    """Explain why a layer cannot be trained, and what to use instead."""
    buffers = [name for name, _ in child.named_buffers(recurse=False)]
    if buffers and not isinstance(child, KeyedLayer | _NormBase):
        remedy = "leave it out, or make it a plain attribute if it never changes"
        return f"with the buffer {buffers[0]!r}, which is not trained or averaged: {remedy}"
    if isinstance(child, nn.RNNBase):
        instead = "fedzmg.models.GRU" if isinstance(child, nn.GRU) else "cells (nn.LSTMCell)"
        return f"with a fused loop, which cannot be mapped over clients: use {instead}"
    if isinstance(child, nn.MultiheadAttention) and child.dropout:
        return "with dropout inside, which cannot be repeated: set it to 0, use nn.Dropout around"
    if isinstance(child, _DropoutNd) and not isinstance(child, nn.Dropout):
        return "with random numbers that cannot be repeated: use nn.Dropout"
    if isinstance(child, nn.Embedding | nn.EmbeddingBag) and (
        child.padding_idx is not None or child.max_norm is not None
    ):
        return "with padding_idx or max_norm, which do not map over clients: leave them out"
    return ""


def _check_independence(batch: Any, alone: Any, examples: int) -> None:
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
    numpy: Any = np.random.get_state()  # noqa: NPY002
    state = torch.get_rng_state().numpy().tobytes()
    return random.getstate(), numpy[1].tobytes(), numpy[2], state


class FunctionalModel:
    """A module as a pure function ``model(params, x)``.

    The module is copied and never changed. Trainable parameters enter as a tree, parameters with
    ``requires_grad=False`` stay constant, ``nn.Dropout`` becomes keyed dropout. Running statistics
    are in the tree, too, unless ``batch_norm`` is ``frozen`` or ``batch``.

    Raises:
        InputError: for other buffers, recurrent layers that fuse what must be
            mapped over clients, parameters of unknown layout, or nothing to train.
    """

    def __init__(
        self,
        module: nn.Module,
        axes: Mapping[str, tuple[int, ...]] | None = None,
        batch_norm: BatchNormPolicy = "average",
    ) -> None:
        check_module(module)
        trained = layout_of(module, axes)
        if not trained:
            raise InputError("the model has no trainable parameter: set requires_grad on some")
        self.batch_norm = batch_norm
        self.layout: Layout = with_statistics(module, trained, batch_norm)
        self.statistics = tuple(name for name in self.layout if name not in trained)
        """Names of the running statistics in the tree."""
        self._last = list(trained)[-1].rpartition(".")[0]
        """Name of the last layer with parameters."""
        try:
            self.source, self.module = copy.deepcopy(module), copy.deepcopy(module)
        except (RuntimeError, TypeError) as error:
            raise InputError(
                f"the model cannot be copied ({str(error).splitlines()[0]}): keep only parameters "
                "and plain values in it; for weight norm, use torch.nn.utils.parametrizations"
            ) from None
        self.layer_keys = swap_layers(self.module)
        self.norms = NormLayers(self.module, batch_norm)
        self._halves: tuple[str, Call, dict[bool, Call]] | None = None
        """Name of the last layer, the layer, and all before it by mode."""
        self._prepare_calls()

    def _prepare_calls(self) -> None:
        self._training = Call(self._copy(training=True))
        self._evaluating = Call(self._copy(training=False))
        if self._halves is not None:
            self.split_head()

    def _copy(self, *, training: bool) -> nn.Module:
        return self.norms.set_mode(copy.deepcopy(self.module), training=training)

    def split_head(self) -> None:
        """Prepare to compute the inputs of the last layer apart from its outputs."""
        name, bodies = self._last, {}
        for training in (True, False):
            body = self._copy(training=training)
            if name:
                body.set_submodule(name, nn.Identity())
            bodies[training] = Call(body if name else nn.Identity())
        self._halves = name, Call(copy.deepcopy(self.module.get_submodule(name))), bodies

    @property
    def needs_key(self) -> bool:
        """Training needs a key for every step: for dropout or any other keyed layer."""
        return bool(self.layer_keys)

    def params(self) -> Tree:
        """Copy the module's own trainable parameters."""
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        params = {name: named[name].detach().clone() for name in self.layout}
        # A count of batches is a whole number in torch.
        counts = [n for n in self.statistics if not params[n].is_floating_point()]
        return Tree(params | {name: params[name].float() for name in counts})

    def frozen(self) -> list[Tensor]:
        """Return the parameters and statistics that are constant."""
        named = self.module.named_parameters()
        return [p.detach() for n, p in named if n not in self.layout] + self.norms.constants

    def train(
        self,
        params: Tree,
        x: Tensor,
        key: Tensor | tuple[()] = (),
        real: Tensor | tuple[()] = (),
        moved: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Compute outputs with dropout on.

        ``key`` is the step's key, ``real`` has flags of the examples that are not padding, and
        ``moved`` receives the running statistics after this batch.
        """
        return self._training(self._inputs(params, key, real, {} if moved is None else moved), x)

    def _inputs(
        self,
        params: Mapping[str, Tensor],
        key: Tensor | tuple[()],
        real: Tensor | tuple[()],
        moved: dict[str, Tensor] | None,
    ) -> dict[str, Tensor]:
        """Return the tensors of a pass; in training with copies of statistics, for ``moved``."""
        inputs = dict(params.items())
        inputs |= {name: inputs[name].detach() for name in self.statistics if name in inputs}
        if moved is not None:
            moved |= {name: inputs[name].clone() for name in self.statistics if name in inputs}
            inputs |= moved
        if isinstance(key, Tensor):
            inputs |= dict.fromkeys(self.layer_keys, key)
        if isinstance(real, Tensor):
            inputs |= self.norms.inputs(real)
        return inputs

    def evaluate(self, params: Tree, x: Tensor, real: Tensor | tuple[()] = ()) -> Tensor:
        """Compute outputs with dropout off."""
        return self._evaluating(self._inputs(params, (), real, None), x)

    def features(
        self,
        params: Tree,
        x: Tensor,
        key: Tensor | tuple[()] = (),
        real: Tensor | tuple[()] = (),
        moved: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Compute the inputs of the last layer; in training if ``moved`` is given."""
        assert self._halves is not None, "split_head comes first"
        name, _, bodies = self._halves
        body = {n: leaf for n, leaf in params.items() if n.rpartition(".")[0] != name}
        return bodies[moved is not None](self._inputs(body, key, real, moved), x)

    def head(self, params: Tree, features: Tensor) -> Tensor:
        """Compute outputs from the inputs of the last layer."""
        assert self._halves is not None, "split_head comes first"
        name, layer, _ = self._halves
        own = {n.rpartition(".")[2]: w for n, w in params.items() if n.rpartition(".")[0] == name}
        return layer(own, features)

    def check_features(self, params: Tree, x: Tensor) -> None:
        """Prepare to compute features; reject a model whose outputs are not its last layer's."""
        if any(name.rpartition(".")[0] == self._last for name in self.statistics):
            raise InputError(f"features end at {self._last!r}, a BatchNorm: put a dense layer last")
        self.split_head()
        with torch.no_grad():
            outputs = self.evaluate(params, x)
            try:
                same = torch.allclose(
                    self.head(params, self.features(params, x)), outputs, equal_nan=True
                )
            except RuntimeError:
                same = False
        if not same:
            raise InputError(
                f"features are the inputs of the model's last layer with parameters "
                f"({self._last!r}), whose outputs are not the model's: put it last"
            )

    def try_out(self, params: Tree, x: Tensor) -> Tensor:
        """Compute outputs with dropout off, and check the model on a few examples."""
        before = _global_generators()
        with torch.no_grad():
            trained, outputs = self.train(params, x), self.evaluate(params, x)
            lone = self.train(params, x[:1]), self.evaluate(params, x[:1])
        if _global_generators() != before:
            raise InputError(HIDDEN_RANDOMNESS)
        # Batch statistics couple examples on purpose.
        coupled = self.norms.dependent, self.norms.always_dependent
        for one, other, skip in zip((trained, outputs), lone, coupled, strict=True):
            if not skip:
                _check_independence(one, other, len(x))
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
