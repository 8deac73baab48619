"""Pick an engine by measurement, on one trial's round whatever the number of trials.

The choice is recorded with a run and kept when it resumes, because another execution path moves
the last bits.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from fedzmg.data.plan import Entry
from fedzmg.engine.round import Broadcast, Engine, Program
from fedzmg.engine.sequential import Sequential
from fedzmg.engine.vectorized import Vectorized
from fedzmg.errors import unknown
from fedzmg.models.kernels import ONEDNN_BY_DEFAULT, onednn

Path = Literal["sequential", "vectorized", "compiled"]

COMPILE_SECONDS = 30.0
"""What compiling a step costs on a small machine; seen: 10 s for a small CNN, 23 s for an MLP."""
COMPILE_GAIN = 0.3
"""Share of the mapped step's time that compiling saves; seen: 0.05 for a CNN, 0.4 for an MLP."""

PROBE_STEPS = 2

Probe = Callable[[], tuple[list[Entry], Broadcast, Any]]


@dataclass(frozen=True)
class EngineChoice:
    """An execution path and why it was taken."""

    path: Path
    reason: str
    onednn: bool = ONEDNN_BY_DEFAULT

    def build(self, program: Program, chunk: int | None = None) -> Engine:
        """The engine that follows this path."""
        if self.path == "sequential":
            return Sequential(program)
        return Vectorized(program, chunk=chunk, compiled=self.path == "compiled")


def choose(name: str, program: Program, rounds_left: int, probe: Probe) -> EngineChoice:
    """The named path, or for ``auto`` the fastest one as measured on this machine.

    Raises:
        InputError: for an unknown name.
    """
    if name in get_args(Path):
        return EngineChoice(name, "asked for")  # type: ignore[arg-type]
    if name != "auto":
        raise unknown("engine", name, ["auto", *get_args(Path)])
    entries, sent, memory = probe()
    short = [e._replace(stream=e.stream[:PROBE_STEPS]) for e in entries]
    found: dict[tuple[Path, bool], float] = {}
    engines: dict[Path, Engine] = {
        "sequential": Sequential(program),
        "vectorized": Vectorized(program),
    }
    for path, engine in engines.items():
        for flag in (True, False) if program.device.type == "cpu" else (True,):
            with onednn(flag):
                found[path, flag] = _seconds(engine, short, sent, memory)
    path, flag = min(found, key=found.__getitem__)
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


def can_compile(device: torch.device) -> bool:
    """Whether ``torch.compile`` has what it needs here."""
    if device.type == "cuda":
        return torch.utils._triton.has_triton()
    return any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl"))


def _seconds(engine: Engine, entries: list[Entry], sent: Broadcast, memory: Any) -> float:
    """Best of three timed passes, after one that warms up."""
    best = float("inf")
    for attempt in range(4):
        began = time.perf_counter()
        for _ in engine.train(entries, sent, memory):
            pass
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if attempt:
            best = min(best, time.perf_counter() - began)
    return best
