"""Low-rank adapters (LoRA, Hu et al. 2022) for any module, and their roles in a model's layout.

An adapted layer computes with ``W + s B A``: the weight ``W`` is constant, ``A`` and ``B`` are
trained, ``s = alpha / rank``. Constants are not part of a client's model: however many clients
train side by side, the weights are in memory once, and only adapters have a client axis.

>>> model = add_lora(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), rank=2)
>>> [name for name, p in model.named_parameters() if p.requires_grad]
['0.lora_A.weight', '0.lora_B.weight', '2.lora_A.weight', '2.lora_B.weight']
"""

import math
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedzmg.contract import Layout, ParamInfo
from fedzmg.errors import InputError
from fedzmg.models.copies import copy_module
from fedzmg.seeds import torch_stream


class Adapted(nn.Module):
    """A layer with an adapter; its own weight gets no gradient."""

    lora_A: nn.Module
    lora_B: nn.Module
    lora_dropout: nn.Module
    scale: float

    def low_rank(self, x: Tensor) -> Tensor:
        """Compute ``s B A x``."""
        return self.lora_B(self.lora_A(self.lora_dropout(x)) * self.scale)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale:g}"


class LoRALinear(Adapted, nn.Linear):
    """``nn.Linear`` with an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.detach(), self.bias) + self.low_rank(input)


class LoRAConv2d(Adapted, nn.Conv2d):
    """``nn.Conv2d`` with an adapter: ``A`` is a convolution to ``rank`` channels, ``B`` a 1x1."""

    def forward(self, input: Tensor) -> Tensor:
        base: Tensor = self._conv_forward(input, self.weight.detach(), self.bias)
        return base + self.low_rank(input)


def add_lora(
    model: nn.Module, rank: int = 8, alpha: float = 16, targets: Sequence[str] | str = "*", *,
    dropout: float = 0.0, merge: bool = False, seed: int = 0,
) -> nn.Module:  # fmt: skip
    """Return a copy of a model with adapters; nothing else of it is trained.

    ``B`` starts at zero, so outputs are those of the model. ``A`` starts uniform in ``1/sqrt(n)``
    for ``n`` inputs; a task with ``init="torch"`` draws it anew for every seed.

    Args:
        model: any module with ``nn.Linear`` or ``nn.Conv2d`` layers (not grouped).
        rank: rows of ``A``.
        alpha: the adapter's product is multiplied by ``alpha / rank``.
        targets: names of layers with ``*`` and ``?``, such as ``"*.attention.*"``.
        dropout: on the inputs of ``A``.
        merge: keep the adapted weights in the trained tree, for algorithms that move them (FLoRA).
            They then have a client axis, too.
        seed: seed of ``A``.

    Raises:
        InputError: for a value out of range, or a pattern without a layer.
    """
    for name, value, valid, expected in (
        ("rank", rank, type(rank) is int and rank >= 1, "a whole number of at least 1"),
        ("alpha", alpha, 0 < alpha < math.inf, "a number above 0"),
        ("dropout", dropout, 0 <= dropout < 1, "a number of at least 0 and below 1"),
    ):
        if not valid:
            raise InputError(f"{name} = {value!r}: expected {expected}")
    adapted = copy_module(model).requires_grad_(False)
    for name in _targets(adapted, [targets] if isinstance(targets, str) else targets):
        layer: Any = adapted.get_submodule(name)
        like = {"bias": False, "device": layer.weight.device, "dtype": layer.weight.dtype}
        if isinstance(layer, nn.Linear):
            layer.lora_A = nn.Linear(layer.in_features, rank, **like)
            layer.lora_B = nn.Linear(rank, layer.out_features, **like)
            layer.__class__ = LoRALinear
        else:
            form = layer.kernel_size, layer.stride, layer.padding, layer.dilation
            like_a = {"padding_mode": layer.padding_mode, **like}
            layer.lora_A = nn.Conv2d(layer.in_channels, rank, *form, **like_a)
            layer.lora_B = nn.Conv2d(rank, layer.out_channels, 1, **like)
            layer.__class__ = LoRAConv2d
        layer.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        layer.scale = alpha / rank
        layer.weight.requires_grad_(merge)
        first = torch.empty(layer.lora_A.weight.shape)
        stream = torch_stream(seed, "init", f"{name}.lora_A".lstrip("."))
        fill_adapter(ParamInfo("lora_A", (1,)), first, stream)
        with torch.no_grad():
            layer.lora_A.weight.copy_(first)
            layer.lora_B.weight.zero_()
    return adapted


def _targets(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the layers that get adapters, and reject a pattern without one."""
    # By exact type: a user's subclass keeps its forward pass; nn.MultiheadAttention calls no layer.
    kinds, layers = (nn.Linear, nn.Conv2d), model.named_modules()
    usable = [n for n, m in layers if type(m) in kinds and getattr(m, "groups", 1) == 1]
    found: dict[str, None] = {}
    for pattern in patterns:
        matching = [name for name in usable if fnmatchcase(name, pattern)]
        if not matching:
            known = f"{', '.join(usable[:4]) or 'none'}{', ...' if len(usable) > 4 else ''}"
            problem = f"{pattern!r} matches no nn.Linear or nn.Conv2d of the model"
            raise InputError(f"targets: {problem} ({known})")
        found |= dict.fromkeys(matching)
    return list(found)


