"""The first round, on which execution paths are timed, and the cores of a CPU that the loop uses.

In a small network, several threads per operation are not faster than one, and on a busy machine
they wait for each other. Clients that train in parallel, with one thread each, use all cores.
"""

import math
import time
from collections import deque
from typing import NamedTuple

import torch

from fedzmg.data.plan import ClientBatch
from fedzmg.engine.local import Broadcast, Engine, Program
from fedzmg.engine.sequential import TOGETHER_BYTES, Sequential
from fedzmg.kernels import threads
from fedzmg.tree import State, num_bytes, row

CHOOSING_SHARE = 0.032  # share of a training on a CPU for timing its paths
THREADS_SHARE = 0.008  # the same, for timing threads of the map
CHOOSING_SECONDS = 1.0  # limit: mapping helps networks with short steps, which need less time
PROBE_STEPS = 2  # local steps of a timed pass at least
ONE_THREAD = 1.03  # slow-down by one thread up to which one is taken, for the loop and the map
PARALLEL_SPEEDUP = 1.1  # least speed-up for which clients train in parallel
SHORT_STEP = 0.003  # seconds below which Python takes most of a step, and threads wait for it
MOST_PARALLEL = 16  # clients in parallel; all are in memory


class Probe(NamedTuple):
    """One trial's first round, on which engines are timed."""

    batches: list[ClientBatch]
    broadcast: Broadcast
    memory: State

    def first_steps(self, steps: int) -> "Probe":
        """Shorten every client's training."""
        return self._replace(batches=[b._replace(stream=b.stream[:steps]) for b in self.batches])

    def longest(self, clients: int) -> "Probe":
        """Keep the clients with the longest training."""
        lengths = [-len(b.stream) for b in self.batches]
        kept = sorted(sorted(range(len(lengths)), key=lengths.__getitem__)[:clients])
        chosen = [self.batches[i] for i in kept]
        return self._replace(batches=chosen, memory=row(self.memory, kept))

    @property
    def client_steps(self) -> int:
        return sum(len(b.stream) for b in self.batches)

    @property
    def steps(self) -> int:
        """Steps of the longest local training."""
        return max((len(b.stream) for b in self.batches), default=0)


class Cores(NamedTuple):
    """Threads of torch and number of clients of the loop in parallel."""

    threads: int = 0  # 0: as many as torch is set to use
    parallel: int = 1  # each with one thread, if more than one
    gain: float = 1.0  # speed-up by clients in parallel over one client with one thread
    seconds: float = 0.0  # spent to find out


def pass_seconds(engine: Engine, probe: Probe) -> float:
    """Train a probe and return the time that it takes."""
    began, processor = time.perf_counter(), time.process_time()
    deque(engine.train(*probe), maxlen=0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter() - began
    # The process's own time leaves out waiting for other processes on a busy machine.
    return min(time.perf_counter() - began, time.process_time() - processor)


def choose_cores(program: Program, probe: Probe, rounds_left: int) -> Cores:
    """Time the loop with all threads, with one, and with clients in parallel, by the wall clock."""
    every, planned = torch.get_num_threads(), rounds_left * probe.client_steps
    model = num_bytes(probe.broadcast.params) // len(probe.broadcast.round)
    # A warm-up and a pass of each way in a third of the share; the training may take as many times
    # less as there are clients in parallel. A second pass confirms the first if there is time.
    budget, fitting = CHOOSING_SHARE / 3 * planned, TOGETHER_BYTES // max(model, 1)
    parallel = min(every, MOST_PARALLEL, len(probe.batches), fitting, int(budget / 4))
    parallel = parallel if parallel > 1 and program.objective.model.thread_safe else 0
    cost, again = ((1 + n * (2 + (parallel > 0))) * max(parallel, 1) for n in (1, 2))
    if every == 1 or (steps := min(PROBE_STEPS, int(budget / cost))) == 0:
        return Cores()
    part, loop = probe.first_steps(steps), Sequential(program, subtracts=False)
    ways = {"all": (every, loop, part.longest(1)), "one": (1, loop, part.longest(1))}
    if parallel:
        several = Sequential(program, subtracts=False, parallel=parallel)
        ways["parallel"] = 1, several, part.longest(parallel)
    seconds = dict.fromkeys(("all", "one", "parallel"), math.inf)
    began = time.perf_counter()
    pass_seconds(loop, probe.first_steps(1).longest(1))  # the first one loads libraries
    for name, (number, engine, own) in [*ways.items()] * (1 + (again * steps <= budget)):
        if time.perf_counter() - began > CHOOSING_SECONDS / 2:
            break
        if engine is not loop and seconds["one"] < SHORT_STEP * steps:
            continue
        try:
            _ = engine is loop or engine.twins  # made once, and not timed
            start = time.perf_counter()
            with threads(number):
                pass_seconds(engine, own)
        except Exception:
            if engine is loop:
                raise
            continue  # too little memory, or a model that cannot be used by several threads
        each = (time.perf_counter() - start) / len(own.batches)
        seconds[name] = min(seconds[name], each)
    one = seconds["one"] <= ONE_THREAD * seconds["all"] < math.inf
    # The last clients of a cohort may leave cores idle.
    idle = math.ceil(len(probe.batches) / max(parallel, 1)) * parallel / len(probe.batches)
    best, spent = seconds["one" if one else "all"], time.perf_counter() - began
    if not PARALLEL_SPEEDUP * idle * seconds["parallel"] <= best < math.inf:
        return Cores(int(one), seconds=spent)
    return Cores(int(one), parallel, seconds["one"] / (idle * seconds["parallel"]), spent)


def threads_of_map(engine: Engine, probe: Probe, rounds_left: int) -> int:
    """Time a step of the map with all threads and with one; return 0 for all, or 1."""
    every, passes = torch.get_num_threads(), 2
    cost = 2 * passes * len(probe.batches)  # steps of clients
    if cost > THREADS_SHARE * rounds_left * probe.client_steps:
        return 1
    part, seconds = probe.first_steps(1), {1: math.inf, every: math.inf}
    for number in (every, 1) * passes:
        start = time.perf_counter()
        with threads(number):
            pass_seconds(engine, part)
        seconds[number] = min(seconds[number], time.perf_counter() - start)
        if seconds[number] > CHOOSING_SECONDS / (2 * passes):  # too long to try: one thread
            break
    return int(not ONE_THREAD * seconds[every] < seconds[1] < math.inf)
