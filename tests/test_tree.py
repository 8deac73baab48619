"""Trees as a vector space whose elements carry names."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedzmg.tree import (
    Tree,
    add_scaled,
    flatten_rows,
    leaves,
    named_leaves,
    num_bytes,
    refill,
    row,
    stack,
    tree_map,
    unflatten_rows,
    vmap,
)

numbers = st.floats(-100, 100).map(lambda v: round(v, 3))
vectors = st.lists(numbers, min_size=2, max_size=2)


def tree(a: list[float], b: list[float]) -> Tree:
    return Tree({n: torch.tensor(v, dtype=torch.float64) for n, v in {"a": a, "b.c": [b]}.items()})


trees = st.builds(tree, vectors, vectors)


def values(value: Tree) -> dict[str, Any]:
    return {name: leaf.tolist() for name, leaf in value.items()}


def close(left: Tree, right: Tree) -> None:
    assert list(left) == list(right)
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-9, atol=1e-9)


# The axioms of a vector space.


@given(trees, trees, trees, numbers, numbers)
def test_vector_space(u: Tree, v: Tree, w: Tree, a: float, b: float) -> None:
    close(u + v, v + u)
    close((u + v) + w, u + (v + w))
    close(u + u.zeros(), u)
    close(u - u, u.zeros())
    close(u + (-u), u.zeros())
    close(1 * u, u)
    close(a * (b * u), (a * b) * u)
    close(a * (u + v), a * u + a * v)
    close((a + b) * u, a * u + b * u)
    close(u - v, u + (-1) * v)


@given(trees, trees, numbers, numbers, st.booleans())
def test_products_wait_for_their_sum(u: Tree, v: Tree, a: Any, b: Any, tensors: bool) -> None:
    if tensors:
        a, b = torch.tensor([a, b], dtype=torch.float64)
    product = a * u
    close(v - product, u.map(lambda x, y: y - x * a, v))
    close(product + v, u.map(lambda x, y: x * a + y, v))
    close(product - v, u.map(lambda x, y: x * a - y, v))
    close(product + b * v, u.map(lambda x, y: x * a + y * b, v))
    close(product + b, u.map(lambda x: x * a + b))
    close(b * product, u.map(lambda x: x * a * b))
    close(product, u.map(lambda x: x * a))


def test_products_of_other_types_promote_as_tensors_do() -> None:
    one, whole = Tree({"a": torch.ones(2)}), Tree({"a": torch.arange(2)})
    for left, factor, right in (
        (whole, 0.5, whole), (one, torch.tensor(0.5, dtype=torch.float64), one), (one, 2, whole),
    ):  # fmt: skip
        found, expected = (left - factor * right)["a"], left["a"] - factor * right["a"]
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()
    with pytest.raises(TypeError):
        _ = one * None  # type: ignore[operator]


def test_products_compile_into_one_graph() -> None:
    def step(rate: Tensor, w: Tensor, v: Tensor) -> Tensor:
        weights, moved = Tree({"a": w}), Tree({"a": v})
        return (weights - rate * (0.9 * moved + weights * rate))["a"]

    inputs = torch.tensor(0.1), torch.ones(3), torch.arange(3.0)
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), step(*inputs))


@given(vectors, vectors, numbers)
def test_operations_are_element_wise(a: list[float], b: list[float], c: float) -> None:
    left = Tree({"x": torch.tensor(a, dtype=torch.float64)})
    right = Tree({"x": torch.tensor(b, dtype=torch.float64)})
    pairs = list(zip(a, b, strict=True))
    assert values(left + right)["x"] == [p + q for p, q in pairs]
    assert values(left - right)["x"] == [p - q for p, q in pairs]
    assert values(left * right)["x"] == [p * q for p, q in pairs]
    assert values(left + c)["x"] == [p + c for p in a]
    assert values(c + left)["x"] == [c + p for p in a]
    assert values(left - c)["x"] == [p - c for p in a]
    assert values(c - left)["x"] == [c - p for p in a]
    assert values(left * c)["x"] == values(c * left)["x"] == [p * c for p in a]


OPERATIONS = [operator.add, operator.sub, operator.mul, operator.truediv]


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_scalar_tensor_works_on_either_side(op: Callable[[Any, Any], Any]) -> None:
    w, four = Tree({"x": torch.tensor([1.0, 2.0])}), torch.tensor(4.0)
    for function in (op, lambda s, t: op(t, s)):
        expected = function(four, w["x"]).tolist()
        assert values(function(four, w)) == {"x": expected}
        mapped = torch.vmap(function)(four.repeat(3), stack([w, w, w]))
        assert values(mapped) == {"x": [expected] * 3}


# Names.


@pytest.mark.parametrize("op", OPERATIONS)
def test_other_names_are_an_error(op: Callable[[Any, Any], Any]) -> None:
    left = Tree({"a": torch.ones(1), "b": torch.ones(1)})
    for names, different in (("a", "b"), ("ac", "b, c")):
        with pytest.raises(ValueError, match=f": {different}$"):
            op(left, Tree({name: torch.ones(1) for name in names}))


def test_names_are_matched_not_zipped() -> None:
    left = Tree({"a": torch.tensor(1.0), "b": torch.tensor(2.0)})
    right = Tree({"b": torch.tensor(20.0), "a": torch.tensor(10.0)})
    assert values(left + right) == {"a": 11.0, "b": 22.0}
    assert list(left + right) == ["a", "b"]


@pytest.mark.parametrize("through", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies(through: Callable[[Tree], Tree]) -> None:
    w = Tree({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)})
    other = through(w)
    assert isinstance(other, Tree)
    assert values(other) == values(w)
    other["a"].zero_()
    assert values(w)["a"] == [1.0, 2.0]


# Nested values.


class Pair(NamedTuple):
    first: Tree
    second: Tensor


def nested() -> tuple[Pair, tuple[()], list[Tensor]]:
    return (
        Pair(Tree({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3)}), torch.tensor(4.0)),
        (),
        [torch.tensor([5.0])],
    )


def test_tree_map_keeps_the_structure() -> None:
    doubled = tree_map(lambda t: t * 2, nested())
    assert type(doubled[0]) is Pair
    assert values(doubled[0].first) == {"a": [2.0, 4.0], "b": 6}
    assert doubled[1] == ()
    added = tree_map(operator.add, nested(), nested())
    assert values(added[0].first) == values(doubled[0].first)
    assert added[2][0].tolist() == [10.0]


def test_stack_and_row_undo_each_other() -> None:
    many = stack([nested(), tree_map(lambda t: t + 1, nested()), nested()])
    assert many[0].first["a"].shape == (3, 2)
    assert values(row(many, 1)[0].first) == {"a": [2.0, 3.0], "b": 4}
    assert values(row(many, [2, 1])[0].first) == {"a": [[1.0, 2.0], [2.0, 3.0]], "b": [3, 4]}
    assert row(many, slice(1, None))[2][0].tolist() == [[6.0], [5.0]]
    assert row((), 0) == stack([(), ()]) == ()


def test_vmap_is_torchs_own() -> None:
    many = stack([nested(), tree_map(lambda t: t + 1, nested()), nested()])
    numbers = {"lr": torch.tensor([1.0, 2.0, 3.0])}

    def one(own: dict[str, Tensor], value: Any) -> tuple[Any, Tensor]:
        inner = vmap(lambda x, y: x * y)(value[0].first["a"], value[0].first["a"])
        return tree_map(lambda t: own["lr"] * t.sum() + inner.sum(), value), torch.ones(2)

    found, expected = vmap(one)(numbers, many), torch.vmap(one)(numbers, many)
    assert type(found[0][0]) is Pair
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        assert torch.equal(a, b)
    x = torch.randn(3, 4, requires_grad=True)
    [slope] = torch.autograd.grad(vmap(lambda row: (row**2).sum())(x).sum(), x)
    assert torch.equal(slope, 2 * x)


@pytest.mark.parametrize("wrong", [torch.rand_like, lambda x: x.item()])
def test_vmap_refuses_the_same_and_leaves_nothing_behind(wrong: Callable[..., Any]) -> None:
    for mapped in (torch.vmap(wrong), vmap(wrong)):
        with pytest.raises(RuntimeError):
            mapped(torch.ones(3))
    assert torch.rand(2).shape == (2,)  # an open map would refuse random numbers


def test_named_leaves_and_refill_undo_each_other() -> None:
    value = nested()
    named = named_leaves(value)
    blank = tree_map(torch.zeros_like, value)
    filled = refill(blank, named)
    assert type(filled[0]) is Pair
    assert [leaf.tolist() for leaf in leaves(filled)] == [leaf.tolist() for leaf in leaves(value)]
    assert not any(bool(leaf.any()) for leaf in leaves(blank))


def test_paths_of_a_checkpoint_are_frozen() -> None:
    """Stored runs name their tensors so; another spelling could not be resumed."""
    assert list(named_leaves(Pair(Tree({"fc.weight": torch.ones(1)}), torch.ones(1)))) == [
        ".first['fc.weight']",
        ".second",
    ]
    assert list(named_leaves((Tree({"w": torch.ones(1)}), (), torch.ones(1)))) == [
        "[0]['w']",
        "[2]",
    ]


def test_flat_rows_hold_every_number_of_a_row() -> None:
    many = stack([nested(), tree_map(lambda t: t * 10, nested())])
    flat, how = flatten_rows(many)
    assert flat.tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0], [10.0, 20.0, 30.0, 40.0, 50.0]]
    sums = unflatten_rows(flat.sum(0, keepdim=True), how)
    assert type(sums[0]) is Pair
    assert values(sums[0].first) == {"a": [[11.0, 22.0]], "b": [33.0]}
    assert sums[0].second.tolist() == [44.0]
    assert sums[1] == ()
    assert sums[2][0].tolist() == [[55.0]]


def test_num_bytes() -> None:
    value = (
        Tree({"a": torch.ones(2, 3), "b": torch.ones(5, dtype=torch.float64)}),
        (),
        torch.ones((), dtype=torch.int64),
        torch.ones(7, dtype=torch.bool),
    )
    assert num_bytes(value) == 6 * 4 + 5 * 8 + 8 + 7
    assert num_bytes(()) == 0


class OnLists(Tensor):
    """A tensor that takes the path of a GPU, where a tree is one list."""

    is_cpu = False


@pytest.mark.parametrize("kind", [Tensor, OnLists])
@pytest.mark.parametrize("scale", [0.9, torch.tensor(0.9)])
@pytest.mark.parametrize("where", range(3))
def test_scaled_sums_may_overwrite_what_they_add(kind: Any, scale: Any, where: int) -> None:
    trees = [Tree({name: torch.randn(3).as_subclass(kind) for name in "ab"}) for _ in range(3)]
    base, other = (tree.map(torch.clone) for tree in trees[:2])
    assert add_scaled(trees[0], scale, trees[1], trees[where]) is trees[where]
    for name, leaf in (base + 0.9 * other).items():
        torch.testing.assert_close(trees[where][name], leaf)
