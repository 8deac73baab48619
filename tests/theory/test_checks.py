"""Checks: verdicts, known numbers, and a wrong implementation that makes each of them fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from fedzmg import InputError
from fedzmg.theory import CHECKS, FULL, Finding, Size, Value, convergence, descent, resolve

TINY = Size(repetitions=20, steps=400, problems=10, samples=10_000, rounds=1)

HOLDS = {"T1", "T3", "T4", "T5", "T10", "T11", "T12", "E1", "E2", "E3", "E5", "E6", "E7"}
FAILS = {
    "T2": "3/(8L)",
    "T6": "1'(w_0 - w*) = 0",
    "T7": "without weight decay",
    "T8": "first step",
    "T9": "1'(w_0 - w*) = 0",
    "E4": "equal size",
    "E8": "lambda_max(H) >= 0",
    "E9": "averaging servers",
}


def verdict_is_right(finding: Finding) -> bool:
    if finding.id in HOLDS:
        return finding.verdict == "holds"
    return finding.verdict.startswith("fails as stated; holds") and (
        FAILS[finding.id] in finding.verdict
    )


@pytest.fixture(scope="module")
def found() -> dict[str, Finding]:
    convergence.computed_run.cache_clear()
    return {name: check(TINY) for name, check in CHECKS.items()}


def line(finding: Finding, what: str) -> Value:
    [one] = [one for one in finding.lines if one.what.startswith(what)]
    return one


@pytest.mark.parametrize("name", CHECKS)
def test_verdicts(name: str, found: dict[str, Finding]) -> None:
    finding = found[name]
    assert finding.id == name
    assert verdict_is_right(finding), [one for one in finding.lines if not one.agrees]
    assert all((finding.title, finding.claim, finding.setting))
    assert all(math.isfinite(one.measured) for one in finding.lines)


@pytest.mark.parametrize(
    ("check", "what", "predicted", "rel"),
    [
        ("T2", "F(y) after the step 1/(2L)", 0.0, 0.0),
        ("T2", "F(y), bound with 3/(8L)", 2.25, 0.0),
        ("T3", "isotropic: share", 1 / 12, 1e-6),
        ("T3", "80 % along 1: share", 0.8166667, 1e-6),
        ("T3", "generic covariance: share", 1 / 12, 1.0),
        # Another instance of the same kind has 12.26 and 13.80; 0.40, 0.37 and 297.
        ("T6", "E |w_T - w*|^2 =", 12.26, 0.1),
        ("T6", "F(w_T)", 13.8, 0.1),
        ("T9", "F(w_T) - F*, by Newton", 0.045, 0.77),
        ("T10", "noise term, FedAvg", 0.40, 0.1),
        ("T10", "noise term, FedZMG", 0.37, 0.1),
        ("T10", "6 L Gamma", 297, 0.3),
        ("T12", "centred Gaussian", 1 / 512, 1e-6),
        ("T12", "after a ReLU", 0.3183, 1e-3),
        ("T12", "uniform", 0.75, 1e-6),
    ],
)
def test_predicted_numbers(
    check: str, what: str, predicted: float, rel: float, found: dict[str, Finding]
) -> None:
    assert line(found[check], what).predicted == pytest.approx(predicted, rel=rel, abs=0)


def test_measured_numbers(found: dict[str, Finding]) -> None:
    assert [one.measured for one in found["T2"].lines[:3]] == [2.25, 2.25, 0.0]
    ratio = {name: y[1] / y[0] for name, (_, y) in found["T8"].series.items()}
    assert 0.8 < ratio["no shift"] < 1.0
    assert ratio["shifted optima"] < 0.25


def half(gradients: Tensor, axes: Any = (-1,)) -> Tensor:
    """Subtract half of the mean, which is wrong."""
    return gradients - 0.5 * gradients.mean(axes, keepdim=True)


def constant(problem: object) -> descent.Schedule:
    return descent.Schedule(0.03e9, 1e9)


def too_small(*given: object) -> float:
    return 1e-6


HERE, PACKAGE = "fedzmg.theory.descent.zero_mean", "fedzmg.algorithms.fedzmg.zero_mean"
BREAKS: dict[str, dict[str, Callable[..., Any] | float]] = {
    **{
        name: {HERE: half}
        for name in ("T1", "T3", "T4", "T6", "T7", "T8", "T9", "E1", "E2", "E3", "E4", "E5", "E6",
                     "E8")
    },
    "T2": {"fedzmg.theory.geometry.STEP": 1.0},
    "T5": {"fedzmg.theory.descent.theorems_schedule": constant},
    "T10": {"fedzmg.theory.bound.numerator": too_small},
    "T11": {PACKAGE: half},
    "T12": {
        "fedzmg.theory.networks.zero_mean": half,
        "fedzmg.theory.networks._along_training": lambda size: {"layer 1": ([0.0], [0.9])},
    },
    "E7": {PACKAGE: half},
    "E9": {PACKAGE: half, "fedzmg.algorithms.wrapper.zero_mean": half},
}  # fmt: skip


@pytest.fixture
def _fresh() -> Iterator[None]:
    convergence.computed_run.cache_clear()
    yield
    convergence.computed_run.cache_clear()


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.usefixtures("_fresh")
def test_every_check_can_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for target, wrong in BREAKS[name].items():
        monkeypatch.setattr(target, wrong)
    assert not verdict_is_right(CHECKS[name](TINY))


def test_verdict_follows_from_the_lines() -> None:
    def verdict(claimed: bool, derived: bool, remedy: str = "") -> str:
        lines = (
            Value("a", 1.0, 1.0 if claimed else 2.0, 0.1, stated=True),
            Value("b", 1.0, 1.0 if derived else 2.0, 0.1),
        )
        return Finding("X", "", "", "", lines, remedy).verdict

    assert verdict(True, True) == "holds"
    assert verdict(False, True) == "fails as stated"
    assert verdict(False, True, "under x") == "fails as stated; holds under x"
    assert verdict(True, False) == verdict(False, False, "under x") == "not reproduced"


@pytest.mark.parametrize("rule", ["near", "relative", "at most", "at least"])
def test_nan_never_agrees(rule: Any) -> None:
    assert not Value("a", 1.0, math.nan, 1e9, rule).agrees


def test_names_in_any_case_and_unknown_ones() -> None:
    assert resolve([]) == list(CHECKS)
    assert resolve(["t6", "T6", "e1"]) == ["T6", "E1"]
    with pytest.raises(InputError, match="'T13': did you mean 'T"):
        resolve(["T1", "T13"])


@pytest.mark.slow
def test_full_size_gives_the_same_verdicts() -> None:
    found = {name: check(FULL) for name, check in CHECKS.items()}
    for finding in found.values():
        assert verdict_is_right(finding), [one for one in finding.lines if not one.agrees]
    assert line(found["T5"], "FedZMG: log-log slope").measured == pytest.approx(-1.04, abs=0.1)
    assert line(found["T5"], "FedAvg: log-log slope").measured == pytest.approx(-1.07, abs=0.1)
    last = line(found["T5"], "FedZMG: E |w_T - w*|^2")
    assert last.measured == pytest.approx(8.0e-6, rel=0.5)
    assert line(found["T6"], "log-log slope").measured == pytest.approx(-1.04, abs=0.1)
    assert line(found["T4"], "violations").measured > 200
