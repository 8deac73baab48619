"""``Tree``: named tensors that form a vector space.

A model's parameters, a gradient, a momentum buffer and a client's upload are all trees, so the
equations of an algorithm read as they are printed: ``params - lr * grad``. Names are part of the
value; combining trees with different names is an error, never a silent zip.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, TypeVar, final

import torch
from torch import Tensor
from torch._C._functorch import (  # type: ignore[attr-defined]
    _add_batch_dim,
    _remove_batch_dim,
    _set_vmap_fallback_warning_enabled,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
)
from torch._functorch.vmap import lazy_load_decompositions  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree

T = TypeVar("T")
Scalar: TypeAlias = float | Tensor  # A Python number or a 0-d tensor
State: TypeAlias = Any  # nested trees, tuples and tensors of constant structure, shapes and dtypes
ALIGNED = 16  # values that a CPU reads at once from a multiple of their size in memory
BLOCK = 1 << 17  # values of a tensor that stay in the cache of a CPU, beside those of others
Inputs: TypeAlias = Any  # a tensor, or tensors by argument of the model; first axis examples


def _operator(op: Callable[[Any, Any], Any]) -> Callable[[Tree, Tree | Scalar], Tree]:
    """Return an operator of a tree with another one, or with a number."""

    def combine(self: Tree, other: Tree | Scalar) -> Tree:
        if isinstance(other, Tree):
            return self.map(op, other)
        return Tree({name: op(leaf, other) for name, leaf in self.items()})

    return combine


_ADD, _SUBTRACT = _operator(operator.add), _operator(operator.sub)


@final
class Tree(Mapping[str, Tensor]):
    """An immutable mapping from names to tensors with ``+ - * / **`` and ``map``.

    A product with a number is computed when it is used, so do not change its factors in place.

    >>> w = Tree({"a": torch.ones(2)})
    >>> (w - 0.5 * w)["a"]
    tensor([0.5000, 0.5000])
    """

    __slots__ = ("_factor", "_own")

    def __init__(self, tensors: Mapping[str, Tensor], factor: Scalar | None = None) -> None:
        self._own, self._factor = dict(tensors), factor

    @property
    def _tensors(self) -> dict[str, Tensor]:
        # A product waits until it is used: a sum with it is one operation.
        if self._factor is not None:
            self._own = {name: leaf * self._factor for name, leaf in self._own.items()}
            self._factor = None
        return self._own

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def items(self) -> ItemsView[str, Tensor]:
        return self._tensors.items()

    def values(self) -> ValuesView[Tensor]:
        return self._tensors.values()

    def __repr__(self) -> str:
        shapes = ", ".join(f"{n}: {tuple(t.shape)}" for n, t in self._tensors.items())
        return f"Tree({shapes})"

    def map(self, function: Callable[..., Tensor], *others: Tree) -> Tree:
        """Apply ``function`` leaf by leaf to this tree and ``others`` (same names required)."""
        own, rest = self._tensors, [other._tensors for other in others]
        for tensors in rest:
            if tensors.keys() != own.keys():
                difference = sorted(tensors.keys() ^ own.keys())
                raise ValueError(f"trees have different names: {', '.join(difference)}")
        columns = [map(tensors.__getitem__, own) for tensors in rest]
        return Tree(dict(zip(own, map(function, own.values(), *columns), strict=True)))

    def __add__(self, other: Tree | Scalar) -> Tree:
        if self._factor is not None and isinstance(other, Tree) and other._factor is None:
            return other._add_product(self, 1)
        return self._add_product(other, 1)

    def __sub__(self, other: Tree | Scalar) -> Tree:
        return self._add_product(other, -1)

    def _add_product(self, other: Tree | Scalar, sign: int) -> Tree:
        if not isinstance(other, Tree) or (factor := other._factor) is None:
            return (_ADD if sign > 0 else _SUBTRACT)(self, other)

        def add(leaf: Tensor, more: Tensor) -> Tensor:
            kinds = {leaf.dtype, more.dtype, getattr(factor, "dtype", leaf.dtype)}
            if len(kinds) > 1 or not leaf.is_floating_point():
                return leaf + more * factor if sign > 0 else leaf - more * factor
            if isinstance(factor, Tensor):
                return torch.addcmul(leaf, more, factor, value=sign)
            return torch.add(leaf, more, alpha=sign * factor)

        return self.map(add, Tree(other._own))

    def __mul__(self, other: Tree | Scalar) -> Tree:
        if isinstance(other, Tree):
            return self.map(operator.mul, other)
        return NotImplemented if other is None else Tree(self._tensors, other)

    __radd__, __rmul__ = __add__, __mul__
    __rsub__ = _operator(lambda leaf, scalar: scalar - leaf)
    __truediv__ = _operator(operator.truediv)
    __rtruediv__ = _operator(lambda leaf, scalar: scalar / leaf)
    __pow__ = _operator(operator.pow)

    # Tensors have no single truth value, so trees compare as objects do.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __neg__(self) -> Tree:
        return self.map(operator.neg)

    def sqrt(self) -> Tree:
        """Return the element-wise square root."""
        return self.map(torch.sqrt)

    def sign(self) -> Tree:
        """Return the element-wise sign; the sign of zero is zero."""
        return self.map(torch.sign)

    def zeros(self) -> Tree:
        """Return a tree of zeros of the same names, shapes and types."""
        return self.map(torch.zeros_like)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: tuple[type, ...], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Let ``tensor * tree`` reach ``Tree``, in eager mode and under ``torch.compile``."""
        op = _REFLECTED.get(getattr(func, "__name__", ""))
        if op is None or kwargs or len(args) != 2:
            return NotImplemented
        left, right = args
        if isinstance(right, Tree):  # tensor OP tree
            if op is operator.mul:
                return Tree(right._tensors, left)
            return Tree({name: op(left, leaf) for name, leaf in right.items()})
        return Tree({name: op(leaf, right) for name, leaf in left.items()})


