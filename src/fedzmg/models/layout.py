"""Input axes of parameters, by the type of their module.

The zero-mean projection averages over a layer's inputs. That is not a function of a tensor's
rank: a linear kernel is ``(out, in)``, an embedding ``(vocabulary, dim)`` has its inputs first, a
transposed convolution swaps its first two axes, and a bias is never projected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from fedzmg.contract import Layout, ParamInfo
from fedzmg.errors import InputError
from fedzmg.models.layer_swaps import GRU

AxisRule: TypeAlias = Callable[[nn.Module, str, int], ParamInfo | None]
"""(module, its parameter's own name, rank) -> role and input axes; None if they are unknown."""

_BIAS = ParamInfo("bias", ())


def _norm(*_: object) -> ParamInfo:
    return ParamInfo("norm", ())


def _embedding(*_: object) -> ParamInfo:
    return ParamInfo("embedding", (0,))


def _all_but_first(_module: nn.Module, name: str, rank: int) -> ParamInfo | None:
    if name == "bias":
        return _BIAS
    # Another name is not one of the layer's own, e.g. the lengths that weight norm adds.
    return ParamInfo("kernel", tuple(range(1, rank))) if name == "weight" else None


def _transposed(module: nn.Module, name: str, rank: int) -> ParamInfo | None:
    if name == "bias":
        return _BIAS
    # With groups the inputs of one output unit are a block of axis 0, which no axis tuple can say.
    if getattr(module, "groups", 1) != 1 or name != "weight":
        return None
    return ParamInfo("kernel", (0, *range(2, rank)))


def _recurrent(_module: nn.Module, name: str, _rank: int) -> ParamInfo | None:
    if name.startswith("bias"):
        return _BIAS
    return ParamInfo("recurrent_kernel" if name.startswith("weight_hh") else "kernel", (1,))


def _attention(_module: nn.Module, name: str, _rank: int) -> ParamInfo | None:
    if name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
        return ParamInfo("kernel", (1,))
    # bias_k and bias_v are rank 3 yet biases.
    return _BIAS if name in ("in_proj_bias", "bias_k", "bias_v") else None


_KINDS: dict[AxisRule, tuple[type[nn.Module], ...]] = {
    _all_but_first: (nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    _transposed: (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    _recurrent: (nn.RNNBase, nn.RNNCellBase, GRU),
    _attention: (nn.MultiheadAttention,),
    _embedding: (nn.Embedding, nn.EmbeddingBag),
    _norm: (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _InstanceNorm, nn.PReLU),
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
            name = f"{prefix}.{own_name}" if prefix else own_name
            if not parameter.requires_grad:
                continue
            info = _given(named, name, parameter.ndim) or _by_type(
                module, name, own_name, parameter.ndim
            )
            shared = first_name.setdefault(id(parameter), name)
            if shared in layout and shared in (axes or {}):
                continue  # the user has given the axes of a tied weight
            if shared in layout and layout[shared].input_axes != info.input_axes:
                raise InputError(
                    f"parameter {name!r} is tied to {shared!r}, which has other input axes: "
                    f"name them with axes={{{shared!r}: (...)}}"
                )
            layout.setdefault(shared, info)
    if named:
        raise InputError(
            f"axes names {sorted(named)[0]!r}, which is not a trainable parameter of the model "
            f"(it has {', '.join(layout)})"
        )
    return layout


def _given(named: dict[str, tuple[int, ...]], name: str, rank: int) -> ParamInfo | None:
    if name not in named:
        return None
    given = named.pop(name)
    axes = tuple(given) if isinstance(given, tuple | list) else (given,)
    wrong = [a for a in axes if not isinstance(a, int) or not 0 <= a < rank]
    if wrong or len(set(axes)) != len(axes):
        raise InputError(f"axes[{name!r}] = {axes}: expected different axes from 0 to {rank - 1}")
    return ParamInfo("kernel" if axes else "bias", axes)


def _by_type(module: nn.Module, name: str, own_name: str, rank: int) -> ParamInfo:
    for kind in type(module).__mro__:
        if kind in INPUT_AXES:
            info = INPUT_AXES[kind](module, own_name, rank)
            if info is not None:
                return info._replace(layer=type(module).__name__)
    raise InputError(
        f"parameter {name!r} belongs to a {type(module).__name__}, whose input axes are unknown: "
        f"name them with axes={{{name!r}: (...)}}, or () to leave it unprojected"
    )
