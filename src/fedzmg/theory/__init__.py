"""The theory of FedZMG as programs: predicted numbers, measured numbers and verdicts.

Every check is a pure function of a :class:`Size` with its own seeds. ``T1`` to ``T13`` test the
paper's claims, ``E1`` to ``E11`` go beyond them. ``docs/theory.md`` derives the predictions.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Lock

from fedzmg.errors import check_names
from fedzmg.kernels import threads
from fedzmg.theory import convergence, extensions, lemmas, networks  # noqa: F401
from fedzmg.theory.finding import FULL, QUICK, REGISTERED, Check, Finding, Size, Value

__all__ = ["CHECKS", "FULL", "QUICK", "Finding", "Size", "Value", "resolve", "run"]

_ORDER = sorted(REGISTERED, key=lambda name: (name[0] == "E", int(name[1:])))
CHECKS: dict[str, Check] = {name: REGISTERED[name] for name in _ORDER}
_MODEL_LOCK = Lock()  # a model's test run must not see others draw random numbers


def resolve(names: Sequence[str]) -> list[str]:
    """Return the named checks, in any case; all of them without a name."""
    found = dict.fromkeys(name.upper() for name in names)
    check_names("check", found, CHECKS, "fedzmg theory --help")
    return list(found or CHECKS)


def run(names: Sequence[str] = (), size: Size = FULL) -> Iterator[Finding]:
    """Run checks, two at a time; yield findings in order of the names."""
    checks = [CHECKS[name] for name in resolve(names)]

    def result(check: Check) -> Finding:
        with _MODEL_LOCK if check.__module__ == networks.__name__ else nullcontext():
            return check(size)

    # The matrices are too small for threads within an operation.
    with threads(1), ThreadPoolExecutor(2) as pool:
        yield from pool.map(result, checks)
