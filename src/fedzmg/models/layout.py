"""Input axes of parameters, by the type of their module or from the user.

The zero-mean projection averages over a layer's inputs. That is not a function of a tensor's
rank: a linear kernel is ``(out, in)``, an embedding ``(vocabulary, dim)`` has its inputs first, a
transposed convolution swaps its first two axes, and a bias is never projected. A weight of an
unknown module is not projected, and :func:`warn_of_unknown` names it.
"""

import contextlib
import difflib
import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import index
from typing import Any, SupportsIndex, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList

from fedzmg.contract import Layout, ParamInfo
from fedzmg.errors import InputError, unknown
from fedzmg.models.lora import adapter_info
from fedzmg.plain_text import plain

Axes: TypeAlias = tuple[int, ...]  # input axes of one parameter; () leaves it alone
Known: TypeAlias = Mapping[Any, Axes]  # given by name or pattern, or the model's by parameter
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


_KINDS: dict[AxisRule, tuple[type[nn.Module], ...]] = {  # subclasses included
    _dense: (nn.Linear, nn.Bilinear, _ConvNd),
    _recurrent: (nn.RNNBase, nn.RNNCellBase),
    _attention: (nn.MultiheadAttention,),
    lambda *_: _TABLE: (nn.Embedding, nn.EmbeddingBag),
    lambda *_: _NORM: (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase, nn.PReLU),
}
INPUT_AXES = {kind: rule for rule, kinds in _KINDS.items() for kind in kinds}
_FOREIGN = {"transformers.pytorch_utils.Conv1D": {"weight": ParamInfo("kernel", (0,))}}  # optional


def layout_of(model: nn.Module, axes: Known | None = None, *, frozen: bool = False) -> Layout:
    """Find role and input axes of every trainable parameter of a model.

    Vectors and scalars are never projected, so modules of unknown types matter only for weights of
    two or more axes: their role is ``unknown``, and they have no input axes. A weight that several
    modules share has the axes of the first one, and the types of all in ``layer``.

    Args:
        model: any module; parameters with ``requires_grad=False`` are left out.
        axes: input axes by parameter name or pattern, ``{"blocks.*.mix": (1,)}``, in place of those
            of the layer; ``()`` means that the parameter is not projected. A name takes precedence
            over a pattern, and a pattern over a later one.
        frozen: include parameters with ``requires_grad=False``.
    """
    if axes is not None and not isinstance(axes, Mapping):
        raise InputError(f"axes = {axes!r}: expected axes by name, {{'0.weight': (1,)}}")
    given, used, layout = dict(axes or {}), set[str](), dict[str, ParamInfo]()
    first_name: dict[int, str] = {}
    named: set[str] = set()
    for prefix, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if not (frozen or parameter.requires_grad):
                continue
            name = f"{prefix}.{own_name}".lstrip(".")
            if is_lazy(parameter):
                raise InputError(f"parameter {name!r} has no shape yet: run one forward first")
            shared = first_name.setdefault(id(parameter), name)
            used |= {key for key in given if fnmatchcase(name, key)}
            if (key := key_of(given, name)) is not None:
                over = checked_axes(given[key], parameter.ndim, name)
                info = ParamInfo("kernel" if over else "bias", over)
                named.add(shared)
            elif shared in named:
                continue
            else:
                info = _by_type(model, module, name, parameter.ndim)
            first = layout.setdefault(shared, info)
            if shared in named or first.role == "unknown":
                layout[shared] = info
            elif info.input_axes != first.input_axes and info.role != "unknown":
                layout[shared] = first._replace(layer=f"{first.layer}+{info.layer}")
    if unused := given.keys() - used:
        problem = f"axes names {min(unused)!r}, which is not a trainable parameter of the model"
        raise InputError(f"{problem} (it has {', '.join(layout)})")
    return layout


def key_of(axes: Known, name: str) -> str | None:
    """Return the key of a parameter: its name, or the first pattern that matches it."""
    patterns = (key for key in axes if isinstance(key, str) and fnmatchcase(name, key))
    return name if name in axes else next(patterns, None)


def not_projected(layout: Layout) -> str:
    """List the weights that are not projected because their input axes are unknown."""
    return listed((n, i.layer) for n, i in layout.items() if i.role == "unknown")


def warn_of_unknown(layout: Layout) -> None:
    """Warn once of weights that are not projected for want of axes, and of shared ones."""
    shared = listed((n, i.layer) for n, i in layout.items() if "+" in i.layer)
    parts = {"not projected, because the input axes are unknown": not_projected(layout)}
    parts["projected over the inputs of the first layer that has it"] = shared
    if found := [f"{problem}: {names}; " for problem, names in parts.items() if names]:
        warn_once("".join(found) + "axes={name or pattern: (1,)} or () changes that")


