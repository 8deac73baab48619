"""The optax transform: axes of Flax and Haiku, and what torch gives on transposed weights.

What needs jax is slow, because loading and compiling take seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedzmg.optim.jax as adapter
from fedzmg.errors import InputError
from fedzmg.optim import ZeroMeanSGD
from fedzmg.optim.jax import input_axes, zero_mean
from golden_problems import GOLDEN

TENSORS = GOLDEN["algorithms"]["projection_tensors"]
MISSING = [m for m in ("jax", "optax") if importlib.util.find_spec(m) is None]
needs_jax = pytest.mark.skipif(
    bool(MISSING), reason=f"{MISSING} not installed: pip install 'fedzmg[optax]'"
)


def needs(module: str) -> Any:
    return pytest.importorskip(module, reason=f"{module} is not installed")


def test_without_jax_it_imports_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("jax", "jax.tree_util", "optax"):
        monkeypatch.setitem(sys.modules, module, None)
    importlib.reload(adapter)
    with pytest.raises(InputError, match=r"not installed: pip install 'fedzmg\[optax\]'"):
        adapter.zero_mean()


STACK = {f"a/{name}/kernel": (5, 6, 6) for name in ("query", "key", "out")}
SQUARE = {f"a/{name}/kernel": (6, 6, 6) for name in ("query", "key", "out")}


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        ({"Dense_0/kernel": (3, 4)}, (0,)),
        ({"kernel": (3, 4)}, (0,)),
        ({"block/conv_init/kernel": (3, 3, 2, 4)}, (0, 1, 2)),
        ({"Conv_1/kernel": (3, 2, 4)}, (0, 1)),
        ({"conv1/kernel": (3, 2, 4)}, (0, 1)),
        ({"ConvTranspose_0/kernel": (3, 3, 2, 4)}, (0, 1, 2)),
        ({"conv2_d_transpose_1/w": (3, 3, 4, 2)}, (0, 1, 3)),
        ({"linear/w": (3, 4)}, (0,)),
        ({"ScanBlock_0/Dense_0/bias": (2, 3)}, ()),
        # Unknown: a general layer, a stack of layers, something with an order of its own.
        ({"proj/kernel": (5, 4, 3)}, None),
        ({"kernel": (5, 4, 3)}, None),
        ({"Dense_0/kernel": (2, 5, 3)}, None),
        ({"ScanBlock_0/Conv_0/kernel": (2, 3, 5, 4)}, None),
        ({"VmapConv_0/kernel": (2, 3, 5, 4)}, None),
        ({"__layer_stack_no_per_layer/block/conv1_d/w": (2, 3, 5, 4)}, None),
        ({"linear/w": (2, 3, 4)}, None),
        ({"Embed_0/embedding": (2, 9, 4)}, None),
        ({"ConvLocal_0/kernel": (7, 6, 4)}, None),
        ({"Einsum_0/kernel": (3, 4)}, None),
        ({"query/kernel": (5, 4, 3)}, None),
        # A bias shows which axes are outputs.
        ({"layers_0/kernel": (3, 3, 2, 4), "layers_0/bias": (4,)}, (0, 1, 2)),
        ({"conv/kernel": (5, 6, 4), "conv/bias": (4,)}, (0, 1)),
        ({"layers_0/kernel": (5, 4, 3), "layers_0/bias": (4, 3)}, None),
        ({"conv/kernel": (3, 3, 4, 2), "conv/bias": (4,)}, None),
        ({"conv/kernel": (2, 3, 5, 4), "conv/bias": (2, 4)}, None),
        # Attention is known by the shapes of its kernels, unlike stacks of matrices.
        ({"a/query/kernel": (6, 2, 3), "a/out/kernel": (2, 3, 6)}, (0,)),
        ({"a/out/kernel": (2, 3, 6), "a/query/kernel": (6, 2, 3)}, (0, 1)),
        (STACK, None),
        (SQUARE | {"a/out/bias": (6, 6)}, None),
    ],
)  # fmt: skip
def test_axes_follow_from_names_and_shapes_or_are_asked_for(shapes: Any, axes: Any) -> None:
    """The first parameter's axes; the others are its neighbours."""
    name = next(iter(shapes))
    if axes is not None:
        assert adapter._by_name(name, shapes) == axes
        return
    with pytest.raises(InputError, match=rf"'{name}' .*axes="):
        adapter._by_name(name, shapes)


