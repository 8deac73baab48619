"""Calls of a private module with tensors in place of its own."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedzmg.errors import InputError
from fedzmg.models.keyed import NO_KEY
from fedzmg.models.layers import KeyedLayer
from fedzmg.tree import Inputs

FUNCTIONS_KEY = "random functions.key"  # name of the key of random functions among those of layers


class Call:
    """Callable private module that takes its tensors as an argument.

    ``torch.func.functional_call`` does the same, but costs as much as a small model's forward
    pass; it is used only for the compiler. A call is not thread-safe.
    """

    def __init__(self, module: nn.Module, functions: Any = None, *changing: str) -> None:
        self.module, self.functions = module, functions
        known = inspect.signature(module.forward).parameters.values()
        self._names = {"**" if p.kind is p.VAR_KEYWORD else p.name for p in known}
        self.keyed = keyed_layers(module)
        names: dict[int, str] = {}
        self._slots: dict[str, list[tuple[dict[str, Any], str]]] = {}
        for prefix, child in module.named_modules():
            for table in (child._parameters, child._buffers):
                for own_name, tensor in table.items():
                    if tensor is not None:  # a tied weight has one name and several slots
                        name = names.setdefault(id(tensor), f"{prefix}.{own_name}".lstrip("."))
                        self._slots.setdefault(name, []).append((table, own_name))
        self._changing = [name for name in changing if name in self._slots]

    def __call__(self, tensors: dict[str, Tensor], x: Inputs) -> Tensor:
        """Compute the module's outputs; ``tensors`` receives buffers that the module replaces."""
        for layer in self.keyed:
            layer.calls = 0
        if self.functions is None:
            return self._call(tensors, x)
        try:
            with self.functions.begin(tensors.pop(FUNCTIONS_KEY, None)):
                return self._call(tensors, x)
        finally:
            self.functions.key = NO_KEY

    def _call(self, tensors: dict[str, Tensor], x: Inputs) -> Tensor:
        # A dict of tensors is passed as keywords, unless the module takes a dict.
        keywords = isinstance(x, dict) and ("**" in self._names or self._names.issuperset(x))
        if isinstance(x, dict) and not keywords and len(self._names.intersection(x)) > 1:
            extra = ", ".join(sorted(set(x) - self._names))
            raise InputError(f"forward does not take {extra} of the inputs: leave it out")
        args, named = ((), x) if keywords else (x if isinstance(x, tuple) else (x,), {})
        if torch.compiler.is_compiling():
            return _logits(functional_call(self.module, tensors, args, named))
        before = []
        try:
            for name, tensor in tensors.items():
                for table, own_name in self._slots[name]:
                    before.append((table, own_name, table[own_name]))
                    table[own_name] = tensor
            out = _logits(self.module(*args, **named))
            for name in self._changing:
                table, own_name = self._slots[name][0]
                tensors[name] = table[own_name]
        finally:
            for table, own_name, tensor in before:
                table[own_name] = tensor
        return out


def _logits(outputs: Any) -> Tensor:
    """Return the ``logits`` of an object such as those of transformers' models."""
    found: Tensor = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)
    return found


def keyed_layers(module: nn.Module) -> list[KeyedLayer]:
    """List the layers that draw random numbers."""
    return [layer for layer in module.modules() if isinstance(layer, KeyedLayer)]
