"""Choosing, compiling and switching execution paths."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import InputError, Task, Trial, simulate
from fedzmg.bench.workloads import WORKLOADS
from fedzmg.data.plan import ClientBatch
from fedzmg.engine import choose as choosing
from fedzmg.engine import cuda_graph
from fedzmg.engine.choose import can_compile
from fedzmg.engine.memory_limit import even
from fedzmg.engine.round import Broadcast, Chunk
from fedzmg.engine.sequential import Sequential
from fedzmg.engine.vectorized import Vectorized
from fedzmg.models.initial import initial_params
from fedzmg.models.kernels import MappedLayers, onednn
from fedzmg.simulation import Simulation, rounds
from fedzmg.tree import Tree

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

    monkeypatch.setattr(choosing, "_pass", fake)
    simulation("auto", trials=1)
    alone = list(widths)
    widths.clear()
    simulation("auto", trials=5)
    assert widths == alone


def test_auto_compiles_only_when_the_rounds_left_repay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(engine: object, *rest: object) -> float:
        return 0.01 if isinstance(engine, Vectorized) else 0.02

    monkeypatch.setattr(choosing, "_pass", fake)
    monkeypatch.setattr(choosing, "can_compile", lambda device: True)
    assert simulation("auto", rounds=50).choice.path == "vectorized"
    assert simulation("auto", rounds=100_000).choice.path == "compiled"
    monkeypatch.setattr(choosing, "can_compile", lambda device: False)
    assert simulation("auto", rounds=100_000).choice.path == "vectorized"


@pytest.mark.parametrize(
    ("faster", "expected"),
    [
        (1.2, ("vectorized", True)),
        (1.3, ("sequential", False)),
    ],
)
def test_auto_leaves_the_usual_path_for_one_that_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, faster: float, expected: tuple[str, bool]
) -> None:
    """What is nearly as fast must not decide which bits a run gets."""
    flags: list[bool] = []

    @contextlib.contextmanager
    def noted(flag: bool) -> Iterator[None]:
        flags.append(flag)
        yield

    def fake(engine: object, *rest: object) -> float:
        other = isinstance(engine, Sequential) and not flags[-1]
        return 0.01 / faster if other else 0.01

    monkeypatch.setattr(choosing, "onednn", noted)
    monkeypatch.setattr(choosing, "_pass", fake)
    choice = simulation("auto").choice
    assert (choice.path, choice.onednn) == expected


def test_on_a_gpu_the_number_of_trials_decides_whether_compiling_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choosing, "_seconds", lambda *args: 7e-3)
    monkeypatch.setattr(choosing, "can_compile", lambda device: True)
    built = simulation("vectorized")
    steps = max(len(e.stream) for e in built._probe()[0])
    assert steps == 6

    on_card = replace(built._program, device=torch.device("cuda"))

    def path(trials: int, rounds: int, trainings: int = 1) -> str:
        return choosing.choose(
            "auto", on_card, rounds, built._probe, trials=trials, trainings=trainings
        ).path

    # 3.5 ms a step, 6 steps: 21 ms a round alone, half of that for every other trial of a pack.
    assert path(1, 2300) == "captured"
    assert path(1, 2400) == "compiled"
    assert path(9, 470) == "captured"
    assert path(9, 480) == "compiled"
    # Ten of them share what is compiled.
    assert path(9, 47, trainings=10) == "captured"
    assert path(9, 48, trainings=10) == "compiled"


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


def test_chunks_are_even_and_few() -> None:
    assert even(100, None) is None
    assert even(100, 100) is None
    assert even(100, 99) == 50
    assert even(810, 400) == 270
    assert even(7, 3) == 3


def captures(built: Simulation) -> list[int]:
    engine = built._engine
    assert isinstance(engine, Vectorized)
    assert engine._captured is not None
    return sorted(engine._captured._held)


def test_buffers_are_used_again_until_they_are_twice_too_wide() -> None:
    packed, alone = simulation("captured", trials=5, rounds=9), simulation("captured", rounds=9)
    for awake, widths in ((5, [20]), (4, [20]), (3, [20]), (2, [10, 20]), (1, [5, 10, 20])):
        packed.stop(range(awake, 5))
        packed.run_round()
        alone.run_round()
        assert captures(packed) == widths
        for name, leaf in alone.snapshot.params.items():
            torch.testing.assert_close(packed.snapshot.params[name][0], leaf[0], rtol=0, atol=0)


def test_the_last_chunk_of_a_round_takes_the_buffers_of_the_others() -> None:
    whole, cut = simulation("captured", trials=5), simulation("captured", trials=5)
    cut.chunk = 8
    cut._engine = cut._build()
    for _ in range(2):
        whole.run_round()
        cut.run_round()
    assert captures(cut) == [4, 8], "20 clients: 8, 8 and 4, which are not more than half"
    for name, leaf in whole.snapshot.params.items():
        torch.testing.assert_close(cut.snapshot.params[name], leaf, rtol=0, atol=0)
    cut.chunk = 7
    cut._engine = cut._build()
    cut.run_round()
    assert captures(cut) == [7], "7, 7 and 6"
    whole.run_round()
    for name, leaf in whole.snapshot.params.items():
        torch.testing.assert_close(cut.snapshot.params[name], leaf, rtol=0, atol=0)
    assert cut.padding() > whole.padding()


def test_algorithms_share_what_is_compiled_for_their_task(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def note(function: Callable[..., object], backend: str = "") -> Callable[..., object]:
        compiled.append(function.__name__)
        return function

    monkeypatch.setattr(cuda_graph, "compile_apart", note)
    cuda_graph._compiled_loss.cache_clear()
    shared = task()

    def train(task: Task, name: str) -> int:
        built = Simulation(
            task, [Trial.of(name)], rounds=1, device=CPU, dtype=torch.float32, engine="captured"
        )
        built._engine = Vectorized(built._program, compiled=True, captured=True)
        before = compiled.count("losses")
        built.run_round()
        return compiled.count("losses") - before

    assert train(shared, "fedzmg") > 0
    assert train(shared, "fedavg") == 0
    assert compiled.count("advance") == 2 * compiled.count("losses")
    # Other shapes are other code: the compiler allows few to a function.
    small = replace(shared, protocol=shared.protocol.with_options({"batch_size": 2}))
    assert train(small, "fedzmg") > 0
    cuda_graph._compiled_loss.cache_clear()


class Tight:
    """An engine whose device is full above some number of clients."""

    def __init__(self, engine: Vectorized, room: int) -> None:
        self.engine, self.room = engine, room

    def train(self, entries: list[ClientBatch], sent: Broadcast, memory: object) -> Iterator[Chunk]:
        for chunk in self.engine.train(entries, sent, memory):
            if len(chunk.entries) > self.room:
                raise torch.OutOfMemoryError("no room")
            yield chunk


def test_running_out_of_memory_halves_the_chunk_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roomy = simulation("vectorized", trials=2)
    expected = [roomy.run_round().records for _ in range(2)]
    tight = simulation("vectorized", trials=2)
    build = choosing.EngineChoice.build
    monkeypatch.setattr(
        choosing.EngineChoice, "build", lambda self, *args: Tight(build(self, *args), room=3)
    )
    tight._engine = Tight(tight._engine, room=3)  # type: ignore[arg-type, assignment]
    got = [tight.run_round().records for _ in range(2)]
    assert tight.chunk == 2, "8 clients do not fit, 4 do not, 2 do"
    for a, b in zip(chain(*got), chain(*expected), strict=True):
        assert a._replace(seconds=0) == b._replace(seconds=0)
    for name, leaf in roomy.snapshot.params.items():
        torch.testing.assert_close(tight.snapshot.params[name], leaf, rtol=0, atol=0)


def test_models_that_do_not_fit_together_are_evaluated_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roomy, tight = simulation("vectorized", trials=7), simulation("vectorized", trials=7)
    whole, asked = rounds.evaluate, list[int]()

    def narrow(params: Tree, *rest: object) -> torch.Tensor:
        asked.append(len(next(iter(params.values()))))
        if asked[-1] > 2:
            raise torch.OutOfMemoryError("no room")
        return whole(params, *rest)  # type: ignore[arg-type]

    expected, later = roomy.run_round().records, roomy.run_round().records
    monkeypatch.setattr(rounds, "evaluate", narrow)
    got = tight.run_round().records
    assert asked == [7, 4, 2, 2, 2, 1], "and clients train as they did"
    assert tight.chunk is None
    for a, b in zip(got, expected, strict=True):
        assert a._replace(seconds=0) == b._replace(seconds=0)
    tight.stop([0, 3])
    assert tight.run_round().records[1].metric == later[1].metric
    assert asked[6:] == [2, 2, 1]


def test_a_device_without_room_for_two_clients_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = simulation("vectorized")
    monkeypatch.setattr(
        choosing.EngineChoice, "build", lambda *args: Tight(Vectorized(tight._program), room=0)
    )
    tight._engine = Tight(tight._engine, room=0)  # type: ignore[arg-type, assignment]
    with pytest.raises(InputError, match="too little memory for 2 clients"):
        tight.run_round()


@COMPILER_WARNS
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("engine", ["captured", "compiled"])
@pytest.mark.parametrize("name", ["cifar100", "shakespeare"])
def test_a_round_of_the_papers_models_on_a_gpu(name: str, engine: str, precision: str) -> None:
    """Against the loop over clients; differences are measured in lengths of the round's step.

    Rounding is amplified by momentum and by units that switch: a wrong kernel is off by about one.
    """
    built = WORKLOADS[name].build(clients=10)
    few = replace(built, protocol=replace(built.protocol, epochs=1, cohort=4))
    start = initial_params(few.model, few.init, 0)

    def moved(engine: str, precision: str) -> torch.Tensor:
        [history] = simulate(
            few, Trial.of("fedzmg", client_lr=0.01), rounds=1, engine=engine, device="cuda",
            precision=precision,
        )  # fmt: skip
        return torch.cat([(history.params[n].cpu() - p).flatten() for n, p in start.items()])

    reference = moved("sequential", "float32")
    difference = (moved(engine, precision) - reference).norm() / reference.norm()
    assert difference < {"float32": 5e-3, "tf32": 8e-2, "bf16": 2e-1}[precision]


@COMPILER_WARNS
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_packed_equals_alone_on_a_gpu() -> None:
    built = WORKLOADS["cifar100"].build(clients=10)
    few = replace(built, protocol=replace(built.protocol, epochs=1, cohort=4))
    trials = [Trial.of("fedzmg", seed, client_lr=0.01) for seed in range(3)]
    packed = simulate(few, trials, rounds=1, engine="captured", device="cuda")
    for trial, together in zip(trials, packed, strict=True):
        [alone] = simulate(few, trial, rounds=1, engine="captured", device="cuda")
        for name, leaf in alone.params.items():
            torch.testing.assert_close(leaf, together.params[name], rtol=0, atol=1e-4)


@COMPILER_WARNS
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_auto_on_a_gpu_replays_graphs_and_falls_back_to_the_loop() -> None:
    built = Simulation(
        task(), [Trial.of("fedzmg")], rounds=2, device=torch.device("cuda"),
        dtype=torch.float32, engine="auto",
    )  # fmt: skip
    assert built.choice.path == "captured"
    assert built.chunk is None

    class Deciding(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if float(x.sum()) > -1e9 else x

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)), rng.integers(0, 3, 12)
    odd = Task.from_arrays(
        Deciding(3, 3), x, y, np.arange(12) % 3, test=(x, y), cohort=3, batch_size=2
    )
    looped = Simulation(
        odd, [Trial.of("fedavg")], rounds=1, device=torch.device("cuda"), dtype=torch.float32,
        engine="auto",
    )  # fmt: skip
    assert looped.choice.path == "sequential"
    assert "cannot be mapped" in looped.choice.reason


class Doubting(nn.Module):
    """Decides by a hidden value, which no map over clients can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        # Always the same way: one that changes with the batch would be refused before.
        return self.second(hidden if bool(hidden.sum() > -1e9) else hidden.relu())


def test_a_model_that_does_not_map_is_trained_by_the_loop() -> None:
    plain = task()
    odd = Task.from_arrays(
        Doubting(), *plain.train.examples, np.repeat(np.arange(4), [5, 12, 8, 3]),
        test=tuple(plain.test), cohort=4, batch_size=4,
    )  # fmt: skip
    with pytest.raises(InputError, match="engine='sequential'"):
        simulate(odd, Trial.of("fedzmg"), rounds=1, engine="vectorized")
    looped = Simulation(
        odd, [Trial.of("fedzmg"), Trial.of("fedzmg", 1)], rounds=1, device=CPU,
        dtype=torch.float32, engine="auto",
    )  # fmt: skip
    assert looped.choice.path == "sequential"
    assert "decides by the value of a tensor" in looped.choice.reason
    assert len(looped.run_round().records) == 2
