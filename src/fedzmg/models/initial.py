"""Initial weights by address: a function of the seed and the parameter's name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import nn

from fedzmg.errors import InputError, unknown
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.layer_swaps import GRU
from fedzmg.seeds import torch_stream
from fedzmg.tree import Tree

Initializer: TypeAlias = (
    Literal["torch", "keras", "given"] | Callable[[nn.Module, torch.Generator], None]
)
"""``torch``: as PyTorch's layers start. ``keras``: Glorot uniform kernels, zero biases, orthogonal
recurrent kernels, and a bias of one for the forget gates of an LSTM. ``given``: the weights the
module came with, for a pretrained start. Or a function ``(module, generator)`` that fills one
module's own parameters in place."""

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_ATTENTION_OUTPUT = nn.modules.linear.NonDynamicallyQuantizableLinear
"""The last layer inside ``nn.MultiheadAttention``, whose bias starts at zero."""


def initial_params(model: FunctionalModel, scheme: Initializer, seed: int) -> Tree:
    """Initialise the trainable parameters from a seed."""
    check_scheme(scheme)
    if scheme == "given":
        return model.params()
    module = copy.deepcopy(model.module)
    for prefix, child in module.named_modules():
        own = [p for p in child.parameters(recurse=False) if p.requires_grad]
        if own:
            generator = torch_stream(seed, "init", prefix)
            with torch.no_grad():
                _start(child, prefix, scheme, generator)
    named = dict(module.named_parameters())
    return Tree({name: named[name].detach().clone() for name in model.layout})


def check_scheme(scheme: object) -> None:
    """Reject anything but an initializer."""
    if not callable(scheme) and scheme not in ("given", *_SCHEMES):
        raise unknown("initializer", str(scheme), ["torch", "keras", "given"])


def _start(module: nn.Module, prefix: str, scheme: Initializer, generator: torch.Generator) -> None:
    if callable(scheme):
        scheme(module, generator)
    elif isinstance(module, _NORMS):
        nn.init.ones_(module.weight)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    elif isinstance(module, nn.PReLU):
        nn.init.constant_(module.weight, module.init)
    elif not _SCHEMES[scheme](module, generator):
        raise InputError(
            f"layer {prefix or 'model'!r} is a {type(module).__name__}, which initializer "
            f"{scheme!r} cannot start: pass init='given' or a function (module, generator)"
        )


def _torch(module: nn.Module, generator: torch.Generator) -> bool:
    if isinstance(module, _TABLES):
        nn.init.normal_(module.weight, generator=generator)
        return True
    if isinstance(module, nn.MultiheadAttention):
        _torch_attention(module, generator)
        return True
    if isinstance(module, nn.RNNBase | nn.RNNCellBase | GRU):
        bound = 1 / math.sqrt(module.hidden_size)
    elif isinstance(module, nn.Bilinear):
        bound = 1 / math.sqrt(module.in1_features)
    elif isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        fan_in = nn.init._calculate_fan_in_and_fan_out(module.weight)[0]
        bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
    else:
        return False
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad:
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
            if name == "bias" and isinstance(module, _ATTENTION_OUTPUT):
                nn.init.zeros_(parameter)
    return True


def _torch_attention(module: nn.MultiheadAttention, generator: torch.Generator) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.requires_grad:
            continue
        if name == "in_proj_bias":
            nn.init.zeros_(parameter)
        elif name in ("bias_k", "bias_v"):
            nn.init.xavier_normal_(parameter, generator=generator)
        else:
            nn.init.xavier_uniform_(parameter, generator=generator)


def _keras(module: nn.Module, generator: torch.Generator) -> bool:
    if isinstance(module, _TABLES):
        nn.init.uniform_(module.weight, -0.05, 0.05, generator=generator)
        return True
    known = nn.Linear | nn.modules.conv._ConvNd | nn.RNNBase | nn.RNNCellBase | GRU
    if not isinstance(module, known):
        return False
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.requires_grad:
            continue
        if name.startswith("bias"):
            nn.init.zeros_(parameter)
            # Keras has one bias where PyTorch adds two, so only one of them opens the gate.
            if isinstance(module, nn.LSTM | nn.LSTMCell) and name.startswith("bias_ih"):
                forget = slice(module.hidden_size, 2 * module.hidden_size)
                nn.init.ones_(parameter[forget])
        elif name.startswith("weight_hh"):
            nn.init.orthogonal_(parameter, generator=generator)
        else:
            nn.init.xavier_uniform_(parameter, generator=generator)
    return True


_SCHEMES: dict[str, Callable[[nn.Module, torch.Generator], bool]] = {
    "torch": _torch,
    "keras": _keras,
}
