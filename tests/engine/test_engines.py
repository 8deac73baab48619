"""Choosing, building and compiling execution paths."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bench import WORKLOADS
from fedzmg import InputError, Task, Trial, simulate
from fedzmg.engine import choose, timings
from fedzmg.engine import probe as probing
from fedzmg.engine.choose import EngineChoice, EnginePlanner, can_compile
from fedzmg.engine.cuda_graph import compile_apart
from fedzmg.engine.local import Chunk, Engine, Program
from fedzmg.engine.probe import Probe
from fedzmg.engine.sequential import Sequential
from fedzmg.engine.vectorized import Vectorized
from fedzmg.kernels import MappedLayers, convolution, layers, onednn, threads
from fedzmg.kernels.precision import HAS_TRITON, same_bits
from fedzmg.models import FunctionalModel
from fedzmg.models.initial import initial_params
from fedzmg.simulation import Simulation, rounds
from fedzmg.tree import Tree
from golden_problems import Net, random_task

CPU, GPU = torch.device("cpu"), torch.device("cuda")
COMPILER_WARNS = pytest.mark.filterwarnings("ignore")
"""The compiler's own warnings change with every version of torch."""


SIZES = (5, 12, 8, 3)


def task(dropout: float = 0.0, sizes: Sequence[int] = SIZES) -> Task:
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(dropout), nn.Linear(5, 3))
    return random_task(net, list(sizes), inputs=6, classes=3, cohort=4, batch_size=4, epochs=2)


def simulation(
    engine: Any,
    rounds: int = 3,
    trials: int = 1,
    *,
    problem: Task | None = None,
    device: torch.device = CPU,
    name: str = "fedzmg",
) -> Simulation:
    packed = [Trial.of(name, seed) for seed in range(trials)]
    return Simulation(
        problem or task(), packed, rounds=rounds, device=device, dtype=torch.float32, engine=engine
    )


