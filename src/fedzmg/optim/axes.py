"""Input axes of parameters, from a model or from the user."""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedzmg.errors import InputError, unknown
from fedzmg.models.layout import checked_axes, layout_of

Axes: TypeAlias = tuple[int, ...]
"""Input axes of one parameter; ``()`` leaves it alone."""

Known: TypeAlias = Mapping[Any, Axes]
"""Axes that the user gave by name, or the model's by parameter."""


def model_layout(
    model: nn.Module, axes: Mapping[str, Axes] | None = None
) -> tuple[dict[Tensor, Axes], set[Tensor]]:
    """Return the input axes of a model's parameters, also frozen ones, and its biases and norms."""
    named, layout = dict(model.named_parameters()), layout_of(model, axes, frozen=True)
    known: dict[Tensor, Axes] = {named[name]: info.input_axes for name, info in layout.items()}
    return known, {named[n] for n, info in layout.items() if info.role in ("bias", "norm")}


def axes_of(group: Mapping[str, Any], known: Known | None) -> list[Axes]:
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
        given = [known.get(p, known.get(name)) for p, name in zip(params, names, strict=True)]
        for i, (parameter, name) in enumerate(zip(params, names, strict=True)):
            if given[i] is not None:
                continue
            if parameter.ndim > 1:
                raise InputError(
                    f"input axes of parameter {name!r} of shape {tuple(parameter.shape)} are not "
                    "known: name it in axes, () to leave it uncentred, or give its group "
                    "'input_axes'"
                )
            given[i] = ()
    elif given is None:
        if any(p.ndim > 1 for p in params):
            _warn_once(
                "input axes are not known for a bare list of parameters: all axes but the first "
                "are taken for inputs, which is wrong for embeddings and transposed layouts; pass "
                "the model (ZeroMeanSGD.for_model), axes by name, or 'input_axes' in every group"
            )
        given = [tuple(range(1, p.ndim)) for p in params]
    elif not isinstance(given, Sequence) or all(isinstance(a, SupportsIndex) for a in given):
        given = [given if p.ndim > 1 else () for p in params]
    if len(given) != len(params):
        raise InputError(
            f"input_axes has {len(given)} entries for {len(params)} parameters: "
            "give one tuple for each, or a single tuple for all"
        )
    found = [checked_axes(a, p.ndim, n) for a, p, n in zip(given, params, names, strict=True)]
    warn_of_single_inputs(zip(names, params, found, strict=True))
    return found


def check_names(axes: Known | None, groups: Iterable[Mapping[str, Any]]) -> None:
    """Reject a map of axes that names a parameter of no group."""
    known = [name for group in groups for name in group.get("param_names", ())]
    for key in axes or ():
        if isinstance(key, str) and key not in known:
            raise unknown("parameter in axes", key, known)


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
