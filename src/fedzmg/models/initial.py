"""Initial weights as a function of the seed and the parameter's name."""

import copy
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedzmg.contract import Layout
from fedzmg.errors import check_names
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.gradients import real_view
from fedzmg.models.layout import listed, warn_once
from fedzmg.models.lora import fill_adapter
from fedzmg.parts import BATCH_NORM
from fedzmg.seeds import torch_stream
from fedzmg.tree import Tree

Initializer: TypeAlias = (
    Literal["torch", "keras", "given"] | Callable[[nn.Module, torch.Generator], None]
)
"""``torch``: as PyTorch's layers start. ``keras``: Glorot uniform kernels, zero biases, orthogonal
recurrent kernels, and a bias of one for the forget gates of an LSTM. ``given``: the weights the
module came with, for a pretrained start. Or a function ``(module, generator)`` that fills one
module's own parameters in place."""

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
_ATTENTION_OUTPUT = nn.modules.linear.NonDynamicallyQuantizableLinear  # its bias starts at zero


def initial_params(model: FunctionalModel, scheme: Initializer, seed: int) -> Tree:
    """Initialise the trainable parameters from a seed; warn of those that keep random values."""
    check_scheme(scheme)
    if scheme == "given":
        return model.params()
    module = copy.deepcopy(model.module)
    kept, named = _draw(module, model.layout, scheme, seed), dict(module.named_parameters())
    if varied := [(n, k) for n, k in kept.items() if (named[n] != named[n].flatten()[:1]).any()]:
        problem = "unknown parameters start from the model's values in every seed"
        remedy = "init=FUNCTION (module, generator) draws them"
        warn_once(f"initializer {scheme!r}: {problem}: {listed(varied)}; {remedy}")
    start = model.params()
    norm = [start[name] for name, info in model.layout.items() if info.role == "norm"]
    if any((leaf != leaf.flatten()[:1]).any() for leaf in norm):
        problem = "the model's norms show that it is trained, but its weights are drawn anew"
        warn_once(f"initializer {scheme!r}: {problem}; init='given' starts from the model's own")
    norms = (name for name in model.statistics if model.layout[name].layer == BATCH_NORM)
    fresh = {n: torch.full_like(start[n], float(n.endswith("running_var"))) for n in norms}
    values: dict[str, Tensor] = {**start, **named, **fresh}
    return Tree({name: real_view(values[name].detach()).clone() for name in model.layout})


def given_values(model: FunctionalModel, scheme: Initializer) -> list[Tensor]:
    """Return the parameters that start from the values of the module."""
    if callable(scheme):
        return []
    params = model.params()
    if scheme == "given":
        return list(params.values())
    return [params[name] for name in _draw(copy.deepcopy(model.module), model.layout, scheme, 0)]


@torch.no_grad()
def _draw(module: nn.Module, layout: Layout, scheme: Any, seed: int) -> dict[str, str]:
    """Fill a module in place; return the parameters that the scheme does not know, with layers."""
    kept, named = {}, dict(module.named_parameters())
    for prefix, child in module.named_modules():
        own = {n: p for n, p in child.named_parameters(recurse=False) if p.requires_grad}
        if not own:
            continue
        generator = torch_stream(seed, "init", prefix)
        if callable(scheme):
            scheme(child, generator)
            continue
        for name, p in own.items():
            full = f"{prefix}.{name}".lstrip(".")
            known = fill_adapter(layout.get(full), p, generator)
            if not (known or _fill(child, name, p, scheme, generator)) and full in named:
                kept[full] = type(child).__name__
    return kept


def check_scheme(scheme: object) -> None:
    """Reject anything but an initializer."""
    if not callable(scheme):
        check_names("initializer", [scheme], ["torch", "keras", "given"])


def _fill(module: Any, name: str, values: Tensor, scheme: str, generator: torch.Generator) -> bool:
    """Fill one parameter; return False for a layer that the scheme does not know."""
    recurrent = isinstance(module, nn.RNNBase | nn.RNNCellBase)
    dense = isinstance(module, nn.Linear | _ConvNd)
    fill: Callable[..., Tensor] = nn.init.xavier_uniform_
    if isinstance(module, (*_NORMS, *_TABLES)) and name not in ("weight", "bias"):
        pass  # added by a subclass: it keeps the value of its constructor
    elif isinstance(module, _NORMS):
        values.fill_(float(name == "weight"))
    elif isinstance(module, nn.PReLU):
        values.fill_(module.init)
    elif isinstance(module, _TABLES):
        own: Any = {"generator": generator}
        values.normal_(**own) if scheme == "torch" else values.uniform_(-0.05, 0.05, **own)
        if module.padding_idx is not None:
            values[module.padding_idx] = 0
    elif scheme == "torch" and (recurrent or dense or isinstance(module, nn.Bilinear)):
        inputs = module.hidden_size if recurrent else module.weight.shape[1:].numel()
        if isinstance(module, nn.Bilinear):
            inputs = module.in1_features
        closed = not inputs or (name == "bias" and isinstance(module, _ATTENTION_OUTPUT))
        bound = 0.0 if closed else 1 / math.sqrt(inputs)
        values.uniform_(-bound, bound, generator=generator)
    elif scheme == "torch" and isinstance(module, nn.MultiheadAttention):
        if name == "in_proj_bias":
            values.zero_()
        else:
            fill = nn.init.xavier_normal_ if name in ("bias_k", "bias_v") else fill
            fill(values, generator=generator)
    elif scheme == "keras" and (recurrent or dense):
        if name.startswith("bias"):
            values.zero_()
            # Keras has one bias where PyTorch adds two, so only one of them opens the gate.
            if isinstance(module, nn.LSTM | nn.LSTMCell) and name.startswith("bias_ih"):
                values[module.hidden_size : 2 * module.hidden_size] = 1.0
        else:
            fill = nn.init.orthogonal_ if name.startswith("weight_hh") else fill
            fill(values, generator=generator)
    else:
        return False
    return True