def fill_adapter(info: ParamInfo | None, values: Tensor, generator: torch.Generator) -> bool:
    """Fill a factor of an adapter in place, but no adapted weight; return False for others."""
    if info is None or not info.role.startswith("lora_"):
        return False
    if info.role == "lora_A":
        bound = 1 / math.sqrt(values.shape[1:].numel())
        values.uniform_(-bound, bound, generator=generator)
    elif info.role == "lora_B":
        values.zero_()
    return True


def merge_lora(model: nn.Module) -> nn.Module:
    """Return a copy without adapters, whose weights contain them."""
    merged = copy_module(model)
    adapted: list[Any] = [layer for layer in merged.modules() if isinstance(layer, Adapted)]
    for layer in adapted:
        with torch.no_grad():
            layer.weight += layer.scale * product(layer.lora_A.weight, layer.lora_B.weight)
        del layer.lora_A, layer.lora_B, layer.lora_dropout, layer.scale
        layer.__class__ = nn.Linear if isinstance(layer, LoRALinear) else nn.Conv2d
    return merged.requires_grad_()


def product(a: Any, b: Any) -> Tensor:
    """Compute ``B A`` in the shape of the adapted weight."""
    flat: Tensor = b.flatten(1) @ a.flatten(1)
    return flat.reshape(b.shape[0], *a.shape[1:])


class Adapter(NamedTuple):
    """Names of the parameters of an adapted layer, and the factor of their product."""

    weight: str  # empty if the weight is a constant
    a: str
    b: str
    scale: float


def adapters(layout: Layout) -> Iterator[Adapter]:
    """Return the adapters of a model."""
    for name, info in layout.items():
        if info.role == "lora_A":
            layer, _, rest = name.rpartition("lora_A")
            weight = f"{layer}weight" if f"{layer}weight" in layout else ""
            yield Adapter(weight, name, f"{layer}lora_B{rest}", info.scale or 1.0)


_FACTOR = re.compile(r"(.*?)\.?(lora_[AB])(?:\.(\w+))?\.weight")  # peft: adapter's name inside


def adapter_info(model: nn.Module, name: str, rank: int) -> ParamInfo | None:
    """Return the role of an adapter's parameter, of ours or of peft's; None for any other.

    The input axes are those of the zero-mean projection: the inputs of ``A`` are the layer's. The
    axis of ``B`` is the rank, which is not an input of the layer: ``B`` is never projected.
    """
    inputs = tuple(range(1, rank))
    if found := _FACTOR.fullmatch(name):
        layer: Any = model.get_submodule(found[1])
        scaling = getattr(layer, "scaling", None)  # peft's, by the name of the adapter
        scale = scaling.get(found[3]) if found[3] and scaling else getattr(layer, "scale", None)
        if found[2] == "lora_A":
            return ParamInfo("lora_A", inputs, type(layer).__name__, scale)
        return ParamInfo("lora_B", (), type(layer).__name__)
    layer = model.get_submodule(name.rpartition(".")[0])
    if isinstance(layer, Adapted) and name.endswith("weight"):
        return ParamInfo("lora_base", inputs, type(layer).__name__)
    return None
