"""Time of an execution path with one kind of kernels or another, on a CPU."""

import math
from typing import Literal, NamedTuple

from fedzmg.engine.local import Engine, Program
from fedzmg.engine.probe import Probe, pass_seconds
from fedzmg.engine.sequential import Sequential
from fedzmg.engine.vectorized import Vectorized
from fedzmg.kernels import channels_last, onednn, threads

PathName = Literal["sequential", "vectorized", "compiled", "cuda_graph", "compiled_cuda_graph"]
CLEAR_SPEEDUP = 1.07  # speed-up of the loop that other kernels need to be taken


class Way(NamedTuple):
    """A path with its kernels on a CPU."""

    path: PathName
    onednn: bool
    channels_last: bool = False

    def __str__(self) -> str:
        without = "" if self.onednn else " without oneDNN"
        return f"{self.path}{without}{' channels last' * self.channels_last}"


LOOP = Way("sequential", onednn=True)


class Timings:
    """Seconds per step and client of the paths on a CPU, each on a part of the probe."""

    def __init__(self, program: Program, chunk: int | None, gain: float = 1.0) -> None:
        self.parts: dict[PathName, Probe] = {}
        self._gains: dict[PathName, float] = {"sequential": gain, "vectorized": 1.0}
        self._engines: dict[PathName, Engine] = {
            "sequential": Sequential(program, subtracts=False),
            "vectorized": Vectorized(program, chunk=chunk),
        }
        self._warm: set[Way] = set()
        self.best: dict[Way, float] = {}
        self.spent = 0.0

    def warm_up(self, way: Way) -> float:
        """Run a step; return its seconds per client."""
        self._warm.add(way)
        return self._run(way, self.parts[way.path].first_steps(1))

    def time(self, way: Way) -> float:
        """Time a pass after a warm-up; return the least seconds so far."""
        if way not in self._warm:
            self.warm_up(way)
        self.best[way] = min(self._run(way, self.parts[way.path]), self.best.get(way, math.inf))
        return self.best[way]

    def _run(self, way: Way, part: Probe) -> float:
        gain = self._gains[way.path]
        with onednn(way.onednn), channels_last(way.channels_last), threads(int(gain > 1)):
            try:
                seconds = pass_seconds(self._engines[way.path], part)
            except RuntimeError:
                if way.channels_last:  # ``view`` needs the usual format
                    return math.inf
                raise
        self.spent += seconds
        return seconds / gain / part.client_steps

    def cost(self, way: Way) -> float:
        """Return the seconds of a pass."""
        return self.best[way] * self._gains[way.path] * self.parts[way.path].client_steps

    def __str__(self) -> str:
        known = ((way, each) for way, each in self.best.items() if each < math.inf)
        times = (f"{way} {1e3 * each:.3g} ms" for way, each in known)
        several = ", the loop with clients in parallel" if self._gains["sequential"] > 1 else ""
        return f"{', '.join(times)} per step of a client{several}"


def clearly_best(times: dict[Way, float]) -> Way:
    """Return the fastest of several ways if it clearly beats the first one, or else that."""
    first, best = next(iter(times)), min(times, key=times.__getitem__)
    return best if times[first] > CLEAR_SPEEDUP * times[best] else first
