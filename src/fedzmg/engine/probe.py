"""The first round, on which execution paths are timed, and the cores of a CPU that the loop uses.

A small network gains nothing from several threads within an operation, and on a busy machine they
wait for each other. Clients that train side by side, with one thread each, use all cores.
"""

import time
from collections import deque
from typing import NamedTuple

import torch

from fedzmg.data.plan import ClientBatch
from fedzmg.engine.local import Broadcast, Engine, Program
from fedzmg.engine.sequential import Sequential
from fedzmg.models.kernels import threads
from fedzmg.tree import State, row

CHOOSING_SHARE = 0.04  # share of a training on a CPU for timing its paths; in all, below 0.05
CHOOSING_SECONDS = 1.0  # most time for it: mapping helps networks of short steps, which need less
PROBE_STEPS = 2  # local steps of a timed pass at least
ONE_THREAD = 1.03  # slow-down of the loop on a CPU by one thread up to which one is taken
WORKERS_SPEEDUP = 1.1  # speed-up by clients side by side from which on they are
MOST_WORKERS = 16  # clients side by side, which are in memory at once


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
        """Steps of all clients together."""
        return sum(len(b.stream) for b in self.batches)

    @property
    def steps(self) -> int:
        """Steps of the longest local training."""
        return max((len(b.stream) for b in self.batches), default=0)


class Cores(NamedTuple):
    """How a CPU trains."""

    threads: int = 0  # of torch; 0: as many as it is set to use
    workers: int = 1  # clients of the loop side by side, with one thread each


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
    """Time the loop with all threads, with one, and with clients side by side, by the wall clock.

    Threads that wait for other work on a busy machine do much harm.
    """
    every, part = torch.get_num_threads(), probe.first_steps(PROBE_STEPS)
    workers = min(every, MOST_WORKERS, len(part.batches))
    if program.objective.model.seeds_generators:  # which all threads share
        workers = 1
    if every == 1 or CHOOSING_SHARE / 2 * rounds_left * probe.client_steps < 7 * PROBE_STEPS:
        return Cores()
    alone = Sequential(program, subtracts=False)
    ways = {"all": (every, alone, part.longest(1)), "one": (1, alone, part.longest(1))}
    if workers > 1:
        beside = Sequential(program, subtracts=False, workers=workers)
        ways["workers"] = 1, beside, part.longest(workers)
    seconds = dict.fromkeys(("all", "one", "workers"), float("inf"))
    pass_seconds(alone, ways["all"][2])  # the first one of a process loads libraries
    for _ in range(2):
        for name, (number, engine, own) in ways.items():
            began = time.perf_counter()
            with threads(number):
                pass_seconds(engine, own)
            each = (time.perf_counter() - began) / len(own.batches)
            seconds[name] = min(seconds[name], each)
        if sum(seconds.values()) > CHOOSING_SECONDS / 4:
            break
    one = seconds["one"] <= ONE_THREAD * seconds["all"]
    gains = WORKERS_SPEEDUP * seconds["workers"] <= seconds["one" if one else "all"]
    return Cores(int(one), workers if gains else 1)