def projected(grads: Any, axes: Any = None) -> Any:
    transform = zero_mean(axes)
    return transform.update(grads, transform.init(grads))[0]


@pytest.mark.slow
@needs_jax
@pytest.mark.parametrize("name", TENSORS)
def test_golden_tensors(name: str) -> None:
    entry = TENSORS[name]
    grad = np.reshape(np.array(entry["grad"], np.float32), entry["shape"])
    axes = tuple(entry["axes"]) if "axes" in entry else (entry["axis"],)
    found = projected({"x": grad}, {"x": axes})["x"]
    expected = np.reshape(entry["projected"], entry["shape"])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@needs_jax
def test_layers_of_flax() -> None:
    linen, jax = needs("flax.linen"), needs("jax")

    class Everything(linen.Module):
        @linen.compact
        def __call__(self, x: Any, tokens: Any) -> Any:
            words = linen.Embed(11, 6)(tokens)
            words = linen.MultiHeadDotProductAttention(num_heads=2)(words)
            linen.RNN(linen.GRUCell(4))(linen.LayerNorm()(words))
            linen.Conv(5, (2,))(words)
            x = linen.Conv(8, (3, 3))(x)
            x = linen.Conv(8, (3, 3), feature_group_count=4)(x)
            return linen.Dense(3)(linen.ConvTranspose(4, (3, 3))(x))

    tokens = np.zeros((2, 5), int)
    params = Everything().init(jax.random.key(0), np.ones((2, 8, 8, 1)), tokens)
    found = {k.removeprefix("params/"): a for k, a in input_axes(params).items() if a}
    attention = "MultiHeadDotProductAttention_0"
    cell = [f"GRUCell_0/{gate}/kernel" for gate in ("hn", "hr", "hz", "in", "ir", "iz")]
    assert found == {
        "Embed_0/embedding": (0,),
        f"{attention}/query/kernel": (0,),
        f"{attention}/key/kernel": (0,),
        f"{attention}/value/kernel": (0,),
        f"{attention}/out/kernel": (0, 1),
        "Conv_0/kernel": (0, 1),
        "Conv_1/kernel": (0, 1, 2),
        "Conv_2/kernel": (0, 1, 2),
        "ConvTranspose_0/kernel": (0, 1, 2),
        "Dense_0/kernel": (0,),
        **dict.fromkeys(cell, (0,)),
    }