def assert_equal(a: Tree, b: Tree, atol: float = 0) -> None:
    for name, leaf in a.items():
        torch.testing.assert_close(leaf.cpu(), b[name].cpu(), rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@COMPILER_WARNS
def test_compiled_equals_eager_with_dropout(backend: str) -> None:
    if backend == "inductor" and not can_compile(CPU):
        pytest.skip("needs a C++ compiler")
    found = []
    for engine in ("vectorized", EnginePlanner("compiled", backend=backend)):
        made = simulation(engine, rounds=1, trials=2, problem=task(0.4, [8] * 4))
        made.run_round()
        found.append(made.snapshot.params)
    assert_equal(*found, atol=1e-5)


MILLISECOND = 1e-3


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make passes take seconds by path, oneDNN and steps of clients, and note them."""
    enabled: list[bool] = []

    @contextlib.contextmanager
    def noted(flag: bool) -> Iterator[None]:
        enabled.append(flag)
        yield

    def install(costs: dict[tuple[str, bool], float]) -> list[float]:
        spent: list[float] = []

        def fake(engine: object, probe: Probe) -> float:
            path = "sequential" if isinstance(engine, Sequential) else "vectorized"
            spent.append(costs[path, enabled[-1]] * probe.client_steps)
            return spent[-1] * MILLISECOND

        monkeypatch.setattr(timings, "onednn", noted)
        monkeypatch.setattr(timings, "pass_seconds", fake)
        return spent

    return install


def test_choosing_takes_a_small_share_and_never_a_slower_path(passes: Any) -> None:
    """Seconds are counted by a fake clock; no path may be slower than the loop."""
    built = simulation("sequential")
    probe = built.probe()
    steps = probe.client_steps
    rounds, shares = [1, 2, 5, 20, 100, 1000, 10**5], [0.0, choose.CHOOSING_SHARE / 2]
    settings = product(rounds, [0.1, 0.8, 1.0, 1.5, 3.0], [0.5, 0.9], shares)
    for count, mapped, without, share in settings:
        costs = {
            (path, flag): speed * (1 if flag else without)
            for path, speed in (("sequential", 1.0), ("vectorized", mapped))
            for flag in (True, False)
        }
        spent = passes(costs)
        before = share * count * steps * min(1.0, mapped)  # of the time of the training
        choice = choose.choose_on_cpu(built.program, probe, count, spent=before * MILLISECOND)
        path = choice.path
        # Less than twice as fast; more is not known before it is measured.
        training = count * steps * max(0.5, costs[path, True])
        assert sum(spent) <= choose.CHOOSING_SECONDS / MILLISECOND
        assert sum(spent) + before <= 0.05 * training, (count, mapped, without)
        assert costs[path, choice.onednn] <= 1.0
        if not spent:
            assert count * steps < 600
            assert path == "sequential"
        if count >= 1000:  # enough to try everything
            loop = without * timings.CLEAR_SPEEDUP > 1
            flags = {"sequential": loop, "vectorized": loop or choose.ONEDNN_BY_DEFAULT}
            ratio = costs["sequential", loop] / costs["vectorized", flags["vectorized"]]
            expected = "vectorized" if ratio > choose.MAPPED_SPEEDUP else "sequential"
            assert (path, choice.onednn) == (expected, flags[expected])


@pytest.mark.parametrize(("fixed", "compiles"), [(0.9, True), (0.0, False)])
def test_compiling_must_save_more_than_it_takes(
    monkeypatch: pytest.MonkeyPatch, fixed: float, compiles: bool
) -> None:
    """Compiling saves time that does not grow with the number of clients, and no other."""

    def fake(engine: object, probe: Probe) -> float:
        if isinstance(engine, Sequential):
            return 2.0 * MILLISECOND * probe.client_steps
        clients = len(probe.batches)
        each = fixed * len(SIZES) + (1 - fixed) * clients
        return each * MILLISECOND * probe.client_steps / clients

    monkeypatch.setattr(timings, "pass_seconds", fake)
    monkeypatch.setattr(choose, "can_compile", lambda _: True)
    built = simulation("sequential")
    found = choose.choose_on_cpu(built.program, built.probe(), 10**6).path
    assert found == ("compiled" if compiles else "vectorized")
    # With 0.9 of a step's time fixed, few rounds cannot save twice the time of the compiler.
    assert choose.choose_on_cpu(built.program, built.probe(), 10**2).path == "vectorized"


@pytest.mark.parametrize("without", [0.3, 0.6])
def test_a_network_of_long_steps_is_not_tried_out(passes: Any, without: float) -> None:
    """The first round would come seconds later; two steps tell whether oneDNN helps."""
    built, costs = simulation("sequential"), product(("sequential", "vectorized"), (True, False))
    spent = passes({(path, on): (0.5 if on else without) / MILLISECOND for path, on in costs})
    choice = choose.choose_on_cpu(built.program, built.probe(), 10**5)
    assert (choice.path, choice.onednn) == ("sequential", without > 0.5)
    assert len(spent) <= 4


class Convolutions(nn.Module):
    """Two convolutions; ``views`` needs the usual memory format of their outputs."""

    def __init__(self, *, views: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.last, self.views = nn.Linear(64, 3), views

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu())
        return self.last(x.view(len(x), -1) if self.views else x.flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("views", [False, True])
def test_channels_last_is_taken_if_it_is_faster_and_possible(
    monkeypatch: pytest.MonkeyPatch, *, views: bool
) -> None:
    """Time of passes with it counts half; a round then gives the same model."""
    x, y = torch.randn(40, 1, 8, 8), torch.arange(40) % 3
    convolutions = Task.from_arrays(
        Convolutions(views=views), x, y, np.arange(40) % 5, test=(x, y), cohort=5
    )
    measured = timings.pass_seconds

    def fake(engine: Any, probe: Probe) -> float:
        measured(engine, probe)
        last = layers.in_format(x).stride() != x.stride()
        return probe.client_steps * MILLISECOND * (0.5 if last else 1.0)

    monkeypatch.setattr(timings, "pass_seconds", fake)
    built = simulation("sequential", problem=convolutions)
    choice = choose.choose_on_cpu(built.program, built.probe(), 1000)
    assert (choice.path, choice.channels_last) == ("sequential", not views)
    found = []
    for engine in ("sequential", choice):
        made = simulation(engine, problem=convolutions)
        made.run_round()
        found.append(made.snapshot.params)
    assert_equal(*found, atol=1e-6)


@pytest.mark.parametrize(
    ("alone", "several", "cores"),
    [
        (0.1, 1.0, (1, 1)),
        (5.0, 9.0, (0, 1)),
        (50.0, 90.0, (0, 1)),
        (0.5, 0.2, (1, 2)),
        (2.0, 0.5, (0, 2)),
    ],
)
def test_the_fastest_use_of_cores_is_measured(
    monkeypatch: pytest.MonkeyPatch, alone: float, several: float, cores: tuple[int, int]
) -> None:
    """By a clock on the wall, which stands still but for these passes."""
    built, measured, clock = simulation("sequential"), probing.pass_seconds, [0.0]

    def slow(engine: Any, probe: Probe) -> float:
        each = alone if torch.get_num_threads() == 1 else 1.0
        clock[0] += 0.02 * (each if engine.parallel == 1 else several * len(probe.batches))
        return measured(engine, probe)

    now = SimpleNamespace(perf_counter=lambda: clock[0], process_time=time.process_time)
    monkeypatch.setattr(probing, "time", now)
    monkeypatch.setattr(probing, "pass_seconds", slow)
    with threads(2):
        own = built.program, built.probe()
        assert choose.choose_cores(*own, 1000)[:2] == cores
        assert choose.choose_cores(*own, 1) == (0, 1, 1.0, 0.0)
        assert torch.get_num_threads() == 2


def test_a_simulation_ends_with_its_last_reference() -> None:
    """It holds data, and the files of client memory: the collector may come late."""
    gc.collect()
    gc.disable()
    try:
        built = simulation("sequential", name="scaffold")
        built.run_round()
        alive = weakref.ref(built)
        del built
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("all_threads", "chosen"), [(0.5, 0), (0.99, 1), (3.0, 1), (20.0, 1)])
def test_the_map_takes_all_threads_only_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch, all_threads: float, chosen: int
) -> None:
    clock, built, taken = [0.0], simulation("sequential"), [0]

    def slow(_: object, part: Probe) -> None:
        clock[0] += 0.02 * (1.0 if torch.get_num_threads() == 1 else all_threads)
        taken[0] += part.client_steps

    monkeypatch.setattr(probing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(probing, "pass_seconds", slow)
    with threads(2):
        mapped = Vectorized(built.program), built.probe()
        assert choose.threads_of_map(*mapped, 1000) == chosen
        for rounds in range(1, 1000):
            taken[0] = 0
            choose.threads_of_map(*mapped, rounds)
            assert taken[0] <= 0.01 * rounds * mapped[1].client_steps
        assert taken[0]


def test_several_trials_take_the_map_in_a_tie(passes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    built = simulation("sequential")
    passes(dict.fromkeys(product(("sequential", "vectorized"), (True, False)), 1.0))
    monkeypatch.setattr(choose, "choose_cores", lambda *_: probing.Cores(1))
    monkeypatch.setattr(choose, "threads_of_map", lambda *_: 0)
    found = []
    for trials in (1, 2):
        planner = EnginePlanner()
        planner.plan(built.program, built.probe, trials=trials, rounds_left=10**4)
        found.append((planner.choice.path, planner.choice.threads))
    assert found == [("sequential", 1), ("vectorized", 0)]


def test_a_model_that_cannot_be_copied_trains_one_client_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built, tried = simulation("sequential"), []

    def fails(model: FunctionalModel) -> None:
        tried.append(model)
        raise MemoryError

    monkeypatch.setattr(FunctionalModel, "twin", fails)
    monkeypatch.setattr(probing, "SHORT_STEP", 0.0)
    with threads(2):
        assert choose.choose_cores(built.program, built.probe(), 1000).parallel == 1
    assert tried


class Coupled(nn.Module):
    """Dropout as a layer and as a function, attention, running statistics and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        x = self.drop(self.first(self.norm(x))).relu()[:, None].expand(-1, 3, -1)
        x = nn.functional.dropout(self.attention(x, x, x)[0], 0.1, self.training)
        return self.last(x.mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["fedzmg", "scaffold", "fedbn"])
@pytest.mark.parametrize("large", [False, True])
def test_clients_in_parallel_have_the_bits_of_one_after_another(
    monkeypatch: pytest.MonkeyPatch, name: str, large: bool
) -> None:
    if large:
        monkeypatch.setattr("fedzmg.engine.sequential.CHUNK_BYTES", 1)
    problem = random_task(
        Coupled(), [9, 12, 8, 3, 10, 6], inputs=6, classes=3, cohort=5, batch_size=4, epochs=2
    )
    found = []
    for parallel in (1, 3):
        choice = EngineChoice("sequential", "", threads=1, parallel=parallel)
        built = simulation(choice, 3, 2, problem=problem, name=name)
        records = [built.run_round().records for _ in range(3)]
        assert getattr(built.engine, "parallel", 0) == parallel
        found.append((built.snapshot.params, [r._replace(seconds=0.0) for r in chain(*records)]))
    assert_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


class Counts(nn.Linear):
    """Outputs that depend on the number of passes."""

    passes = 0

    def forward(self, input: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(input) * (1 + 1 / self.passes)


def test_models_that_share_or_keep_state_do_not_train_in_parallel() -> None:
    hooked, drawn = nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    seen: list[Tensor] = []
    hooked.register_forward_hook(lambda *args: seen.append(args[2]))
    for module, safe in ((hooked, False), (Counts(6, 3), False), (drawn, True), (Coupled(), True)):
        problem = random_task(module, [4, 4], inputs=6, classes=3, cohort=2, batch_size=4)
        assert simulation("sequential", problem=problem).program.objective.model.thread_safe == safe


def test_clients_in_parallel_have_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last client of three, too, which trains alone: its bits must not depend on packing."""
    monkeypatch.setattr("fedzmg.engine.sequential.CHUNK_BYTES", 1)
    monkeypatch.setattr("fedzmg.engine.sequential.TOGETHER", 2)
    seen: list[int] = []

    class Notes(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            return super().forward(input)

    problem = random_task(Notes(6, 3), [4, 4, 4], inputs=6, classes=3, cohort=3, batch_size=4)
    with threads(2):
        built = simulation(EngineChoice("sequential", "", parallel=2), problem=problem)
        batches, sent = built.planner.batches(1), built.broadcast(1, built.snapshot)
        seen.clear()
        assert [len(chunk.batches) for chunk in built.engine.train(batches, sent, ())] == [2, 1]
        assert torch.get_num_threads() == 2
    assert seen == [1, 1, 1]


def test_an_error_in_one_of_several_clients_in_parallel_names_it() -> None:
    class Fails(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if self.training and len(input) == 3:
                raise ZeroDivisionError("mine")
            return super().forward(input)

    problem = random_task(Fails(6, 3), [4, 3, 4], inputs=6, classes=3, cohort=3, batch_size=4)
    built = simulation(EngineChoice("sequential", "", parallel=2), problem=problem)
    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        built.run_round()
    assert "local step 1" in raised.value.__notes__[0]


def test_unknown_engine_and_device_are_rejected() -> None:
    with pytest.raises(InputError, match=r"'vectorised'.*'vectorized'"):
        simulation("vectorised")
    with pytest.raises(InputError, match="'gpu'"):
        simulate(task(), [Trial.of("fedavg")], device="gpu")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'cuda'"):
        simulate(task(), [Trial.of("fedavg")], device="cuda")


@pytest.mark.parametrize("options", [
    {}, {"stride": 2}, {"padding": 2}, {"stride": (1, 2), "padding": (2, 0)}, {"padding": "same"},
    {"dilation": 2}, {"groups": 2}, {"stride": [2], "padding": [1]},
])  # fmt: skip
def test_mapped_convolutions_are_the_same_convolutions(options: dict[str, Any]) -> None:
    x, b = torch.randn(5, 4, 9, 8, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    w = torch.randn(6, 4 // options.get("groups", 1), 3, 3, dtype=torch.float64)
    before = torch.backends.mkldnn.enabled
    for bias in (b, None):
        expected = nn.functional.conv2d(x, w, bias, **options)
        for enabled in (True, False):
            with onednn(enabled), MappedLayers():
                assert torch.backends.mkldnn.enabled == enabled
                found = nn.functional.conv2d(x, w, bias, **options)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.backends.mkldnn.enabled == before


class Tight(EnginePlanner):
    """Planner for a device that is full above some number of clients."""

    def __init__(self, room: int) -> None:
        super().__init__("vectorized")
        self.room = room

    def build(self, program: Program) -> Engine:
        engine, room = super().build(program), self.room

        class Full:
            def train(self, *args: Any) -> Iterator[Chunk]:
                for chunk in engine.train(*args):
                    if len(chunk.batches) > room:
                        raise torch.OutOfMemoryError("no room")
                    yield chunk

        return Full()


def test_running_out_of_memory_halves_the_chunk_and_loses_nothing() -> None:
    roomy, tight = simulation("vectorized", trials=2), simulation(Tight(3), trials=2)
    expected = [roomy.run_round().records for _ in range(2)]
    got = [tight.run_round().records for _ in range(2)]
    assert tight.chunk == 2, "8 clients do not fit, 4 do not, 2 do"
    for a, b in zip(chain(*got), chain(*expected), strict=True):
        assert a._replace(seconds=0) == b._replace(seconds=0)
    assert_equal(roomy.snapshot.params, tight.snapshot.params)
    with pytest.raises(InputError, match="2 clients"):
        simulation(Tight(0)).run_round()


def test_models_that_do_not_fit_together_are_evaluated_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roomy, tight = simulation("vectorized", trials=7), simulation("vectorized", trials=7)
    whole, asked = rounds.evaluate, list[int]()

    def narrow(params: Tree, *rest: object, **chunk: int) -> torch.Tensor:
        asked.append(len(next(iter(params.values()))))
        if asked[-1] > 2:
            raise torch.OutOfMemoryError("no room")
        return whole(params, *rest, **chunk)  # type: ignore[arg-type]

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


def undecided() -> Task:
    """Make a task whose model decides by a hidden value, which cannot be mapped over clients."""

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = m.first(x)
        # Always the same way: a decision that changes with the batch would be rejected before.
        return m.second(hidden if bool(hidden.sum() > -1e9) else hidden.relu())

    net = Net(run, first=nn.Linear(6, 5), second=nn.Linear(5, 3))
    return random_task(net, list(SIZES), inputs=6, classes=3, cohort=4, batch_size=4)


def test_a_model_that_does_not_map_is_trained_by_the_loop() -> None:
    with pytest.raises(InputError, match="engine='sequential'"):
        simulate(undecided(), Trial.of("fedzmg"), rounds=1, engine="vectorized")
    looped = simulation("auto", rounds=1000, trials=2, problem=undecided())
    [history, _] = looped.histories([[], []])
    assert history.engine == looped.choice
    assert looped.choice.reason in repr(history)
    assert (looped.choice.path, looped.choice.fallback) == ("sequential", True)
    assert "engine=" not in looped.choice.reason  # advice for those who chose a path
    assert len(looped.run_round().records) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["sequential", "vectorized", "cuda_graph", "compiled"])
@pytest.mark.parametrize("name", ["fedzmg", "fedadam"])
def test_gpu_agrees_with_cpu(engine: str, name: str) -> None:
    trials = [Trial.of(name, seed) for seed in (0, 1)]
    here, there = (
        simulate(task(0.4), trials, rounds=2, engine=e, dtype=torch.float64, device=device)  # type: ignore[arg-type]
        for e, device in (("sequential", "cpu"), (engine, "cuda"))
    )
    for a, b in zip(here, there, strict=True):
        assert_equal(a.params, b.params, atol=1e-9)


def small_workload(name: str) -> Task:
    built = WORKLOADS[name](clients=10)
    return replace(built, protocol=replace(built.protocol, epochs=1, cohort=4))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("engine", ["cuda_graph", "compiled_cuda_graph"])
@pytest.mark.parametrize("name", ["cifar100", "shakespeare"])
def test_a_round_of_the_papers_models_on_a_gpu(name: str, engine: str, precision: str) -> None:
    """Against the loop over clients; differences are measured in lengths of the round's step.

    Rounding is amplified by momentum and by units that switch: a wrong kernel is off by about one.
    """
    few = small_workload(name)
    start = initial_params(few.model, few.init, 0)

    def moved(engine: Any, precision: Any) -> torch.Tensor:
        [history] = simulate(
            few, Trial.of("fedzmg", client_lr=0.01), rounds=1, engine=engine, device="cuda",
            precision=precision,
        )  # fmt: skip
        return torch.cat([(history.params[n].cpu() - p).flatten() for n, p in start.items()])

    reference = moved("sequential", "float32")
    difference = (moved(engine, precision) - reference).norm() / reference.norm()
    assert difference < {"float32": 5e-3, "tf32": 8e-2, "bf16": 2e-1}[precision]


@pytest.mark.gpu
def test_packed_equals_alone_on_a_gpu() -> None:
    few = small_workload("cifar100")
    trials = [Trial.of("fedzmg", seed, client_lr=0.01) for seed in range(3)]
    exact: Any = {"engine": "cuda_graph", "device": "cuda", "precision": "float32"}
    packed = simulate(few, trials, rounds=1, **exact)
    for trial, together in zip(trials, packed, strict=True):
        [alone] = simulate(few, trial, rounds=1, **exact)
        assert_equal(alone.params, together.params, atol=5e-4)


@pytest.mark.gpu
def test_auto_on_a_gpu_replays_graphs_and_takes_the_loop_for_short_trainings() -> None:
    built = simulation("auto", rounds=2000, device=GPU)
    assert (built.choice.path, built.chunk) == ("cuda_graph", None)
    assert simulation("auto", rounds=1, device=GPU).choice.path == "sequential"
    looped = simulation("auto", rounds=2000, problem=undecided(), device=GPU)
    assert looped.choice.path == "sequential"
    assert "cannot be mapped" in looped.choice.reason


def double(x: Tensor) -> Tensor:
    return 2 * x


@pytest.fixture
def tags(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def watched(graph: Any, inputs: Any) -> Any:
        seen.append(torch.compiler.config.cache_key_tag)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", watched)
    return seen


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch
def test_compiled_code_is_kept_under_all_that_it_depends_on(
    tags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled() -> None:
        assert torch.equal(compile_apart(double)(torch.ones(3)), 2 * torch.ones(3))

    compiled()
    compiled()
    monkeypatch.setattr(convolution, "_chosen", {("some shape",): "kernels"})
    compiled()
    monkeypatch.setattr(convolution, "_chosen", {("some shape",): "grouped"})
    compiled()
    with same_bits(True):
        compiled()
    with torch.compiler.config.patch(cache_key_tag="the user's"):
        compiled()
    assert tags[0] == tags[1]
    assert len(set(tags)) == 5
    assert tags[-1].startswith("the user's fedzmg ")
    assert torch.compiler.config.cache_key_tag == ""


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize("graph", [False, True])
def test_a_probe_that_runs_out_of_memory_is_repeated_in_halves(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, graph: bool
) -> None:
    """A full device says nothing about the model, which can be mapped."""

    def full(engine: Any, probe: Probe) -> float:
        if isinstance(engine, Sequential):
            return 1e-2
        if (engine.cuda_graph or not graph) and (engine.chunk or len(probe.batches)) > 2:
            raise torch.OutOfMemoryError("no room")
        return 1e-5

    for module in (choose, timings):
        monkeypatch.setattr(module, "pass_seconds", full)
    built = simulation("vectorized")
    planner = EnginePlanner()
    program = replace(built.program, device=device)
    if device == GPU:  # a short training is over before a graph is made
        planner.plan(program, built.probe, trials=1, rounds_left=1)
        assert planner.choice.path == "sequential"
    planner.plan(program, built.probe, trials=1, rounds_left=100)
    assert planner.choice.path == ("cuda_graph" if device == GPU else "vectorized")
    assert planner.chunk == (2 if device == GPU or not graph else None)
    monkeypatch.setattr(choose, "pass_seconds", lambda *_: (_ for _ in ()).throw(
        torch.OutOfMemoryError("no room")
    ))  # fmt: skip
    if device == GPU:
        with pytest.raises(InputError, match="2 clients"):
            EnginePlanner().plan(program, built.probe, trials=1, rounds_left=1)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, whose cache is used")
def test_compiled_kernels_are_loaded_sooner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "GPU")
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3), nn.Flatten())
    images = torch.zeros(6, 1, 7, 7), torch.zeros(6, dtype=torch.int64)
    few = Task.from_arrays(model, *images, [0, 0, 1, 1, 2, 2], test=images, cohort=2)
    built = simulation("sequential", problem=few)
    known = built.program, built.probe()
    assert choose.kernel_seconds(*known) == choose.KERNELS_SECONDS + 2 * choose.CONVOLUTION_SECONDS
    choose._has_made_graph(*known, now=True)
    assert choose.kernel_seconds(*known) == choose.LOADING_SECONDS


def test_a_loop_without_memory_names_client_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    built = simulation("sequential", rounds=1)
    monkeypatch.setattr("fedzmg.engine.sequential.eager_gradient", full)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        built.run_round()
    assert any("client" in note and "step 1" in note for note in caught.value.__notes__)


def test_buffers_that_did_not_fit_are_released_before_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The traceback of an error holds the variables of the functions that it passed."""
    alive: list[weakref.ref[torch.Tensor]] = []
    built, launch = simulation("vectorized", rounds=1), Simulation._launch_once

    def full(self: Simulation, *args: Any) -> Any:
        if self.chunk == 2:
            return launch(self, *args)
        buffers = torch.zeros(3)
        alive.append(weakref.ref(buffers))
        raise torch.OutOfMemoryError("no room")

    def halve(*_: Any) -> None:
        assert [there() for there in alive] == [None] * len(alive)
        built.engines.chunk = 2

    monkeypatch.setattr(Simulation, "_launch_once", full)
    monkeypatch.setattr(built.engines, "halve", halve)
    built.run_round()
    assert len(alive) == 1


def test_a_cpu_without_memory_for_two_clients_trains_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(self: Vectorized, *_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Vectorized, "_train_sorted", full)
    choice = simulation("auto", rounds=1000).choice
    assert (choice.path, choice.fallback) == ("sequential", False)
    with pytest.raises(InputError, match="2 clients"):
        simulation("vectorized").run_round()
