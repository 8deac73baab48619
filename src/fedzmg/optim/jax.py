"""FedZMG's projection as an optax transform, for layouts in which inputs come before outputs.

::

    optax.chain(
        zero_mean(),
        optax.trace(decay=0.9),
        optax.add_decayed_weights(5e-4),
        optax.scale_by_learning_rate(0.05),
    )

is one step of FedZMG's client. Needs ``pip install 'fedzmg[optax]'``; jax is loaded by the first
call, never by importing this module.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from fedzmg.errors import InputError, unknown
from fedzmg.optim.axes import Axes

AxisRule: TypeAlias = Callable[[str, int], Axes | None]
"""(name of the layer, rank of its parameter) -> input axes; None if the name does not tell."""


def _none(layer: str, rank: int) -> Axes:
    del layer, rank
    return ()


def _vocabulary(layer: str, rank: int) -> Axes:
    del layer, rank
    return (0,)


def _flax_kernel(layer: str, rank: int) -> Axes | None:
    if rank > 2 and re.match(r"DenseGeneral|ConvLocal|Einsum", layer):
        return None  # which axes are features is known to the layer alone
    if rank == 3 and layer in ("query", "key", "value"):
        return (0,)  # (features, heads, size of a head)
    return tuple(range(rank - 1))


def _haiku_weight(layer: str, rank: int) -> Axes:
    if re.search(r"_transpose(_\d+)?$", layer):
        return (*range(rank - 2), rank - 1)  # (spatial..., outputs, inputs)
    return tuple(range(rank - 1))


INPUT_AXES: dict[str, AxisRule] = {
    # Flax, both of its interfaces
    "kernel": _flax_kernel,
    "embedding": _vocabulary,
    "bias": _none,
    "scale": _none,
    # Haiku
    "w": _haiku_weight,
    "w_i": _haiku_weight,
    "w_h": _haiku_weight,
    "embeddings": _vocabulary,
    "b": _none,
    "offset": _none,
}
"""A parameter's own name to the rule for it."""


def input_axes(params: Any, axes: Mapping[str, Axes] | None = None) -> dict[str, Axes]:
    """The axes over which each parameter is centred, by its path, such as ``Dense_0/kernel``.

    Dense kernels ``(in, out)`` have axis 0, convolutions ``(height, width, in, out)`` axes 0, 1, 2,
    embeddings ``(vocabulary, features)`` axis 0. Vectors and scalars are never centred.

    Args:
        params: parameters of Flax or Haiku, or gradients of the same structure.
        axes: for parameters whose name does not tell, or tells wrongly; ``()`` leaves one alone.

    Raises:
        InputError: for a parameter of two or more axes with a name that is not known, or for an
            unknown name or axis in ``axes``.
    """
    leaves = _installed("jax.tree_util").tree_leaves_with_path(params)
    given = dict(axes or {})
    ranks = {_name(path): leaf.ndim for path, leaf in leaves}
    for name in given:
        if name not in ranks:
            raise unknown("parameter in axes", name, ranks)
    return {
        name: _checked(name, rank, given[name]) if name in given else _by_name(name, rank)
        for name, rank in ranks.items()
    }


def zero_mean(axes: Mapping[str, Axes] | None = None) -> Any:
    """An ``optax.GradientTransformation`` that subtracts means over the inputs of every layer.

    Put it first in a chain for FedZMG, or last, before the decay, behind an optimizer that scales
    every entry by its own history, such as ``optax.scale_by_adam()``. Means of half precision are
    taken in float32.

    Args:
        axes: input axes by path, for parameters that :func:`input_axes` cannot tell.
    """
    optax, trees = _installed("optax"), _installed("jax.tree_util")

    def init(params: Any) -> Any:
        input_axes(params, axes)  # refuses what is not known before anything is trained
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        chosen = input_axes(updates, axes)
        centred = trees.tree_map_with_path(lambda p, g: _centred(g, chosen[_name(p)]), updates)
        return centred, state

    return optax.GradientTransformation(init, update)


def _installed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is not installed: pip install 'fedzmg[optax]'") from error


def _name(path: tuple[Any, ...]) -> str:
    """Keys of a path, joined, such as ``params/Dense_0/kernel``."""
    if len(path) > 1 and getattr(path[-1], "name", "") == "value":
        path = path[:-1]  # the attribute in which Flax NNX keeps the array of a variable
    return "/".join(str(_key(part)) for part in path)


def _key(part: Any) -> Any:
    found = (getattr(part, kind) for kind in ("key", "idx", "name") if hasattr(part, kind))
    return next(found, part)


def _by_name(name: str, rank: int) -> Axes:
    if rank < 2:
        return ()
    *layers, own = name.split("/")
    rule = INPUT_AXES.get(own)
    found = rule(layers[-1] if layers else "", rank) if rule else None
    if found is None:
        raise InputError(
            f"parameter {name!r} has {rank} axes, and its name does not tell which are inputs: "
            f"name them with axes={{{name!r}: (...)}}, or () to leave it uncentred"
        )
    return found


def _checked(name: str, rank: int, axes: Axes) -> Axes:
    if any(not isinstance(a, int) or not -rank <= a < rank for a in axes):
        raise InputError(f"axes[{name!r}] = {tuple(axes)}: it has {rank} axes")
    found = tuple(sorted(a % rank for a in axes))
    if len(set(found)) != len(found):
        raise InputError(f"axes[{name!r}] = {tuple(axes)}: an axis is named twice")
    return found


def _centred(grad: Any, axes: Axes) -> Any:
    if not axes or not grad.size:
        return grad
    wide = grad.astype("float32") if grad.dtype in ("float16", "bfloat16") else grad
    return (wide - wide.mean(axes, keepdims=True)).astype(grad.dtype)