@pytest.mark.slow
@needs_jax
def test_a_module_of_nnx_is_trained() -> None:
    nnx, optax = needs("flax.nnx"), needs("optax")

    class Two(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.value = nnx.Linear(3, 4, rngs=rngs)
            self.rest = nnx.List([nnx.Linear(4, 2, rngs=rngs)])

    model = Two()
    assert input_axes(nnx.state(model, nnx.Param)) == {
        "value/kernel": (0,), "value/bias": (), "rest/0/kernel": (0,), "rest/0/bias": (),
    }  # fmt: skip
    optimizer = nnx.Optimizer(model, optax.chain(zero_mean(), optax.sgd(0.1)), wrt=nnx.Param)
    before = model.value.kernel[...]
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    optimizer.update(model, nnx.grad(lambda m: m.value(x).sum())(model))
    after = model.value.kernel[...]
    np.testing.assert_allclose(after.sum(0), before.sum(0), rtol=0, atol=1e-6)
    # The gradient's columns are (3, 5, 7), so a step of 0.1 goes by (0.2, 0, -0.2).
    np.testing.assert_allclose(after - before, [[0.2] * 4, [0] * 4, [-0.2] * 4], atol=1e-6)


@pytest.mark.slow
@needs_jax
def test_layers_of_haiku() -> None:
    hk, jax = needs("haiku"), needs("jax")

    def everything(x: Any, tokens: Any) -> Any:
        words = hk.Embed(11, 6)(tokens)
        hk.GRU(4)(words[:, 0], np.zeros((2, 4)))
        hk.LayerNorm(-1, True, True)(words)
        hk.Bias(bias_dims=None)(words)
        x = hk.Conv2DTranspose(4, 3)(hk.Conv2D(8, 3)(x))
        return hk.Linear(3)(hk.Conv2DTranspose(5, 3)(x))

    args = np.ones((2, 8, 8, 1)), np.zeros((2, 5), int)
    params = hk.transform(everything).init(jax.random.key(0), *args)
    assert {k: a for k, a in input_axes(params).items() if a} == {
        "embed/embeddings": (0,),
        "gru/w_i": (0,),
        "gru/w_h": (0,),
        "conv2_d/w": (0, 1, 2),
        "conv2_d_transpose/w": (0, 1, 3),
        "conv2_d_transpose_1/w": (0, 1, 3),
        "linear/w": (0,),
    }


@pytest.mark.slow
@needs_jax
def test_ten_steps_are_those_of_torch_on_transposed_weights() -> None:
    jax, optax = needs("jax"), needs("optax")
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"conv": nn.Conv2d(3, 4, 2), "dense": nn.Linear(5, 6), "embed": nn.Embedding(7, 3)}
    )
    # (out, in, height, width) to (height, width, in, out), and (out, in) to (in, out)
    turn = {"conv.weight": (2, 3, 1, 0), "dense.weight": (1, 0)}
    names = {"weight": "kernel", "bias": "bias"}

    def in_flax(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, np.ndarray]]:
        found: dict[str, dict[str, np.ndarray]] = {}
        for name, tensor in tensors.items():
            layer, own = name.split(".")
            array = tensor.detach().numpy().copy()
            if name in turn:
                array = array.transpose(turn[name])
            found.setdefault(layer, {})["embedding" if layer == "embed" else names[own]] = array
        return found

    ours = ZeroMeanSGD(model, lr=0.1, momentum=0.9, weight_decay=0.01)
    theirs = optax.chain(
        zero_mean(),
        optax.trace(decay=0.9),
        optax.add_decayed_weights(0.01),
        optax.scale_by_learning_rate(0.1),
    )
    params = in_flax(dict(model.named_parameters()))
    state = theirs.init(params)
    step = jax.jit(theirs.update)
    for _ in range(10):
        grads = {name: torch.randn_like(p) + 1 for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.grad = grads[name]
        updates, state = step(in_flax(grads), state, params)
        params = optax.apply_updates(params, updates)
        ours.step()
    expected = in_flax(dict(model.named_parameters()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), params, expected)


@pytest.mark.slow
@needs_jax
def test_half_precision_masks_and_empty_arrays() -> None:
    jnp, optax = needs("jax.numpy"), needs("optax")
    # Both are neighbours in bfloat16: their mean lies between, and is none of its numbers.
    found = projected({"kernel": jnp.array([[1.0], [1.0078125]], jnp.bfloat16)})["kernel"]
    assert found.dtype == jnp.bfloat16
    assert found.tolist() == [[-0.00390625], [0.00390625]]
    assert projected({"kernel": jnp.zeros((0, 3))})["kernel"].shape == (0, 3)
    grads = {"a": {"kernel": jnp.ones((2, 2))}, "b": {"kernel": jnp.ones((2, 2))}}
    only = optax.masked(zero_mean(), {"a": {"kernel": True}, "b": {"kernel": False}})
    after = only.update(grads, only.init(grads))[0]
    assert not after["a"]["kernel"].any()
    assert after["b"]["kernel"].all()


@pytest.mark.slow
@needs_jax
def test_unknown_axes_are_rejected_before_training() -> None:
    grads = {"DenseGeneral_0": {"kernel": np.ones((2, 3, 4))}, "mine": {"matrix": np.ones((2, 3))}}
    with pytest.raises(InputError, match=r"'DenseGeneral_0/kernel' has 3 axes.*name them"):
        zero_mean().init(grads)
    given = {"DenseGeneral_0/kernel": (0,)}
    with pytest.raises(InputError, match="'mine/matrix' has 2 axes"):
        zero_mean(given).init(grads)
    found = projected(grads, {**given, "mine/matrix": ()})
    assert not found["DenseGeneral_0"]["kernel"].any()
    assert found["mine"]["matrix"].all()
    assert input_axes(grads, {**given, "mine/matrix": (-1,)})["mine/matrix"] == (1,)
    with pytest.raises(InputError, match="did you mean 'mine/matrix'"):
        zero_mean({**given, "mine/matrx": ()}).init(grads)
    with pytest.raises(InputError, match="'mine/matrix'"):
        zero_mean({**given, "mine/matrix": (2,)}).init(grads)
    with pytest.raises(InputError, match="named twice"):
        zero_mean({**given, "mine/matrix": (1, -1)}).init(grads)
