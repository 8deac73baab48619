"""Choosing, compiling and switching execution paths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import InputError, Task, Trial, simulate
from fedzmg.engine import choose as choosing
from fedzmg.engine.choose import can_compile
from fedzmg.engine.vectorized import Vectorized
from fedzmg.models.kernels import MappedLayers, onednn
from fedzmg.simulation import Simulation

CPU = torch.device("cpu")
COMPILER_WARNS = pytest.mark.filterwarnings("ignore")
"""What the compiler warns of inside itself changes with every version of torch."""


def task(dropout: float = 0.0) -> Task:
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(4), [5, 12, 8, 3])
    x, y = rng.normal(size=(len(owner), 6)), rng.integers(0, 3, len(owner))
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(dropout), nn.Linear(5, 3))
    return Task.from_arrays(net, x, y, owner, test=(x, y), cohort=4, batch_size=4, epochs=2)


def simulation(engine: str, rounds: int = 3, trials: int = 1) -> Simulation:
    return Simulation(
        task(),
        [Trial.of("fedzmg", seed) for seed in range(trials)],
        rounds=rounds,
        device=CPU,
        dtype=torch.float32,
        engine=engine,  # type: ignore[arg-type]
    )


@pytest.mark.skipif(not can_compile(CPU), reason="needs a C++ compiler")
@COMPILER_WARNS
def test_compiled_equals_eager_with_dropout() -> None:
    trials = [Trial.of("fedzmg", seed) for seed in (0, 1)]
    eager = simulate(task(0.4), trials, rounds=1, engine="vectorized")
    compiled = simulate(task(0.4), trials, rounds=1, engine="compiled")
    for a, b in zip(eager, compiled, strict=True):
        for name, leaf in a.params.items():
            torch.testing.assert_close(leaf, b.params[name], rtol=0, atol=1e-5)


def test_auto_measures_and_says_what_it_saw() -> None:
    choice = simulation("auto").choice
    assert choice.path in ("sequential", "vectorized")
    assert "ms for 2 steps of a cohort" in choice.reason


def test_auto_is_timed_on_one_trial_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []

    def fake(engine: object, entries: list[object], sent: object, memory: object) -> float:
        widths.append(len(entries))
        return 1.0

    monkeypatch.setattr(choosing, "_seconds", fake)
    simulation("auto", trials=1)
    alone = list(widths)
    widths.clear()
    simulation("auto", trials=5)
    assert widths == alone


def test_auto_compiles_only_when_the_rounds_left_repay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(engine: object, *rest: object) -> float:
        return 0.01 if isinstance(engine, Vectorized) else 0.02

    monkeypatch.setattr(choosing, "_seconds", fake)
    monkeypatch.setattr(choosing, "can_compile", lambda device: True)
    assert simulation("auto", rounds=50).choice.path == "vectorized"
    assert simulation("auto", rounds=100_000).choice.path == "compiled"
    monkeypatch.setattr(choosing, "can_compile", lambda device: False)
    assert simulation("auto", rounds=100_000).choice.path == "vectorized"


def test_unknown_engine_and_device_are_refused() -> None:
    with pytest.raises(InputError, match="unknown engine 'vectorised': did you mean 'vectorized'"):
        simulation("vectorised")
    with pytest.raises(InputError, match="unknown device 'gpu'"):
        simulate(task(), [Trial.of("fedavg")], device="gpu")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no CUDA device is available here"):
        simulate(task(), [Trial.of("fedavg")], device="cuda")


def test_compiled_widths_are_few_and_wide_enough() -> None:
    engine = Vectorized(simulation("vectorized")._program, compiled=True)
    for total in (2, 3, 10, 37, 810):
        widths = [engine._width(alive, total) for alive in range(1, total + 1)]
        assert len(set(widths)) <= 4
        assert all(2 <= w <= max(total, 2) for w in widths)
        assert all(w >= alive for alive, w in enumerate(widths, 1))


def test_mapped_layers_are_the_same_layers() -> None:
    x, w, b = torch.randn(4, 6), torch.randn(3, 6), torch.randn(3)
    expected = nn.functional.linear(x, w, b), nn.functional.linear(x[None], w, bias=b)
    with MappedLayers():
        torch.testing.assert_close(nn.functional.linear(x, w, b), expected[0])
        torch.testing.assert_close(nn.functional.linear(x, w, bias=b), expected[0])
        torch.testing.assert_close(nn.functional.linear(x, w), expected[0] - b)
        torch.testing.assert_close(nn.functional.linear(x[None], w, b), expected[1])


@pytest.mark.parametrize("options", [
    {}, {"stride": 2}, {"padding": 2}, {"stride": (1, 2), "padding": (2, 0)}, {"padding": "same"},
    {"dilation": 2}, {"groups": 2}, {"stride": [2], "padding": [1]},
])  # fmt: skip
def test_mapped_convolutions_are_the_same_convolutions(options: dict[str, object]) -> None:
    x, b = torch.randn(5, 4, 9, 8, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    w = torch.randn(6, 4 // int(options.get("groups", 1)), 3, 3, dtype=torch.float64)  # type: ignore[call-overload]
    for bias in (b, None):
        expected = nn.functional.conv2d(x, w, bias, **options)  # type: ignore[arg-type]
        for enabled in (True, False):
            with onednn(enabled), MappedLayers():
                found = nn.functional.conv2d(x, w, bias, **options)  # type: ignore[arg-type]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_onednn_switch_is_put_back() -> None:
    before = torch.backends.mkldnn.enabled
    with onednn(False):
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled == before


@COMPILER_WARNS
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("engine", ["sequential", "vectorized", "compiled"])
@pytest.mark.parametrize("name", ["fedzmg", "fedadam"])
def test_gpu_agrees_with_cpu(engine: str, name: str) -> None:
    trials = [Trial.of(name, seed) for seed in (0, 1)]
    here = simulate(
        task(0.4), trials, rounds=2, engine="sequential", dtype=torch.float64, device="cpu"
    )
    there = simulate(
        task(0.4),
        trials,
        rounds=2,
        engine=engine,
        dtype=torch.float64,
        device="cuda",  # type: ignore[arg-type]
    )
    for a, b in zip(here, there, strict=True):
        for key, leaf in a.params.items():
            torch.testing.assert_close(leaf, b.params[key].cpu(), rtol=0, atol=1e-9)
