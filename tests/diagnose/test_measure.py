"""Measurements of gradients against plain NumPy, pair by pair, and their invariances."""

from __future__ import annotations

import itertools
from dataclasses import astuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedzmg.diagnose.measure import Measurement, measure
from fedzmg.models.layout import layout_of
from fedzmg.tree import Tree

NET = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3, bias=False))
LAYOUT = layout_of(NET)


def random_gradients(seed: int, clients: int, mean: float = 0.5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {name: tuple(p.shape) for name, p in NET.named_parameters()}
    return {name: rng.normal(size=(clients, *s)) + mean for name, s in shapes.items()}


def tree(gradients: dict[str, np.ndarray]) -> Tree:
    return Tree({name: torch.from_numpy(leaf.copy()) for name, leaf in gradients.items()})


def of(gradients: dict[str, np.ndarray], weights: np.ndarray) -> Measurement:
    return measure([(tree(gradients), weights)], LAYOUT)


def projected(g: np.ndarray) -> np.ndarray:
    return g - g.mean(-1, keepdims=True)


def pair_distance(g: np.ndarray) -> float:
    return float(np.mean([((a - b) ** 2).sum() for a, b in itertools.combinations(g, 2)]))


def test_every_number_agrees_with_loops_over_clients_and_pairs() -> None:
    gradients, weights = random_gradients(0, 7), np.arange(1.0, 8.0)
    found = of(gradients, weights)
    assert [layer.name for layer in found.layers] == ["0.weight", "1.weight"]
    every = sum((leaf**2).sum() for leaf in gradients.values())
    # The whole model counts biases, too, and concatenates all leaves.
    for layer, names in ((found.layers[0], ["0.weight"]), (found.whole, list(gradients))):
        leaves = [gradients[name] for name in names]
        lefts = [projected(gradients[n]) if "weight" in n else gradients[n] for n in names]
        g, left = (
            np.concatenate([one.reshape(7, -1) for one in own], 1) for own in (leaves, lefts)
        )
        shares = 1 - (left**2).sum(1) / (g**2).sum(1)
        assert np.allclose(layer.shares, shares, rtol=1e-12)
        expected = (np.mean(shares), np.std(shares, ddof=1), min(shares), max(shares))
        assert astuple(layer.share) == pytest.approx(expected, rel=1e-12)
        assert astuple(layer.distance) == pytest.approx((pair_distance(g), pair_distance(left)))
        diversity = [7 * (one**2).sum() / (one.sum(0) ** 2).sum() for one in (g, left)]
        assert astuple(layer.diversity) == pytest.approx(diversity)
        loss, kept = (np.average(one, axis=0, weights=weights) for one in (g, left))
        assert layer.forbidden == pytest.approx(1 - (kept**2).sum() / (loss**2).sum())
        assert layer.energy == pytest.approx((g**2).sum() / every)
        assert layer.parameters == g.shape[1]
    # The bias's part by least squares over all units of all clients.
    g, beta = gradients["0.weight"], gradients["0.bias"]
    means, loss = g.mean(-1), np.average(g, axis=0, weights=weights)
    slope = np.linalg.lstsq(beta.reshape(-1, 1), means.reshape(-1), rcond=None)[0][0]
    rest = loss.mean(-1) - slope * np.average(beta, axis=0, weights=weights)
    lost = 5 * min((rest**2).sum(), (loss.mean(-1) ** 2).sum()) / (loss**2).sum()
    assert found.layers[0].lost == pytest.approx(lost)
    assert (found.layers[0].inputs, found.layers[0].kind) == (5, "Linear")


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(2, 6), st.floats(-3, 3), st.floats(0.01, 100))
def test_identity_bounds_and_invariances(seed: int, clients: int, mean: float, by: float) -> None:
    gradients, weights = random_gradients(seed, clients, mean), np.ones(clients)
    found = of(gradients, weights)
    scaled = of({name: by * leaf for name, leaf in gradients.items()}, 3 * weights)
    order = np.random.default_rng(seed).permutation(clients)
    mixed = of({name: leaf[order] for name, leaf in gradients.items()}, weights)
    for one, two, three in zip(
        (*found.layers, found.whole), (*scaled.layers, scaled.whole), (*mixed.layers, mixed.whole),
        strict=True,
    ):  # fmt: skip
        assert one.distance.kept is not None
        assert one.distance.kept <= 1 + 1e-12  # the projection never expands
        assert all(share is not None and 0 <= share <= 1 for share in one.shares)
        assert 0 <= one.lost <= one.forbidden + 1e-15 <= 1 + 1e-12  # type: ignore[operator]
        assert min(astuple(one.diversity)) >= 1 - 1e-12
        for other in (two, three):
            assert other.share.mean == pytest.approx(one.share.mean, rel=1e-9)
            assert other.lost == pytest.approx(one.lost, rel=1e-6, abs=1e-12)
            assert astuple(other.diversity) == pytest.approx(astuple(one.diversity), rel=1e-9)


def test_undefined_numbers_are_none_and_never_nan() -> None:
    nothing = {name: np.zeros((1, *p.shape)) for name, p in NET.named_parameters()}
    whole = of(nothing, np.ones(1)).whole
    assert astuple(whole.share) == (None, None, None, None)
    assert whole.forbidden is whole.lost is whole.energy is None
    assert astuple(whole.distance) == astuple(whole.diversity) == (None, None)
    # Opposite clients: the averaged gradient is zero, diversity has no finite value.
    one = random_gradients(6, 1)
    both = {name: np.concatenate([leaf, -leaf]) for name, leaf in one.items()}
    found = of(both, np.ones(2)).whole
    assert astuple(found.diversity) == (None, None)
    assert found.forbidden is None
    assert found.distance.before == pytest.approx(4 * sum((v**2).sum() for v in one.values()))


def test_a_bias_replaces_the_mean_of_inputs_with_a_constant_mean() -> None:
    rng = np.random.default_rng(7)
    x, delta = rng.normal(size=(6, 30, 5)), rng.normal(size=(6, 30, 4))
    x += 2.0 - x.mean(-1, keepdims=True)  # every example has the mean 2
    gradients = random_gradients(8, 6)
    gradients["0.weight"] = np.einsum("keo,kei->koi", delta, x) / 30
    gradients["0.bias"] = delta.mean(1)
    found = of(gradients, np.ones(6)).layers[0]
    assert found.forbidden is not None
    assert found.forbidden > 0.5
    assert found.lost == pytest.approx(0, abs=1e-20)


def test_axes_follow_the_role_of_a_parameter() -> None:
    model = nn.ModuleDict(
        {"table": nn.Embedding(6, 3), "up": nn.ConvTranspose2d(2, 3, 2), "norm": nn.LayerNorm(3)}
    )
    rng = np.random.default_rng(9)
    g = {name: rng.normal(size=(3, *p.shape)) for name, p in model.named_parameters()}
    found = {one.name: one for one in measure([(tree(g), np.ones(3))], layout_of(model)).layers}
    assert set(found) == {"table.weight", "up.weight"}
    assert (found["table.weight"].inputs, found["up.weight"].inputs) == (6, 8)
    table, up = g["table.weight"], g["up.weight"]
    assert found["table.weight"].shares[0] == pytest.approx(
        6 * (table[0].mean(0) ** 2).sum() / (table[0] ** 2).sum()
    )
    assert found["up.weight"].shares[1] == pytest.approx(
        8 * (up[1].mean((0, 2, 3)) ** 2).sum() / (up[1] ** 2).sum()
    )
    assert found["table.weight"].lost == 0
