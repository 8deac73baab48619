"""A module as a pure function of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedzmg.contract import Layout
from fedzmg.errors import InputError
from fedzmg.models.call import Call
from fedzmg.models.layer_swaps import swap_layers
from fedzmg.models.layout import layout_of
from fedzmg.models.unsupported import (
    NoHiddenRandomness,
    check_independence,
    check_module,
    private_copy,
)
from fedzmg.tree import Tree


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
        with torch.no_grad(), NoHiddenRandomness():
            trained, outputs = self.train(params, x), self.evaluate(params, x)
            lone = self.train(params, x[:1]), self.evaluate(params, x[:1])
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