def listed(named: Iterable[tuple[str, str]]) -> str:
    """List parameters with their layers; names that differ in numbers become a pattern.

    >>> listed([("cls", "ViT"), ("blocks.0.scale", "Block"), ("blocks.1.scale", "Block")])
    'cls (ViT), blocks.*.scale (Block)'
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, layer in named:
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), layer), []).append(name)
    found = ((p if len(names) > 1 else names[0], layer) for (p, layer), names in groups.items())
    return ", ".join(f"{name} ({layer})" for name, layer in found)


def checked_axes(given: Any, rank: int, name: str) -> Axes:
    """Return valid axes in ascending order, counted from the front."""
    with contextlib.suppress(TypeError, IndexError):
        axes = [index(a) for a in ((given,) if isinstance(given, SupportsIndex) else given)]
        found = {range(rank)[axis] for axis in axes}
        if len(found) == len(axes):
            return tuple(sorted(found))
    allowed = f"expected different numbers from 0 to {rank - 1}, or () for no projection"
    raise InputError(f"axes = {given} of parameter {name!r} of {rank} axes: {allowed}")


def _by_type(model: nn.Module, module: nn.Module, name: str, rank: int) -> ParamInfo:
    if (adapter := adapter_info(model, name, rank)) is not None:
        return adapter
    *path, own_name = name.split(".")
    own = module if isinstance(module, ParametrizationList) else [module]
    if all(isinstance(m, _SpectralNorm) for m in own):
        # Spectral norm stores the layer's weight up to a factor.
        *layer, _, own_name = path
        module = model.get_submodule(".".join(layer))
    kind_name = type(module).__name__
    if path and path[-1] in ("lora_embedding_A", "lora_embedding_B"):
        # Of peft: (rank, rows), (dim, rank).
        return ParamInfo("kernel", (1,) if path[-1].endswith("A") else (), kind_name)
    for kind in type(module).__mro__:
        info = _FOREIGN.get(f"{kind.__module__}.{kind.__qualname__}", {}).get(own_name)
        if info is None and kind in INPUT_AXES:
            info = INPUT_AXES[kind](module, own_name, rank)
        if info is not None:
            return info._replace(layer=kind_name)
    return ParamInfo("bias", ()) if rank < 2 else ParamInfo("unknown", (), kind_name)


def known_axes(model: nn.Module, axes: Known | None = None) -> tuple[Known, set[Tensor]]:
    """Return known input axes of a model's parameters, also frozen ones, and biases and norms."""
    named = dict(model.named_parameters())
    every = layout_of(model, axes, frozen=True).items()
    layout = {n: info for n, info in every if named[n].requires_grad or info.role != "unknown"}
    warn_of_unknown(layout)
    known = {named[name]: info.input_axes for name, info in layout.items()}
    return known, {named[n] for n, info in layout.items() if info.role in ("bias", "norm")}


def group_axes(group: Mapping[str, Any], known: Known | None) -> list[Axes]:
    """Return the axes of every parameter of a group: its ``"input_axes"``, or the known ones.

    If there are none, all axes but the first are taken for inputs, with one warning. That is wrong
    for embeddings, transposed convolutions and convolutions with channels last.
    """
    for key in group:
        if key != "input_axes" and difflib.get_close_matches(key, ["input_axes"], cutoff=0.55):
            raise InputError(f"a group has {key!r}: did you mean 'input_axes'?")
    params: list[Tensor] = group["params"]
    names: list[str] = group.get("param_names") or [f"number {i}" for i in range(len(params))]
    for parameter, name in zip(params, names, strict=True):
        if is_lazy(parameter):
            raise InputError(f"parameter {name!r} has no shape yet: run one forward first")
    given: Any = group.get("input_axes")
    if given is None and known is not None:
        if "param_names" not in group:
            check_names(known, [group])
        given = []
        for p, name in zip(params, names, strict=True):
            found_at = p if p in known else key_of(known, name)
            given.append(known.get(found_at, () if p.ndim < 2 else None))
            if given[-1] is None:
                problem = f"input axes of {name!r} of shape {tuple(p.shape)} are not known"
                remedy = "name it in axes, () to leave it uncentred, or give its group 'input_axes'"
                raise InputError(f"{problem}: {remedy}")
    elif given is None:
        if any(p.ndim > 1 for p in params):
            warn_once(
                "input axes are not known for a bare list of parameters: all axes but the first "
                "are taken for inputs, which is wrong for embeddings and transposed layouts; pass "
                "the model (ZeroMeanSGD.for_model), axes by name, or 'input_axes' in every group"
            )
        given = [tuple(range(1, p.ndim)) for p in params]
    elif not isinstance(given, Sequence) or all(isinstance(a, SupportsIndex) for a in given):
        given = [given if p.ndim > 1 else () for p in params]
    if len(given) != len(params):
        problem = f"input_axes has {len(given)} entries for {len(params)} parameters"
        raise InputError(f"{problem}: give one tuple for each, or a single tuple for all")
    found = [checked_axes(a, p.ndim, n) for a, p, n in zip(given, params, names, strict=True)]
    warn_of_single_inputs(zip(names, params, found, strict=True))
    return found


def check_names(axes: Known | None, groups: Iterable[Mapping[str, Any]]) -> None:
    """Reject a map of axes that names a parameter of no group."""
    known = [name for group in groups for name in group.get("param_names", ())]
    for key in axes or ():
        if isinstance(key, str) and not any(fnmatchcase(name, key) for name in known):
            if known:
                raise unknown("parameter in axes", key, known)
            remedy = "pass model.named_parameters()"
            raise InputError(f"axes names {key!r}, but parameters have no names: {remedy}")


def warn_of_single_inputs(named: Iterable[tuple[str, Tensor, Axes]]) -> None:
    """Warn of weights that the projection never moves: a single gradient is its own mean."""
    inputs = {n: [p.shape[a] for a in axes] for n, p, axes in named if axes and p.numel()}
    if single := [name for name, sizes in inputs.items() if math.prod(sizes) == 1]:
        problem = f"units of parameter {', '.join(single)} have one input each"
        reason = "a gradient minus its own mean is zero: no step but decay will change them"
        remedy = "leave them uncentred with axes={name: ()} or 'input_axes' of their group"
        warn_once(f"{problem}, and {reason}; {remedy}")


@functools.cache
def warn_once(message: str) -> None:
    """Warn at the first line of the caller's own code."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in ("fedzmg", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(plain(message), UserWarning, level)
