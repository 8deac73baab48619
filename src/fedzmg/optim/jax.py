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

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from fedzmg.errors import InputError, unknown
from fedzmg.models.layout import Axes, checked_axes

Shape: TypeAlias = tuple[int, ...]
AxisRule: TypeAlias = Callable[[list[str], str, Mapping[str, Shape]], Axes | None]
"""(path of the layer, name of its parameter, all shapes) -> input axes; None if unknown."""
REPEATED = re.compile(r"(Scan|Vmap)[A-Z]|__layer_stack")  # stacked layers of Flax and Haiku


def _inputs_first(layer: list[str], own: str, shapes: Mapping[str, Shape]) -> Axes | None:
    rank, name = len(shapes["/".join([*layer, own])]), layer[-1] if layer else ""
    if name.startswith(("Einsum", "ConvLocal")):
        return None
    if rank == 2:
        return (0,)
    # With more axes only the layer knows which are features, unless it is a convolution.
    if "conv" not in name.lower() or any(REPEATED.match(part) for part in layer):
        return None
    if re.search(r"_transpose(_\d+)?$", name):
        return (*range(rank - 2), rank - 1)  # Haiku: (spatial..., outputs, inputs)
    return tuple(range(rank - 1))


def _flax_kernel(layer: list[str], own: str, shapes: Mapping[str, Shape]) -> Axes | None:
    def of(*path: str) -> Shape:
        return shapes.get("/".join(path), ())

    kernel, bias, (*block, name) = of(*layer, own), of(*layer, "bias"), layer or [""]
    if len(kernel) == 3 and name in ("query", "key", "value", "out"):
        query, out = of(*block, "query", own), of(*block, "out", own)
        # (features, heads, size) and (heads, size, features); stacks of matrices do not fit.
        heads = len(query) == 3 and query[1:] == out[:2] and len(of(*block, "out", "bias")) < 2
        return ((0, 1) if name == "out" else (0,)) if heads else None
    if len(kernel) > 2 and bias:
        # A bias has the axes of the outputs, and in a stack of layers one more.
        return tuple(range(len(kernel) - 1)) if bias == kernel[-1:] else None
    return _inputs_first(layer, own, shapes)


INPUT_AXES: dict[str, AxisRule] = {
    "kernel": _flax_kernel,
    **dict.fromkeys(("w", "w_i", "w_h"), _inputs_first),
    **dict.fromkeys(
        ("embedding", "embeddings"),
        lambda layer, own, shapes: (0,) if len(shapes["/".join([*layer, own])]) == 2 else None,
    ),
    **dict.fromkeys(("bias", "scale", "b", "offset"), lambda *_: ()),
}
"""Rule for each name of a parameter, in both interfaces of Flax and in Haiku."""


def input_axes(params: Any, axes: Mapping[str, Axes] | None = None) -> dict[str, Axes]:
    """Return the axes over which each parameter is centred, by path, such as ``Dense_0/kernel``.

    Dense kernels ``(in, out)`` have axis 0, convolutions ``(height, width, in, out)`` axes 0, 1, 2,
    embeddings ``(vocabulary, features)`` axis 0. Vectors and scalars are never centred. Give
    ``axes`` for unknown or misleading names; ``()`` leaves one alone. Those of another part of
    ``optax.multi_transform`` may be among them.
    """
    trees, masked = _installed("jax.tree_util"), _installed("optax").MaskedNode
    leaves = trees.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, masked))
    given = dict(axes or {})
    known = {_name(path): leaf for path, leaf in leaves}
    # A number of Python's has no shape.
    shapes = {n: getattr(x, "shape", ()) for n, x in known.items() if not isinstance(x, masked)}
    elsewhere = tuple(f"{n}/" for n in known if n not in shapes)  # parameters or whole layers
    for name in given:
        if name not in shapes and not f"{name}/".startswith(elsewhere):
            raise unknown("parameter in axes", name, known)
    return {
        n: checked_axes(given[n], len(shape), n) if n in given else _by_name(n, shapes)
        for n, shape in shapes.items()
    }


def zero_mean(axes: Mapping[str, Axes] | None = None) -> Any:
    """Return an ``optax.GradientTransformation`` that subtracts means over the layers' inputs.

    Put it first in a chain for FedZMG, or last, before the decay, behind an optimizer that scales
    every entry by its own history, such as ``optax.scale_by_adam()``. Means of half precision are
    taken in float32. ``axes`` are those of :func:`input_axes`.
    """
    optax, trees = _installed("optax"), _installed("jax.tree_util")

    def init(params: Any) -> Any:
        input_axes(params, axes)  # rejects unknown parameters before training
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> Any:  # noqa: ARG001
        chosen = input_axes(updates, axes)
        return trees.tree_map_with_path(lambda p, g: _centred(g, chosen[_name(p)]), updates), state

    return optax.GradientTransformation(init, update)


def _installed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is not installed: pip install 'fedzmg[optax]'") from error


def _name(path: tuple[Any, ...]) -> str:
    """Join the keys of a path, such as ``params/Dense_0/kernel``."""
    if len(path) > 1 and getattr(path[-1], "name", "") == "value":
        path = path[:-1]  # the attribute in which Flax NNX keeps the array of a variable
    kinds = ("key", "idx", "name")
    keys = (next((getattr(p, kind) for kind in kinds if hasattr(p, kind)), p) for p in path)
    return "/".join(map(str, keys))


def _by_name(name: str, shapes: Mapping[str, Shape]) -> Axes:
    rank = len(shapes[name])
    if rank < 2:
        return ()
    *layer, own = name.split("/")
    rule = INPUT_AXES.get(own)
    found = rule(layer, own, shapes) if rule else None
    if found is None:
        problem = f"parameter {name!r} has {rank} axes, and its name does not tell which are inputs"
        remedy = f"name them with axes={{{name!r}: (...)}}, or () to leave it uncentred"
        raise InputError(f"{problem}: {remedy}")
    return found


def _centred(grad: Any, axes: Axes) -> Any:
    if not axes or not grad.size:
        return grad
    wide = grad.astype("float32") if grad.dtype in ("float16", "bfloat16") else grad
    return (wide - wide.mean(axes, keepdims=True)).astype(grad.dtype)