_REFLECTED: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("add", "__add__"), operator.add),
    **dict.fromkeys(("sub", "__sub__"), operator.sub),
    **dict.fromkeys(("mul", "__mul__"), operator.mul),
    **dict.fromkeys(("div", "__truediv__", "true_divide"), operator.truediv),
    "__radd__": lambda a, b: b + a, "__rsub__": lambda a, b: b - a,
    "__rmul__": lambda a, b: b * a, "__rdiv__": lambda a, b: b / a,
}  # fmt: skip


pytree.register_pytree_node(
    Tree,
    lambda tree: (list(tree.values()), tuple(tree)),
    lambda leaves, names: Tree(dict(zip(names, leaves, strict=True))),
    serialized_type_name="fedzmg.Tree",
    flatten_with_keys_fn=lambda tree: (
        [(pytree.MappingKey(name), leaf) for name, leaf in tree.items()],
        tuple(tree),
    ),
)


def tree_map(function: Callable[..., Any], value: T, *others: Any) -> T:
    """Apply ``function`` to every tensor of nested trees, tuples, lists and dicts."""
    found: Any = value
    if type(value) is Tree:  # the fastest check
        found = found.map(function, *others)
    elif isinstance(value, tuple | list):
        parts = [tree_map(function, *same) for same in zip(value, *others, strict=True)]
        found = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif isinstance(value, dict):
        found = {n: tree_map(function, v, *[o[n] for o in others]) for n, v in value.items()}
    else:
        found = function(value, *others)
    mapped: T = found
    return mapped


def vmap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Map a function over the first axis of all tensors, as :func:`torch.vmap` does.

    It leaves out checks and a slow walk through arguments, which cost as much as a small model.
    """
    plain = torch.vmap(function)

    def mapped(*args: Any) -> Any:
        first = next(iter(leaves(args)), None)
        if first is None or torch.compiler.is_compiling():
            return plain(*args)
        size = len(first)
        lazy_load_decompositions()
        level = _vmap_increment_nesting(size, "error")
        try:
            _set_vmap_fallback_warning_enabled(False)  # of slow operations, which auto measures
            found = function(*tree_map(lambda leaf: _add_batch_dim(leaf, 0, level), args))
            return tree_map(lambda leaf: _remove_batch_dim(leaf, level, size, 0), found)
        finally:
            _vmap_decrement_nesting()
            _set_vmap_fallback_warning_enabled(level == 1)  # again, after the outermost map

    return mapped


def map_trees(function: Callable[[Tree], Tree], value: Any) -> Any:
    """Apply ``function`` to every tree of nested tuples and named tuples."""
    if isinstance(value, Tree):
        return function(value)
    if isinstance(value, tuple):
        parts = [map_trees(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def leaves(value: Any) -> list[Tensor]:
    """Return every tensor of nested trees, tuples, lists and dicts, in a fixed order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if type(value) is Tree:
        found.extend(value._tensors.values())
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            _collect(part, found)
    else:
        found.append(value)


