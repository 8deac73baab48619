"""Input axes of parameters, from a model or from the user."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, SupportsIndex, TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList

from fedzmg.errors import InputError, unknown
from fedzmg.models.layout import INPUT_AXES, layout_of

Axes: TypeAlias = tuple[int, ...]
"""Input axes of one parameter; ``()`` leaves it alone."""

Known: TypeAlias = Mapping[str, Axes] | Mapping[Tensor, Axes]
"""Axes that the user gave by name, or the model's by parameter."""


def model_layout(
    model: nn.Module, axes: Mapping[str, Axes] | None = None
) -> tuple[dict[Tensor, Axes], set[Tensor]]:
    """Return the input axes of a model's parameters, and its biases and norms by their role.

    Vectors and scalars are never centred, so an unknown type of module matters only if it has
    weights of two or more axes. Frozen ones are included, but those of unknown type.
    """
    given_axes: dict[str, Axes] = dict(axes or {})
    frozen: dict[Tensor, set[Axes | None]] = {}
    for prefix, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{own_name}" if prefix else own_name
            _reject_lazy(parameter, name)
            if name in given_axes:
                given_axes[name] = checked(given_axes[name], parameter.ndim, name)
            elif parameter.ndim < 2:
                given_axes[name] = ()
            # Spectral norm stores the layer's weight up to a factor.
            elif isinstance(module, ParametrizationList) and all(
                isinstance(each, _SpectralNorm) for each in module
            ):
                *layer, _, behind = prefix.split(".")
                found = _by_type(model.get_submodule(".".join(layer)), behind, parameter.ndim)
                if found is not None:
                    given_axes[name] = found
            if not parameter.requires_grad:
                # The names of a tied parameter may disagree.
                own_axes = given_axes.pop(name, _by_type(module, own_name, parameter.ndim))
                frozen.setdefault(parameter, set()).add(own_axes)
    named = dict(model.named_parameters())
    layout = layout_of(model, given_axes)
    known: dict[Tensor, Axes] = {named[name]: info.input_axes for name, info in layout.items()}
    for parameter, candidates in frozen.items():
        if len(candidates) == 1 and (one := candidates.pop()) is not None:
            known[parameter] = one
    return known, {named[n] for n, info in layout.items() if info.role in ("bias", "norm")}


def _by_type(module: nn.Module, own_name: str, rank: int) -> Axes | None:
    rules = (INPUT_AXES[kind] for kind in type(module).__mro__ if kind in INPUT_AXES)
    infos = (rule(module, own_name, rank) for rule in rules)
    return next((info.input_axes for info in infos if info is not None), None)


def _reject_lazy(parameter: Any, name: str) -> None:
    if is_lazy(parameter):
        raise InputError(f"parameter {name!r} has no shape yet: run one forward first")


def axes_of(group: Mapping[str, Any], known: Known | None) -> list[Axes]:
    """Return the axes of every parameter of a group: its ``"input_axes"``, or the known ones.

    If there are none, all axes but the first are taken for inputs, with one warning. That is wrong
    for embeddings, transposed convolutions and convolutions with channels last.
    """
    params: list[Tensor] = group["params"]
    names: list[str] = group.get("param_names") or [f"number {i}" for i in range(len(params))]
    for parameter, name in zip(params, names, strict=True):
        _reject_lazy(parameter, name)
    given: Any = group.get("input_axes")
    by_parameter = isinstance(next(iter(known or ()), None), Tensor)
    if given is not None:
        given = _each(given, params)
    elif known and (by_parameter or "param_names" in group):
        keys: Any = params if by_parameter else names
        for key, parameter, name in zip(keys, params, names, strict=True):
            if key not in known and parameter.ndim > 1:
                raise InputError(
                    f"input axes of parameter {name!r} of shape {tuple(parameter.shape)} are not "
                    "known: name it in axes, () to leave it uncentred, or give its group "
                    "'input_axes'"
                )
        given = [known.get(key, ()) for key in keys]
    else:
        if any(p.ndim > 1 for p in params):
            _warn_once(
                "input axes are not known for a bare list of parameters: all axes but the first "
                "are taken for inputs, which is wrong for embeddings and transposed layouts; pass "
                "the model (ZeroMeanSGD.for_model), axes by name, or 'input_axes' in every group"
            )
        given = [tuple(range(1, p.ndim)) for p in params]
    found = [checked(a, p.ndim, n) for a, p, n in zip(given, params, names, strict=True)]
    warn_of_single_inputs(zip(names, params, found, strict=True))
    return found


def _each(given: Any, params: list[Tensor]) -> list[Any]:
    """Return the axes of each parameter from those of a group: one tuple for all, or a list."""
    given = (given,) if isinstance(given, SupportsIndex) else given
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InputError(f"input_axes = {given!r}: expected a tuple of axes, or a list of tuples")
    if all(isinstance(axis, SupportsIndex) for axis in given):
        return [given if p.ndim > 1 else () for p in params]
    if len(given) != len(params):
        raise InputError(
            f"input_axes has {len(given)} entries for {len(params)} parameters: "
            "give one tuple for each, or a single tuple for all"
        )
    return list(given)


def check_names(axes: Mapping[str, Axes], groups: Iterable[Mapping[str, Any]]) -> None:
    """Reject a map of axes that names a parameter of no group."""
    known = [name for group in groups for name in group.get("param_names", ())]
    if not known:
        raise InputError(
            "axes is a map by name, but the parameters have no names: pass the model, "
            "model.named_parameters(), or groups with 'input_axes'"
        )
    for name in axes:
        if name not in known:
            raise unknown("parameter in axes", name, known)


def checked(given: Any, rank: int, name: str) -> Axes:
    """Return valid axes in ascending order, counted from the front."""
    what = f"input axes {given} of parameter {name}"
    try:
        axes = [index(a) for a in ((given,) if isinstance(given, SupportsIndex) else given)]
    except TypeError as error:
        raise InputError(f"{what}: expected a tuple of whole numbers") from error
    if any(not -rank <= a < rank for a in axes):
        raise InputError(f"{what}: it has {rank} axes")
    found = tuple(sorted(a % rank for a in axes))
    if len(set(found)) != len(found):
        raise InputError(f"{what}: an axis is named twice")
    return found


def inputs(shape: Sequence[int], axes: Axes) -> int:
    """Count the entries that share one mean."""
    found = 1
    for axis in axes:  # a loop, which torch.compile can follow
        found *= shape[axis]
    return found


def warn_of_single_inputs(named: Iterable[tuple[str, Tensor, Axes]]) -> None:
    """Warn of weights that the projection never moves: a single gradient is its own mean."""
    single = [n for n, p, axes in named if axes and p.numel() and inputs(p.shape, axes) == 1]
    if single:
        _warn_once(
            f"units of parameter {', '.join(single)} have one input each, and a gradient minus its "
            "own mean is zero: no step but decay will change them; leave them uncentred with "
            "axes={name: ()} or 'input_axes' of their group",
            stacklevel=7,
        )


@functools.cache
def _warn_once(message: str, stacklevel: int = 6) -> None:
    warnings.warn(message, UserWarning, stacklevel)
