"""Call a module with other tensors instead of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedzmg.errors import InputError
from fedzmg.models.keyed import KeyedLayer


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
