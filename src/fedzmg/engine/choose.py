"""Choose the execution path and the chunk size of a training, and build its engine.

The path is measured on one trial's round, whatever the number of trials. On a CPU a trial takes
the same path alone and in a pack, so its bits are the same. On a GPU they are not anyway, and the
number of trials decides whether compiling pays. The choice is recorded with a run and kept when it
resumes, because another path changes the last bits. For the same reason a CPU leaves its default
path only for one that is clearly faster.
"""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from fedzmg.data.plan import ClientBatch
from fedzmg.engine.local import Broadcast, Engine, Program, Sequential
from fedzmg.engine.vectorized import MIN_WIDTH, Vectorized
from fedzmg.errors import InputError, unknown
from fedzmg.models.kernels import ONEDNN_BY_DEFAULT, onednn
from fedzmg.models.kernels.precision import HAS_TRITON
from fedzmg.tree import State, num_bytes, row

PathName = Literal["sequential", "vectorized", "compiled", "cuda_graph", "compiled_cuda_graph"]
EngineName = Literal["auto", PathName]

COMPILE_SECONDS = 30.0
"""Time to compile a step on a small machine (measured: 10 s for a small CNN, 23 s for an MLP)."""
COMPILE_GAIN = 0.3
"""Share of a mapped step's time that compiling saves (measured: CNN 0.05, MLP 0.4)."""
GRAPH_COMPILE_GAIN = 0.6
"""The same for a CUDA graph (measured: 0.65 for the paper's CIFAR-100 network on an H200)."""
PACKED_COST = 0.5
"""Cost of a packed trial relative to a lone one on a GPU (measured: 0.48)."""

PROBE_STEPS = 2
DEFAULT_PATH: tuple[PathName, bool] = ("vectorized", True)
"""Clients mapped, with oneDNN, whose kernels slow down least on a busy CPU."""
TIMED_PASSES = 3
"""Passes timed after one warm-up pass; the fastest counts."""
CLEAR_SPEEDUP = 1.25
"""Speed-up over the default path that another path needs to be chosen."""

MEMORY_SHARE = 0.85
"""Share of the free GPU memory for clients; the rest is for evaluation and fragmentation."""
ENOUGH_BYTES = 1.25e9
"""Weights of clients that train at once, in bytes. More clients are hardly faster (measured on an
H200: 0.069 ms a step at 0.9 GB, 0.065 at 2.4, 0.063 at 7), and a pack that loses trials shrinks by
small chunks."""


class Probe(NamedTuple):
    """One trial's first round, on which engines are timed."""

    batches: list[ClientBatch]
    broadcast: Broadcast
    memory: State

    def first_steps(self, steps: int) -> Probe:
        """Shorten every client's training."""
        return self._replace(batches=[b._replace(stream=b.stream[:steps]) for b in self.batches])

    @property
    def steps(self) -> int:
        """Steps of the longest local training."""
        return max((len(b.stream) for b in self.batches), default=0)


@dataclass(frozen=True)
class EngineChoice:
    """An execution path and the reason for it."""

    path: PathName
    reason: str
    onednn: bool = ONEDNN_BY_DEFAULT


