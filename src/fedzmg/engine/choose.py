"""Pick an engine by measurement, on one trial's round whatever the number of trials.

Processors take the same path for a trial alone and in a pack, so that its bits are the same. On a
GPU they are not anyway, and the number of trials decides whether compiling pays. The choice is
recorded with a run and kept when it resumes, because another execution path moves the last bits.
For the same reason a processor leaves its usual path only for one that is clearly faster: what is
nearly as fast must not win on one day and lose on the next.
"""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from fedzmg.data.plan import ClientBatch
from fedzmg.engine.round import Broadcast, Engine, Program
from fedzmg.engine.sequential import Sequential
from fedzmg.engine.vectorized import Vectorized
from fedzmg.errors import InputError, unknown
from fedzmg.models.kernels import ONEDNN_BY_DEFAULT, onednn
from fedzmg.models.kernels.precision import HAS_TRITON

PathName = Literal["sequential", "vectorized", "captured", "compiled"]

COMPILE_SECONDS = 30.0
"""What compiling a step costs on a small machine; seen: 10 s for a small CNN, 23 s for an MLP."""
COMPILE_GAIN = 0.3
"""Share of the mapped step's time that compiling saves; seen: 0.05 for a CNN, 0.4 for an MLP."""
CARD_GAIN = 0.6
"""The same of a step replayed on a GPU; seen on an H200: 0.65 for the paper's CIFAR-100 network."""
PACKED_COST = 0.5
"""Of a trial alone, what it costs a GPU in a large pack; seen: 0.48 for the same."""

PROBE_STEPS = 2
USUAL: tuple[PathName, bool] = ("vectorized", True)
"""Clients mapped, with oneDNN, whose kernels lose least where processors are busy."""
PASSES = 3
"""Timed, after one that warms up; the fastest counts."""
CLEARLY = 1.25
"""How many times faster than the usual path another one must be."""

Probe = Callable[[], tuple[list[ClientBatch], Broadcast, Any]]


@dataclass(frozen=True)
class EngineChoice:
    """An execution path and why it was taken."""

    path: PathName
    reason: str
    onednn: bool = ONEDNN_BY_DEFAULT

    def build(self, program: Program, chunk: int | None = None) -> Engine:
        """The engine that follows this path."""
        if self.path == "sequential":
            return Sequential(program)
        on_card = program.device.type == "cuda"
        return Vectorized(
            program,
            chunk=chunk,
            compiled=self.path == "compiled",
            captured=self.path == "captured" or (self.path == "compiled" and on_card),
        )


def choose(
    name: str,
    program: Program,
    rounds_left: int,
    probe: Probe,
    *,
    trials: int = 1,
    trainings: int = 1,
) -> EngineChoice:
    """The named path, or for ``auto`` the fastest one as measured on this machine.

    Args:
        name: a path or ``auto``.
        program: what to train.
        rounds_left: rounds to come.
        probe: one trial's round.
        trials: how many trials train together.
        trainings: how many of this length and width are planned, this one included; on a GPU they
            share the compiled losses.

    Raises:
        InputError: for an unknown name.
    """
    if name in get_args(PathName):
        return EngineChoice(name, "asked for")  # type: ignore[arg-type]
    if name != "auto":
        raise unknown("engine", name, ["auto", *get_args(PathName)])
    if program.device.type == "cuda":
        return _on_card(program, rounds_left, probe, trials, trainings)
    entries, sent, memory = probe()
    short = [e._replace(stream=e.stream[:PROBE_STEPS]) for e in entries]
    found: dict[tuple[PathName, bool], float] = {}
    engines: dict[PathName, Engine] = {
        "sequential": Sequential(program),
        "vectorized": Vectorized(program),
    }
    # By turns, so that a busy moment of the machine is not held against one of them.
    for turn in range(1 + PASSES):
        for path, flag in itertools.product(engines, (True, False)):
            try:
                with onednn(flag):
                    took = _pass(engines[path], short, sent, memory)
            except InputError as error:
                if path == "sequential":
                    raise
                return EngineChoice("sequential", str(error))
            if turn > 0:
                found[path, flag] = min(took, found.get((path, flag), math.inf))
    fastest = min(found, key=found.__getitem__)
    path, flag = fastest if CLEARLY * found[fastest] < found[USUAL] else USUAL
    figures = ", ".join(
        f"{p}{'' if f else ' without oneDNN'} {1e3 * t:.1f} ms" for (p, f), t in found.items()
    )
    figures += f" for {PROBE_STEPS} steps of a cohort"
    if path == "vectorized":
        steps = max((len(e.stream) for e in entries), default=0)
        saved = COMPILE_GAIN * found[path, flag] / PROBE_STEPS * steps * rounds_left
        if saved > 2 * COMPILE_SECONDS and can_compile(program.device):
            reason = f"{figures}; compiling should save {saved:.0f} s"
            return EngineChoice("compiled", reason, flag)
    return EngineChoice(path, figures, flag)


def _on_card(
    program: Program, rounds_left: int, probe: Probe, trials: int, trainings: int = 1
) -> EngineChoice:
    """On a GPU: graphs, compiled where the training is long enough; whatever works, otherwise."""
    entries, sent, memory = probe()
    short = [e._replace(stream=e.stream[:PROBE_STEPS]) for e in entries]
    try:
        mapped = _seconds(Vectorized(program), short, sent, memory)
    except (InputError, RuntimeError) as error:
        reason = f"the model cannot be mapped over clients ({_first_line(error)})"
        return EngineChoice("sequential", reason)
    try:
        replayed = _seconds(Vectorized(program, captured=True), short, sent, memory)
    except RuntimeError as error:
        reason = f"the step cannot be captured as a graph ({_first_line(error)})"
        return EngineChoice("vectorized", reason)
    figures = f"{PROBE_STEPS} steps of a cohort: mapped {1e3 * mapped:.1f} ms, as a graph "
    figures += f"{1e3 * replayed:.1f} ms"
    steps = max((len(e.stream) for e in entries), default=0)
    left = replayed / PROBE_STEPS * steps * rounds_left * (1 + (trials - 1) * PACKED_COST)
    saved = CARD_GAIN * left * trainings
    if saved > COMPILE_SECONDS and can_compile(program.device):
        planned = f" in {trainings} trainings" if trainings > 1 else ""
        return EngineChoice("compiled", f"{figures}; compiling should save {saved:.0f} s{planned}")
    return EngineChoice("captured", figures)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def can_compile(device: torch.device) -> bool:
    """Whether ``torch.compile`` has what it needs here."""
    if device.type == "cuda":
        return HAS_TRITON
    return any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl"))


def _seconds(engine: Engine, entries: list[ClientBatch], sent: Broadcast, memory: Any) -> float:
    """Of the fastest pass."""
    return min([_pass(engine, entries, sent, memory) for _ in range(1 + PASSES)][1:])


def _pass(engine: Engine, entries: list[ClientBatch], sent: Broadcast, memory: Any) -> float:
    began = time.perf_counter()
    for _ in engine.train(entries, sent, memory):
        pass
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began
