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
    flatten_rows,
    leaves,
    named_leaves,
    num_bytes,
    refill,
    row,
    stack,
    tree_map,
    unflatten_rows,
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


def test_division_power_root_sign() -> None:
    four = Tree({"x": torch.tensor([4.0, 9.0])})
    assert values(four / 2) == {"x": [2.0, 4.5]}
    assert values(four / Tree({"x": torch.tensor([2.0, 3.0])})) == {"x": [2.0, 3.0]}
    assert values(four**2) == {"x": [16.0, 81.0]}
    assert values(four**0.5) == values(four.sqrt()) == {"x": [2.0, 3.0]}
    assert values(-four) == {"x": [-4.0, -9.0]}
    assert values(Tree({"x": torch.tensor([-3.0, 0.0, 2.0])}).sign()) == {"x": [-1.0, 0.0, 1.0]}


@pytest.mark.parametrize(
    ("op", "tensor_first", "tree_first"),
    [
        (operator.add, [5.0, 6.0], [5.0, 6.0]),
        (operator.sub, [3.0, 2.0], [-3.0, -2.0]),
        (operator.mul, [4.0, 8.0], [4.0, 8.0]),
        (operator.truediv, [4.0, 2.0], [0.25, 0.5]),
    ],
    ids=["add", "sub", "mul", "div"],
)
def test_a_scalar_tensor_works_on_either_side(
    op: Callable[[Any, Any], Any], tensor_first: list[float], tree_first: list[float]
) -> None:
    w, four = Tree({"x": torch.tensor([1.0, 2.0])}), torch.tensor(4.0)
    assert values(op(four, w)) == {"x": tensor_first}
    assert values(op(w, four)) == {"x": tree_first}
    mapped = torch.vmap(lambda s, t: op(s, t))(four.repeat(3), stack([w, w, w]))
    assert values(mapped) == {"x": [tensor_first] * 3}
    mapped = torch.vmap(lambda s, t: op(t, s))(four.repeat(3), stack([w, w, w]))
    assert values(mapped) == {"x": [tree_first] * 3}


def test_a_learning_rate_can_be_differentiated_through() -> None:
    rate = torch.tensor(0.5, requires_grad=True)
    w = Tree({"x": torch.tensor([1.0, 2.0])})
    (w - rate * w)["x"].sum().backward()
    assert rate.grad is not None
    assert rate.grad.item() == -3.0


def test_other_functions_do_not_take_trees() -> None:
    with pytest.raises(TypeError):
        torch.add(torch.tensor(1.0), Tree({"x": torch.ones(1)}), alpha=2)
    with pytest.raises(TypeError):
        torch.relu(Tree({"x": torch.ones(1)}))


# Names.


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.truediv])
def test_other_names_are_an_error(op: Callable[[Any, Any], Any]) -> None:
    left = Tree({"a": torch.ones(1), "b": torch.ones(1)})
    for right in (Tree({"a": torch.ones(1)}), Tree({"a": torch.ones(1), "c": torch.ones(1)})):
        with pytest.raises(ValueError, match="trees have different names: "):
            op(left, right)
    with pytest.raises(ValueError, match=r"^trees have different names: b, c$"):
        op(left, Tree({"a": torch.ones(1), "c": torch.ones(1)}))


def test_names_are_matched_not_zipped() -> None:
    left = Tree({"a": torch.tensor(1.0), "b": torch.tensor(2.0)})
    right = Tree({"b": torch.tensor(20.0), "a": torch.tensor(10.0)})
    assert values(left + right) == {"a": 11.0, "b": 22.0}
    assert list(left + right) == ["a", "b"]


def test_it_is_a_mapping_that_cannot_be_changed() -> None:
    source = {"a": torch.ones(2), "b": torch.zeros(1)}
    w = Tree(source)
    source["c"] = torch.ones(1)
    assert list(w) == list(w.keys()) == ["a", "b"]
    assert len(w) == 2
    assert "a" in w
    assert "c" not in w
    assert repr(w) == "Tree(a: (2,), b: (1,))"
    with pytest.raises(TypeError):
        w["a"] = torch.zeros(2)  # type: ignore[index]
    with pytest.raises(AttributeError):
        w.more = 1  # type: ignore[attr-defined]
    with pytest.raises(KeyError):
        w["c"]


@pytest.mark.parametrize("through", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies(through: Callable[[Tree], Tree]) -> None:
    w = Tree({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)})
    other = through(w)
    assert isinstance(other, Tree)
    assert values(other) == values(w)
    other["a"].zero_()
    assert values(w)["a"] == [1.0, 2.0]


def test_zeros_keep_shape_and_precision() -> None:
    w = Tree(
        {"a": torch.ones(2, 3, dtype=torch.float64), "b": torch.ones((), dtype=torch.bfloat16)}
    )
    zero = w.zeros()
    assert {n: (t.shape, t.dtype) for n, t in zero.items()} == {
        n: (t.shape, t.dtype) for n, t in w.items()
    }
    assert not any(bool(t.any()) for t in zero.values())


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


def test_leaves_in_a_fixed_order() -> None:
    assert [leaf.tolist() for leaf in leaves(nested())] == [[1.0, 2.0], 3, 4.0, [5.0]]
    assert leaves(()) == []


def test_stack_and_row_undo_each_other() -> None:
    many = stack([nested(), tree_map(lambda t: t + 1, nested()), nested()])
    assert many[0].first["a"].shape == (3, 2)
    assert values(row(many, 1)[0].first) == {"a": [2.0, 3.0], "b": 4}
    assert values(row(many, [2, 1])[0].first) == {"a": [[1.0, 2.0], [2.0, 3.0]], "b": [3, 4]}
    assert row(many, slice(1, None))[2][0].tolist() == [[6.0], [5.0]]
    assert row((), 0) == stack([(), ()]) == ()


def test_named_leaves_and_refill_undo_each_other() -> None:
    value = nested()
    named = named_leaves(value)
    assert len(named) == 4
    assert any("'a'" in path for path in named)
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


def test_names_that_look_alike_keep_apart() -> None:
    value = (Tree({"a.b": torch.tensor(1.0)}), Tree({"a": torch.tensor(2.0)}))
    named = named_leaves(value)
    assert len(named) == 2
    assert [leaf.item() for leaf in leaves(refill(value, named))] == [1.0, 2.0]


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


def test_flat_rows_of_nothing() -> None:
    flat, how = flatten_rows(((), ()), like=torch.ones(3))
    assert flat.shape == (3, 0)
    assert unflatten_rows(flat, how) == ((), ())


def test_num_bytes() -> None:
    value = (
        Tree({"a": torch.ones(2, 3), "b": torch.ones(5, dtype=torch.float64)}),
        (),
        torch.ones((), dtype=torch.int64),
        torch.ones(7, dtype=torch.bool),
    )
    assert num_bytes(value) == 6 * 4 + 5 * 8 + 8 + 7
    assert num_bytes(()) == 0
