"""Conformance of an algorithm with the contract: one suite for built-in and for your own rules.

>>> from fedzmg import algorithms, testing
>>> result = testing.check(algorithms.get("fedavg"), only=["options"])
>>> result.ok
True
"""

import time
from collections.abc import Sequence

from fedzmg.contract import Algorithm, AlgorithmInfo
from fedzmg.errors import InputError, check_names
from fedzmg.testing.case import Case
from fedzmg.testing.properties import PROPERTIES
from fedzmg.testing.result import CheckResult, CheckRow, failed_row

__all__ = ["PROPERTIES", "Case", "CheckResult", "CheckRow", "check", "check_property"]


def check(algorithm: Algorithm | AlgorithmInfo, *, only: Sequence[str] = ()) -> CheckResult:
    """Train an algorithm in many ways on a tiny task, and compare what must be equal.

    Args:
        algorithm: with an ``AlgorithmInfo``, declared traffic and state are compared with counts.
        only: names of :data:`PROPERTIES`; all of them by default.

    Returns:
        A row per property; ``print(result)`` shows a table. A property that fails, or a rule that
        raises an error, is a row and not an exception.

    Raises:
        InputError: for something else than an algorithm, or an unknown property.
    """
    if not isinstance(algorithm, Algorithm | AlgorithmInfo):
        raise InputError(f"algorithm = {algorithm!r}: expected an Algorithm or AlgorithmInfo")
    check_names("property", only or (), PROPERTIES)
    case = Case(algorithm)
    rows = [check_property(case, name) for name in only or PROPERTIES]
    return CheckResult(case.algorithm.name, tuple(rows))


def check_property(case: Case, name: str) -> CheckRow:
    """Check one property of a case, which keeps trainings that others need, too."""
    began = time.perf_counter()
    try:
        detail = PROPERTIES[name](case)
    except Exception as error:
        return failed_row(name, time.perf_counter() - began, error)
    return CheckRow(name, True, time.perf_counter() - began, detail)
