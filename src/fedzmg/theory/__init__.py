"""The theory of FedZMG as programs: predicted numbers, measured numbers and verdicts.

Every check is a pure function of a :class:`Size` with its own seeds. ``T1`` to ``T12`` test the
paper's claims, ``E1`` to ``E9`` go beyond them. ``docs/theory.md`` derives the predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Lock

import torch

from fedzmg.errors import unknown
from fedzmg.theory import bound, convergence, extensions, geometry, logistic, networks, nonconvex
from fedzmg.theory.finding import FULL, QUICK, Finding, Size, Value

__all__ = ["CHECKS", "FULL", "QUICK", "Finding", "Size", "Value", "resolve", "run"]

CHECKS: dict[str, Callable[[Size], Finding]] = {
    "T1": geometry.operator,
    "T2": geometry.descent_inequality,
    "T3": geometry.variance,
    "T4": convergence.one_step,
    "T5": convergence.rate,
    "T6": convergence.violated_condition,
    "T7": convergence.weight_decay,
    "T8": convergence.drift,
    "T9": logistic.logistic,
    "T10": bound.constants,
    "T11": networks.column_sums,
    "T12": networks.mean_energy,
    "E1": extensions.restriction,
    "E2": extensions.per_column,
    "E3": extensions.momentum,
    "E4": extensions.participation,
    "E5": extensions.server_rate,
    "E6": extensions.decay_limit,
    "E7": nonconvex.stationary,
    "E8": nonconvex.curvature,
    "E9": nonconvex.adaptive_server,
}


def resolve(names: Sequence[str]) -> list[str]:
    """Return the named checks, in any case; all of them without a name.

    >>> resolve(["t6", "E1"])
    ['T6', 'E1']
    """
    for name in names:
        if name.upper() not in CHECKS:
            raise unknown("check", name, CHECKS, "fedzmg theory --help")
    return list(dict.fromkeys(name.upper() for name in names)) or list(CHECKS)


def run(names: Sequence[str] = (), size: Size = FULL) -> Iterator[Finding]:
    """Run checks, two at a time; yield findings in order of the names.

    Raises:
        InputError: for an unknown name, before anything is computed.
    """
    return _two_at_a_time([CHECKS[name] for name in resolve(names)], size)


_MODEL_LOCK = Lock()
"""Held by checks that build models: a model's test run must not see others draw random numbers."""


def _two_at_a_time(checks: Sequence[Callable[[Size], Finding]], size: Size) -> Iterator[Finding]:
    def result(check: Callable[[Size], Finding]) -> Finding:
        builds = check.__module__ in (networks.__name__, nonconvex.__name__)
        with _MODEL_LOCK if builds else nullcontext():
            return check(size)

    # The matrices are too small for threads within an operation.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(2)
    try:
        yield from pool.map(result, checks)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(before)
