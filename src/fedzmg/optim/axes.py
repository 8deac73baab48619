"""Which axes of each parameter an optimizer centres over, from a model or from what a user says."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from fedzmg.contract import Layout
from fedzmg.errors import InputError, unknown
from fedzmg.models.layout import layout_of

Axes: TypeAlias = tuple[int, ...]
"""Input axes of one parameter; ``()`` leaves it alone."""

GivenAxes: TypeAlias = Axes | Sequence[Axes] | Mapping[str, Axes] | None
"""One tuple for all parameters of a group, a list with a tuple each, or a map by name."""

_told = False


def model_layout(model: nn.Module, axes: Mapping[str, Axes] | None = None) -> Layout:
    """Input axes of all trainable parameters of a model.

    Vectors and scalars are never centred, whatever module they belong to, so a module of a type
    that is not known matters only if it has weights of two or more axes.
    """
    vectors: dict[str, Axes] = {}
    for prefix, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter.ndim < 2:
                vectors[f"{prefix}.{own_name}" if prefix else own_name] = ()
    return layout_of(model, {**vectors, **(axes or {})})


def group_axes(group: Mapping[str, Any], given: GivenAxes) -> list[Axes]:
    """The axes of every parameter of a group, checked.

    Without ``given`` all axes but the first of every parameter with two or more are taken for
    inputs, which is right for linear layers and convolutions and wrong for embeddings, transposed
    convolutions and convolutions with channels last; that is said once.
    """
    params: list[Tensor] = group["params"]
    names: list[str] = group.get("param_names") or [f"number {i}" for i in range(len(params))]
    if isinstance(given, Mapping):
        return _by_name(given, params, names)
    if given is None:
        if any(p.ndim > 1 for p in params):
            _tell_once()
        return [tuple(range(1, p.ndim)) for p in params]
    if all(isinstance(axis, int) for axis in given):
        one: Any = tuple(given)
        chosen = [one if p.ndim > 1 else () for p in params]
    else:
        chosen = [tuple(axes) for axes in given]  # type: ignore[arg-type]
        if len(chosen) != len(params):
            raise InputError(
                f"input_axes has {len(chosen)} entries for {len(params)} parameters: "
                "give one tuple for each, or a single tuple for all"
            )
    return [_checked(*each) for each in zip(chosen, params, names, strict=True)]


def _by_name(given: Mapping[str, Axes], params: list[Tensor], names: list[str]) -> list[Axes]:
    chosen = []
    for name, parameter in zip(names, params, strict=True):
        if name not in given and parameter.ndim > 1:
            raise InputError(
                f"axes does not name parameter {name!r} of shape {tuple(parameter.shape)}: "
                "add its input axes, or () to leave it uncentred"
            )
        chosen.append(_checked(given.get(name, ()), parameter, name))
    return chosen


def check_names(axes: Mapping[str, Axes], groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a map of axes that names a parameter no group has."""
    known = [name for group in groups for name in group.get("param_names", ())]
    if not known:
        raise InputError(
            "axes is a map by name, but the parameters have no names: pass the model, "
            "model.named_parameters(), or groups with 'input_axes'"
        )
    for name in axes:
        if name not in known:
            raise unknown("parameter in axes", name, known)


def _checked(axes: Axes, parameter: Tensor, name: str) -> Axes:
    rank = parameter.ndim
    if any(not isinstance(a, int) or not -rank <= a < rank for a in axes):
        raise InputError(f"input axes {tuple(axes)} of parameter {name}: it has {rank} axes")
    found = tuple(sorted(a % rank for a in axes))
    if len(set(found)) != len(found):
        raise InputError(f"input axes {tuple(axes)} of parameter {name}: an axis is named twice")
    return found


def inputs(shape: Sequence[int], axes: Axes) -> int:
    """How many entries share one mean."""
    found = 1
    for axis in axes:  # a loop, which torch.compile can follow
        found *= shape[axis]
    return found


def _tell_once() -> None:
    global _told
    if not _told:
        _told = True
        warnings.warn(
            "input axes are not known for a bare list of parameters: all axes but the first are "
            "taken for inputs, which is wrong for embeddings and transposed layouts; pass the "
            "model (ZeroMeanSGD.for_model), axes by name, or 'input_axes' in every group",
            UserWarning,
            stacklevel=6,
        )
