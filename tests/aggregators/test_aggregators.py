"""Aggregators: golden numbers, byzfl as an oracle, invariances and robustness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedzmg import Federation, InputError
from fedzmg.aggregators import AGGREGATORS, build, get, rows, table_of
from fedzmg.contract import Aggregator, numbers
from fedzmg.messages import Rows
from fedzmg.tree import Tree

GOLDEN = Path(__file__).parents[1] / "golden"
NUMBERS = json.loads((GOLDEN / "aggregators.json").read_text())
BYZFL = json.loads((GOLDEN / "byzfl.json").read_text())
CLIP = {"name": "centred_clipping", "start": "zero"}


def matrix(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def merge(table: dict[str, Any], deltas: Tensor, weights: Any = None, state: Any = None) -> Any:
    """Aggregate mapped over one trial, as in a simulation."""
    rule = build(table)
    own = torch.ones(len(deltas)) if weights is None else torch.as_tensor(weights)
    before = rule.init(Tree({"w": deltas[0]})) if state is None else state

    def once(given: Tensor, shares: Tensor) -> Any:
        return rule.aggregate(Rows(given, shares), before)

    with torch.no_grad():
        found, after = torch.vmap(once)(deltas[None], own.double()[None])
    return found[0], after


@pytest.mark.parametrize("name", ["aggregators_7x4", "aggregators_12x3"])
def test_golden_numbers(name: str) -> None:
    case = NUMBERS[name]
    x, f = matrix(case["input"]), case["f"]
    krum = {"name": "krum", "byzantine": f}
    many = {"name": "multi_krum", "byzantine": f}
    wide, geometric = {"neighbours": "n-f-1"}, {"name": "geometric_median"}
    bulyan, bound = {"name": "bulyan", "byzantine": f}, {"name": "norm_bound", "weighted": True}
    median = {"name": "norm_bound", "bound": "median"}
    fixed = {**bound, "bound": "fixed", "norm": 1.0}
    pairs: list[tuple[dict[str, Any], Any]] = [
        ({"name": "mean"}, case["weighted_mean"]),
        ({"name": "median"}, case["median"]),
        ({"name": "median", "weighted": True}, case["weighted_median"]),
        ({"name": "trimmed_mean", "byzantine": f}, case["trimmed_mean"]),
        ({"name": "trimmed_mean", "fraction": (f + 0.5) / len(x)}, case["trimmed_mean"]),
        ({"name": "trimmed_mean", "byzantine": 0}, case["mean"]),
        (krum, case["krum"]["out"]),
        (krum | wide, case["multi_krum_neighbours_n-f-1"]["krum_out"]),
        (many, case["multi_krum_m_n-f"]["out"]),
        (many | {"selected": len(x) - f - 2}, case["multi_krum_m_n-f-2"]["out"]),
        (many | wide, case["multi_krum_neighbours_n-f-1"]["out"]),
        (bulyan, case["bulyan_iterative"]["out"]),
        (bulyan | {"one_shot": True}, case["bulyan_one_shot"]["out"]),
        (geometric, case["geometric_median_mean_start_nu1e-6_T3"]["out"]),
        (geometric | {"weighted": True}, case["geometric_median_weighted_nu1e-6_T3"]["out"]),
        (geometric | {"start": "zero", "nu": 0.1}, case["geometric_median_zero_start_nu0.1_T3"]),
        (CLIP | {"tau": 1.0}, case["centred_clipping_zero_tau1_L1"]),
        (CLIP | {"tau": 1.0, "iterations": 3}, case["centred_clipping_zero_tau1_L3"]),
        (
            {"name": "centred_clipping", "start": "median", "tau": 0.5, "iterations": 5},
            case["centred_clipping_median_tau0.5_L5"],
        ),
        (fixed, case["norm_bound_1_weighted"]),
        (fixed | {"weighted": False}, case["norm_bound_1_uniform"]),
        (median, case["norm_bound_median_norm_uniform"]["out"]),
    ]
    for table, expected in pairs:
        found, _ = merge(table, x, matrix(case["n_k"]))
        assert found.tolist() == pytest.approx(expected, abs=1e-12), table
    limit, _ = merge(geometric | {"iterations": 2000}, x)
    assert limit.tolist() == pytest.approx(case["geometric_median_converged"]["out"], abs=1e-7)


def test_ties_go_to_the_lowest_number() -> None:
    case = NUMBERS["ties"]
    x = matrix(case["input"])
    assert torch.equal(merge({"name": "krum"}, x)[0], x[case["krum"]["index"]])
    for table, key in (
        ({"name": "multi_krum", "selected": 3}, "multi_krum_m3"),
        ({"name": "bulyan"}, "bulyan_iterative"),
    ):
        assert merge(table, x)[0].tolist() == pytest.approx(case[key]["out"], abs=1e-15)
    even = case["even_median"]
    assert merge({"name": "median"}, matrix(even["x"])[:, None])[0].tolist() == [even["mid"]]
    half = {"name": "median", "weighted": True}
    assert merge(half, matrix([[5.0], [1.0], [3.0]]), [2, 1, 1])[0].tolist() == [4.0]


def check_byzfl(name: str, f: int, x: Tensor, expected: Any) -> None:
    options = {
        "trimmed_mean": {"byzantine": f},
        "krum": {"byzantine": f, "neighbours": "n-f-1"},
        "multi_krum": {"byzantine": f, "neighbours": "n-f-1"},
        "geometric_median": {"start": "zero", "nu": 0.1},
        "centred_clipping": {"start": "zero", "tau": 2.0, "iterations": 3},
    }.get(name, {})
    found, _ = merge({"name": name, **options}, x)
    assert found.tolist() == pytest.approx(expected, abs=1e-10), name


def test_recorded_numbers_of_byzfl() -> None:
    assert BYZFL["version"] == "byzfl 0.0.11"
    for case in BYZFL["cases"]:
        for name, expected in case["out"].items():
            check_byzfl(name, case["f"], matrix(case["input"]), expected)


@pytest.mark.slow
def test_byzfl_itself() -> None:
    byzfl = pytest.importorskip("byzfl")
    rng = np.random.default_rng(1)
    for n, f, d in [(7, 1, 40), (15, 4, 3), (30, 10, 200)]:
        x = rng.normal(size=(n, d))
        x[:f] += 30 * rng.normal(size=(f, d))
        for name, rule in {
            "median": byzfl.Median(),
            "trimmed_mean": byzfl.TrMean(f=f),
            "krum": byzfl.Krum(f=f),
            "multi_krum": byzfl.MultiKrum(f=f),
            "geometric_median": byzfl.GeometricMedian(nu=0.1, T=3),
            "centred_clipping": byzfl.CenteredClipping(m=None, L=3, tau=2.0),
        }.items():
            check_byzfl(name, f, matrix(x), np.asarray(rule(x)).tolist())


F = 2
TABLES: list[dict[str, Any]] = [
    {"name": "mean"},
    {"name": "median"},
    {"name": "median", "weighted": True},
    {"name": "trimmed_mean", "byzantine": F},
    {"name": "trimmed_mean", "fraction": 0.2},
    {"name": "krum", "byzantine": F},
    {"name": "multi_krum", "byzantine": F},
    {"name": "bulyan", "byzantine": F},
    {"name": "bulyan", "byzantine": F, "one_shot": True},
    {"name": "geometric_median", "weighted": True},
    {"name": "geometric_median", "iterations": 30},
    {"name": "centred_clipping", "start": "median", "tau": 2.0, "iterations": 3},
    {"name": "centred_clipping", "tau": 1.0},
    {"name": "norm_bound"},
    {"name": "norm_bound", "bound": "adaptive", "weighted": True},
]
BULYAN = {"name": "bulyan", "byzantine": F}
BOUNDED = ("centred_clipping", "norm_bound")


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**31), st.sampled_from(range(len(TABLES))), st.integers(1, 5))
def test_order_and_padding_of_clients_do_not_matter(seed: int, which: int, absent: int) -> None:
    table, rng = TABLES[which], np.random.default_rng(seed)
    x, weights = rng.normal(size=(12, 5)), rng.integers(1, 9, 12)
    expected, state = merge(table, matrix(x), weights)
    # Rows that do not exist are zeros, and may be anywhere.
    order = rng.permutation(12 + absent)
    if table == BULYAN:  # its last winners are one of a pair with equal scores: the lower number
        order[order < 12] = range(12)
    wide = np.concatenate([x, np.zeros((absent, 5))])[order]
    padded, padded_state = merge(
        table, matrix(wide), np.concatenate([weights, np.zeros(absent, dtype=int)])[order]
    )
    assert torch.allclose(padded, expected, rtol=0, atol=1e-12)
    if isinstance(state, Tensor):
        assert torch.allclose(padded_state, state, rtol=0, atol=1e-12)
    moved = matrix(rng.normal(size=5))
    if table["name"] not in BOUNDED or table.get("start") == "median":
        found, _ = merge(table, matrix(x) + moved, weights)
        assert torch.allclose(found, expected + moved, rtol=0, atol=1e-9)


@pytest.mark.parametrize("scale", [1e6, 1e12])
@pytest.mark.parametrize("table", TABLES, ids=str)
def test_outliers_hardly_move_the_result(table: dict[str, Any], scale: float) -> None:
    rng = np.random.default_rng(3)
    x = matrix(rng.normal(size=(12, 6)))
    honest = x[F:]
    x[:F] = scale * matrix(rng.normal(size=(F, 6)))
    found, _ = merge(table, x)
    spread = (honest.max(0).values - honest.min(0).values).norm()
    moved = float((found - honest.mean(0)).norm() / spread)
    if table["name"] == "mean":
        assert moved > 1e3
    elif table == {"name": "geometric_median", "weighted": True}:
        assert moved < 1e-3 * scale  # three steps from the mean are not enough
    else:
        assert moved < 1


def test_distances_are_exact_beside_a_huge_outlier() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, 30))
    x[4] *= 1e12
    weights = torch.ones(9, dtype=torch.float64)
    found = rows.squared_distances(Rows(matrix(x), weights)).numpy()
    true = ((x[:, None] - x[None]) ** 2).sum(-1)
    others = ~np.eye(9, dtype=bool)
    np.testing.assert_allclose(found[others], true[others], rtol=1e-10)


def test_blocks_of_columns_equal_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    x = matrix(np.random.default_rng(0).normal(size=(12, 23)))
    whole = [merge(table, x)[0] for table in TABLES]
    monkeypatch.setattr(rows, "BLOCK", 5)
    for table, expected in zip(TABLES, whole, strict=True):
        assert torch.allclose(merge(table, x)[0], expected, rtol=0, atol=1e-12)


def test_state_follows_the_rounds() -> None:
    x = matrix([[3.0, 4.0], [0.3, 0.4]])
    clip = {"name": "centred_clipping", "tau": 1.0}
    first, state = merge(clip, x)
    assert first.tolist() == pytest.approx([0.45, 0.6])
    assert torch.equal(state[0], first)
    second, _ = merge(clip, x, state=state[0])
    moved = [0.45 + (0.6 - 0.15) / 2, 0.6 + (0.8 - 0.2) / 2]
    assert second.tolist() == pytest.approx(moved)
    adaptive = {"name": "norm_bound", "bound": "adaptive", "quantile": 0.8}
    bounded, limit = merge(adaptive, x)
    assert bounded.tolist() == pytest.approx([0.45, 0.6])
    assert limit.item() == pytest.approx(np.exp(-0.2 * (0.5 - 0.8)))


@pytest.mark.parametrize(
    ("table", "value"),
    [
        ({"name": "medain"}, "medain"),
        ({"name": "krum", "byzantin": 2}, "byzantin"),
        ({"name": "krum", "byzantine": -1}, "-1"),
        ({"name": "krum", "byzantine": 1.5}, "1.5"),
        ({"name": "krum", "byzantine": True}, "True"),
        ({"name": "krum", "neighbours": "n-3"}, "n-3"),
        ({"name": "median", "weighted": 1}, "weighted = 1"),
        ({"name": "trimmed_mean", "fraction": 0.5}, "0.5"),
        ({"name": "multi_krum", "selected": 0}, "selected = 0"),
        ({"name": "geometric_median", "nu": 0.0}, "nu = 0.0"),
        ({"byzantine": 1}, "name"),
    ],
)
def test_bad_options(table: dict[str, Any], value: str) -> None:
    with pytest.raises(InputError, match=value):
        build(table)


def test_table_of_aggregators() -> None:
    for name, info in AGGREGATORS.items():
        assert get(name) == info.aggregator == build(table_of(info.aggregator))
        assert Federation(aggregator=name).aggregator == info.aggregator  # type: ignore[arg-type]
        assert numbers(info.aggregator).keys() <= table_of(info.aggregator).keys()
    assert [n for n, i in AGGREGATORS.items() if i.aggregator.streams] == ["mean"]
    needed = {"median": 1, "trimmed_mean": 5, "krum": 7, "multi_krum": 7, "bulyan": 11}
    for name, fewest in needed.items():
        table = {"name": name} | ({} if name == "median" else {"byzantine": 2})
        assert build(table).fewest == fewest
    for wrong in (Aggregator, 3, "medain"):
        with pytest.raises(InputError):
            Federation(aggregator=wrong)  # type: ignore[arg-type]