class EnginePlanner:
    """Decides the execution path and the chunk size of a training, and builds its engine.

    Args:
        engine: a path, ``auto``, or the choice that a run has recorded. On a GPU a compiled step is
            always replayed from a CUDA graph, so ``compiled`` means ``compiled_cuda_graph`` there.
        chunk: clients that train at once at most; None: all of a round, or as many as fit on a GPU.
        trainings: planned trainings of this length and width; on a GPU they share compiled losses.
        backend: compiler backend.
    """

    choice: EngineChoice
    """Set by :meth:`plan`."""

    def __init__(
        self,
        engine: EngineName | EngineChoice = "auto",
        *,
        chunk: int | None = None,
        trainings: int = 1,
        backend: str = "inductor",
    ) -> None:
        self.engine, self.chunk = engine, chunk
        self.trainings, self.backend = trainings, backend

    def plan(
        self,
        program: Program,
        probe: Callable[[], Probe],
        *,
        trials: int,
        rounds_left: int,
        clients: int | None = None,
        rows: int = 0,
    ) -> None:
        """Decide; a probe that does not fit on the device is repeated in smaller chunks.

        ``clients`` is the largest number of clients that a round may have, by default the probe's.
        ``rows`` copies of all their updates are kept until they are merged.
        """
        while True:
            try:
                self.choice = self._choose(program, probe, trials, rounds_left)
                if self.chunk is None and self.choice.path != "sequential":
                    own = probe()
                    total = clients or trials * len(own.batches)
                    limit = clients_that_fit(program, own, rows * total)
                    if limit is not None and total > limit:
                        # The fewest chunks, of equal size: few widths to compile.
                        self.chunk = math.ceil(total / math.ceil(total / limit))
                return
            except torch.OutOfMemoryError:
                self.halve(len(probe().batches), program.device)
                torch.cuda.empty_cache()

    def _choose(
        self, program: Program, probe: Callable[[], Probe], trials: int, rounds_left: int
    ) -> EngineChoice:
        if isinstance(self.engine, EngineChoice):
            return self.engine
        on_gpu, path = program.device.type == "cuda", self.engine
        if path not in get_args(EngineName):
            raise unknown("engine", path, get_args(EngineName))
        if path != "auto":
            path = "compiled_cuda_graph" if path == "compiled" and on_gpu else path
            return EngineChoice(path, "asked for")
        if on_gpu:
            work = rounds_left * self.trainings * (1 + (trials - 1) * PACKED_COST)
            return choose_on_gpu(program, probe(), work, self.chunk)
        return choose_on_cpu(program, probe(), rounds_left, self.chunk)

    def build(self, program: Program) -> Engine:
        """Build the chosen engine."""
        path = self.choice.path
        if path == "sequential":
            return Sequential(program)
        return Vectorized(
            program,
            chunk=self.chunk,
            compiled=path.startswith("compiled"),
            cuda_graph=path.endswith("cuda_graph"),
            backend=self.backend,
        )

    def halve(self, clients: int, device: torch.device) -> None:
        """Train half as many clients at once, after a chunk did not fit on the device."""
        now = self.chunk or clients
        if now <= MIN_WIDTH:
            raise InputError(
                f"{device} has too little memory for {MIN_WIDTH} clients of this task: train fewer "
                "runs at once, or use a smaller batch_size or --device cpu"
            ) from None
        self.chunk = max(MIN_WIDTH, -(-now // 2))


def choose_on_cpu(
    program: Program, probe: Probe, rounds_left: int, chunk: int | None = None
) -> EngineChoice:
    """Time the paths on this CPU and take the fastest one, as described above."""
    short = probe.first_steps(PROBE_STEPS)
    found: dict[tuple[PathName, bool], float] = {}
    engines: dict[PathName, Engine] = {
        "sequential": Sequential(program),
        "vectorized": Vectorized(program, chunk=chunk),
    }
    # Paths alternate, so that a busy moment of the machine slows all of them down.
    for timed in range(1 + TIMED_PASSES):
        for path, flag in itertools.product(engines, (True, False)):
            try:
                with onednn(flag):
                    seconds = _pass_seconds(engines[path], short)
            except InputError as error:
                if path == "sequential":
                    raise
                return EngineChoice("sequential", str(error))
            if timed:
                found[path, flag] = min(seconds, found.get((path, flag), math.inf))
    fastest = min(found, key=found.__getitem__)
    clearly = CLEAR_SPEEDUP * found[fastest] < found[DEFAULT_PATH]
    path, flag = fastest if clearly else DEFAULT_PATH
    times = [f"{p}{'' if f else ' without oneDNN'} {1e3 * t:.1f} ms" for (p, f), t in found.items()]
    figures = f"{', '.join(times)} for {PROBE_STEPS} steps of a cohort"
    saved = COMPILE_GAIN * found[path, flag] / PROBE_STEPS * probe.steps * rounds_left
    if path == "vectorized" and saved > 2 * COMPILE_SECONDS and can_compile(program.device):
        return EngineChoice("compiled", f"{figures}; compiling should save {saved:.0f} s", flag)
    return EngineChoice(path, figures, flag)


def choose_on_gpu(
    program: Program, probe: Probe, work: float, chunk: int | None = None
) -> EngineChoice:
    """Take CUDA graphs, compiled if the training is long enough; a slower path if they fail.

    ``work`` counts the rounds of a single trial that would take as long as all that is left.
    """
    short = probe.first_steps(PROBE_STEPS)
    seconds: list[float] = []
    fallbacks: dict[PathName, str] = {
        "sequential": "the model cannot be mapped over clients",
        "vectorized": "the step cannot be captured as a CUDA graph",
    }
    for slower, problem in fallbacks.items():
        engine = Vectorized(program, chunk=chunk, cuda_graph=slower == "vectorized")
        try:
            passes = [_pass_seconds(engine, short) for _ in range(1 + TIMED_PASSES)]
        except torch.OutOfMemoryError:
            raise  # a RuntimeError, too, but it says nothing about the model
        except (InputError, RuntimeError) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            return EngineChoice(slower, f"{problem} ({first_line})")
        seconds.append(min(passes[1:]))
    times = f"mapped {1e3 * seconds[0]:.1f} ms, as a graph {1e3 * seconds[1]:.1f} ms"
    figures = f"{times} for {PROBE_STEPS} steps of a cohort"
    saved = GRAPH_COMPILE_GAIN * seconds[1] / PROBE_STEPS * probe.steps * work
    if saved > COMPILE_SECONDS and can_compile(program.device):
        reason = f"{figures}; compiling should save {saved:.0f} s"
        return EngineChoice("compiled_cuda_graph", reason)
    return EngineChoice("cuda_graph", figures)


def can_compile(device: torch.device) -> bool:
    """Tell whether ``torch.compile`` has the tools that it needs here."""
    if device.type == "cuda":
        return HAS_TRITON
    return any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl"))


def _pass_seconds(engine: Engine, probe: Probe) -> float:
    began = time.perf_counter()
    deque(engine.train(*probe), maxlen=0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def clients_that_fit(program: Program, probe: Probe, updates: int = 0) -> int | None:
    """Compute how many clients should train at once on a GPU; None: no limit is known.

    ``updates`` of the size of the model have to fit besides.

    One step of few clients and one of a cohort are run. The difference of their peaks is the memory
    that clients take. The buffers of a CUDA graph hold each client's state once more.
    """
    clients = len(probe.batches)
    few = max(MIN_WIDTH, clients // 2)
    if program.device.type != "cuda" or clients <= few:
        return None
    engine, short = Vectorized(program), probe.first_steps(1)
    part = Probe(short.batches[:few], short.broadcast, row(short.memory, slice(few)))
    low, high = _peak_bytes(engine, part), _peak_bytes(engine, short)
    model = num_bytes(probe.broadcast.params) // len(probe.broadcast.round)
    each = max((high - low) / (clients - few), model) + 3 * model
    free, _ = torch.cuda.mem_get_info(program.device)
    idle = torch.cuda.memory_reserved(program.device) - torch.cuda.memory_allocated(program.device)
    room = MEMORY_SHARE * (free + idle - updates * model) / each
    return max(MIN_WIDTH, math.floor(min(room, max(ENOUGH_BYTES / model, clients))))


def _peak_bytes(engine: Vectorized, probe: Probe) -> int:
    device = engine.program.device
    deque(engine.train(*probe), maxlen=0)  # libraries allocate their workspaces
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    deque(engine.train(*probe), maxlen=0)
    return torch.cuda.max_memory_allocated(device) - before