def add_scaled(base: Tree, scale: Scalar, other: Tree, *out: Tree) -> Tree:
    """Compute ``base + scale * other``; in the tensors of ``out``, if given."""
    if not out:
        return base + scale * other
    [place], own = out, [*base._tensors.values()]
    rest, there = ([*map(tree._tensors.__getitem__, base)] for tree in (other, place))
    if isinstance(scale, Tensor) and not scale.is_cpu:  # ``float`` would wait for the device
        rest, scale = list(torch._foreach_mul(rest, scale)), 1.0
    alpha = float(scale)
    if place is base:
        torch._foreach_add_(own, rest, alpha=alpha)
    elif own[0].is_cpu:
        for leaf, more, to in zip(own, rest, there, strict=True):
            torch.add(leaf, more, alpha=alpha, out=to)
    elif place is other:
        torch._foreach_copy_(there, torch._foreach_add(own, rest, alpha=alpha))
    else:
        torch._foreach_copy_(there, own)
        torch._foreach_add_(there, rest, alpha=alpha)
    return place


def stack(values: list[T]) -> T:
    """Stack equal structures along a new first axis."""
    return tree_map(lambda *rows: torch.stack(rows), values[0], *values[1:])


def row(value: T, index: Any) -> T:
    """Take ``index`` along the first axis of every tensor."""
    return tree_map(lambda leaf: leaf[index], value)


class Flat(NamedTuple):
    """Structure, shapes and types of the tensors that flat rows were made of."""

    form: Any  # the structure, with nothing in place of tensors
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]


def flat_form(value: Any) -> Flat:
    """Describe stacked tensors."""
    tensors, form = leaves(value), tree_map(lambda _: None, value)
    return Flat(form, [t.shape[1:] for t in tensors], [t.dtype for t in tensors])


def flatten_rows(value: Any, like: Tensor | None = None) -> tuple[Tensor, Flat]:
    """Concatenate stacked tensors into one floating-point matrix with the same rows."""
    tensors, flat = leaves(value), flat_form(value)
    if not tensors:
        assert like is not None
        return like.new_zeros(len(like), 0), flat
    real = [t.dtype for t in tensors if t.is_floating_point()] or [torch.float32]
    dtype = functools.reduce(torch.promote_types, real)
    return torch.cat([t.reshape(len(t), -1).to(dtype) for t in tensors], 1), flat


def unflatten_rows(rows: Tensor, flat: Flat, *, exact: bool = False) -> Any:
    """Undo :func:`flatten_rows` for these rows; ``exact`` restores the types, too."""
    sizes = [shape.numel() for shape in flat.shapes]
    parts = torch.split(rows, sizes, 1) if sizes else ()
    shaped = [part.reshape(len(rows), *s) for part, s in zip(parts, flat.shapes, strict=True)]
    if exact:
        shaped = [part.to(dtype) for part, dtype in zip(shaped, flat.dtypes, strict=True)]
    rest = iter(shaped)
    return tree_map(lambda _: next(rest), flat.form)


def flat_parts(params: Tree) -> list[Tensor]:
    """Flatten tensors to parts that a cache holds; small tensors share one."""
    found: list[Tensor] = []
    for _, names in groupby(params, lambda name: name if params[name].numel() >= BLOCK else ""):
        run = [params[name].reshape(-1) for name in names]
        found += torch.split(run[0] if len(run) == 1 else torch.cat(run), BLOCK)
    return found


def rows_like(params: Tree, number: int) -> tuple[Tensor, Tree, list[Tree]]:
    """Make rows for tensors of one type, as one tree, and as leaves of autograd row by row."""
    form, like = flat_form(row(params, None)), next(iter(params.values()))
    width = sum(shape.numel() for shape in form.shapes)
    flat = like.new_empty(number, -(-width // ALIGNED) * ALIGNED)[:, :width]
    all_: Tree = unflatten_rows(flat, form)
    # Views of one tensor count changes together; ``data`` counts its own.
    return flat, all_, [all_.map(lambda t, i=i: t[i].data.requires_grad_()) for i in range(number)]


def named_leaves(value: Any) -> dict[str, Tensor]:
    """Return every tensor by a readable path such as ``.params['fc.weight']``, for checkpoints."""
    return {pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(value)}


def refill(value: Any, named: Mapping[str, Tensor]) -> Any:
    """Return the structure of ``value`` with the tensors of :func:`named_leaves`."""
    return pytree.tree_map_with_path(lambda path, _: named[pytree.keystr(path)], value)


def num_bytes(value: Any) -> int:
    """Count the bytes that the tensors of ``value`` would occupy in a message."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(value))
