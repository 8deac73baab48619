"""Input axes of parameters, by the type of their module.

The zero-mean projection averages over a layer's inputs. That is not a function of a tensor's
rank: a linear kernel is ``(out, in)``, an embedding ``(vocabulary, dim)`` has its inputs first, a
transposed convolution swaps its first two axes, and a bias is never projected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from fedzmg.contract import Layout, ParamInfo
from fedzmg.errors import InputError
from fedzmg.models.layer_swaps import GRU

AxisRule: TypeAlias = Callable[[nn.Module, str, int], ParamInfo | None]
"""(module, its parameter's own name, rank) -> role and input axes; None if they are unknown."""

_BIAS, _NORM, _TABLE = ParamInfo("bias", ()), ParamInfo("norm", ()), ParamInfo("embedding", (0,))


def _dense(module: nn.Module, name: str, rank: int) -> ParamInfo | None:
    if name == "bias":
        return _BIAS
    transposed = getattr(module, "transposed", False)
    # Another name is not one of the layer's own, e.g. the lengths that weight norm adds. With
    # groups, the inputs of one output unit are a block of axis 0, which no axis tuple can say.
    if name != "weight" or (transposed and module.groups != 1):
        return None
    return ParamInfo("kernel", (0, *range(2, rank)) if transposed else tuple(range(1, rank)))


def _recurrent(_module: nn.Module, name: str, _rank: int) -> ParamInfo | None:
    if name.startswith("bias"):
        return _BIAS
    return ParamInfo("recurrent_kernel" if name.startswith("weight_hh") else "kernel", (1,))


def _attention(_module: nn.Module, name: str, _rank: int) -> ParamInfo | None:
    if name.endswith("proj_weight"):
        return ParamInfo("kernel", (1,))
    # bias_k and bias_v are rank 3 yet biases.
    return _BIAS if name in ("in_proj_bias", "bias_k", "bias_v") else None


_KINDS: dict[AxisRule, tuple[type[nn.Module], ...]] = {
    _dense: (nn.Linear, nn.Bilinear, _ConvNd),
    _recurrent: (nn.RNNBase, nn.RNNCellBase, GRU),
    _attention: (nn.MultiheadAttention,),
    lambda *_: _TABLE: (nn.Embedding, nn.EmbeddingBag),
    lambda *_: _NORM: (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _InstanceNorm, nn.PReLU),
}
INPUT_AXES = {kind: rule for rule, kinds in _KINDS.items() for kind in kinds}
"""Module type (subclasses included) to the rule for its own parameters."""


def layout_of(model: nn.Module, axes: Mapping[str, tuple[int, ...]] | None = None) -> Layout:
    """Find role and input axes of every trainable parameter of a model.

    Args:
        model: any module; parameters with ``requires_grad=False`` are left out.
        axes: input axes for parameters of your own modules, by full parameter name; ``()`` means
            that the parameter is not projected.
    """
    if axes is not None and not isinstance(axes, Mapping):
        raise InputError(f"axes = {axes!r}: expected axes by name, {{'0.weight': (1,)}}")
    named = dict(axes or {})
    layout: dict[str, ParamInfo] = {}
    first_name: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            name = f"{prefix}.{own_name}".lstrip(".")
            if name in named:
                info = _given(name, named.pop(name), parameter.ndim)
            else:
                info = _by_type(module, name, own_name, parameter.ndim)
            shared = first_name.setdefault(id(parameter), name)
            agrees = layout.setdefault(shared, info).input_axes == info.input_axes
            if not agrees and shared not in (axes or {}):
                raise InputError(
                    f"parameter {name!r} is tied to {shared!r}, which has other input axes: "
                    f"name them with axes={{{shared!r}: (...)}}"
                )
    if named:
        raise InputError(
            f"axes names {min(named)!r}, which is not a trainable parameter of the model "
            f"(it has {', '.join(layout)})"
        )
    return layout


def _given(name: str, given: tuple[int, ...], rank: int) -> ParamInfo:
    axes = tuple(given) if isinstance(given, tuple | list) else (given,)
    if any(axis not in range(rank) for axis in axes) or len(set(axes)) != len(axes):
        raise InputError(f"axes[{name!r}] = {axes}: expected different axes from 0 to {rank - 1}")
    return ParamInfo("kernel" if axes else "bias", axes)


def _by_type(module: nn.Module, name: str, own_name: str, rank: int) -> ParamInfo:
    rules = (INPUT_AXES[kind] for kind in type(module).__mro__ if kind in INPUT_AXES)
    for info in (rule(module, own_name, rank) for rule in rules):
        if info is not None:
            return info._replace(layer=type(module).__name__)
    raise InputError(
        f"parameter {name!r} belongs to a {type(module).__name__}, whose input axes are unknown: "
        f"name them with axes={{{name!r}: (...)}}, or () to leave it unprojected"
    )
