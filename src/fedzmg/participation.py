"""Settings of a round's participation: the clients that train, and the work of each."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedzmg.errors import InputError, brief, check_names

SAMPLERS = ("uniform", "examples", "poisson", "schedule")
LARGEST_WORK = {"epochs": 10**5, "steps": 10**6}  # largest local work; a larger one is a mistake

SamplerFunction: TypeAlias = Callable[[int, int, int, npt.NDArray[np.int64]], Iterable[int]]
WorkFunction: TypeAlias = Callable[[int, int, int, int], float]  # client, round, examples, key
Work: TypeAlias = float | tuple[float, float] | WorkFunction  # amount, range or function


@dataclass(frozen=True)
class Participation:
    """Choice of a round's clients and their work, by (seed, round, client); functions are pure."""

    sampler: str | SamplerFunction = "uniform"
    """``uniform``: as many clients as the protocol's cohort. ``examples``: the same number, each
    with a probability in proportion to its examples. ``poisson``: every client independently with
    probability cohort / population. ``schedule``: given lists. Or a function
    ``(round, key, population, examples) -> numbers of clients``."""
    schedule: Sequence[Sequence[int | str]] | None = None
    """Clients of every round by number or name; after the last list comes the first again."""
    epochs: Work | None = None
    """Local epochs in place of the protocol's: a number, a range (low, high) or a function
    ``(client, round, examples, key) -> epochs``. Between whole numbers, whole ones are drawn."""
    steps: Work | None = None  # local steps in place of epochs: the same three forms

    def __post_init__(self) -> None:
        check_names("sampler", [] if callable(self.sampler) else [self.sampler], SAMPLERS)
        if (self.sampler == "schedule") != (self.schedule is not None):
            both = f"schedule = {brief(self.schedule)} and sampler = {brief(self.sampler)}"
            raise InputError(f'{both}: lists of clients belong to sampler = "schedule"')
        if self.schedule is not None:
            object.__setattr__(self, "schedule", _lists(self.schedule))
        if self.epochs is not None and self.steps is not None:
            both = f"epochs = {brief(self.epochs)} and steps = {brief(self.steps)}"
            raise InputError(f"{both}: choose one")
        for name in LARGEST_WORK:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _work(name, getattr(self, name)))

    def most_clients(self, cohort: int, population: int) -> int:
        """Return the largest number of clients that a round may have."""
        if self.schedule is not None:
            return max(map(len, self.schedule))
        return cohort if self.sampler in ("uniform", "examples") else max(cohort, population)

    def describe(self) -> dict[str, Any]:
        """Return the fields that are not defaults; functions by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        own = {name: v for name, v in found.items() if v != getattr(Participation, name)}
        return {name: function_name(v) if callable(v) else v for name, v in own.items()}


def function_name(function: Any) -> str:
    """Return the name of a user's function, for messages and records."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def is_number(value: Any, *, whole: bool = False) -> bool:
    """Tell whether a value is a finite number, or a whole one."""
    right = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    return right and (isinstance(value, Integral) or math.isfinite(value))


def _work(name: str, given: Any) -> Any:
    """Check epochs or steps; a range becomes a tuple, NumPy's numbers Python's."""
    if callable(given):
        return given
    whole, most = name == "steps", LARGEST_WORK[name]
    is_range = isinstance(given, list | tuple) and len(given) == 2
    bounds = given if is_range else [given]
    good = all(is_number(bound, whole=whole) and 0 < bound <= most for bound in bounds)
    if not good or bounds[0] > bounds[-1]:
        kind = "a whole number" if whole else "a number"
        wanted = f"{kind} above 0 and up to {most}, or two of them, the smaller first"
        raise InputError(f"{name} = {brief(given)}: expected {wanted}")
    found = tuple(int(b) if isinstance(b, Integral) else float(b) for b in bounds)
    return found if is_range else found[0]


def _lists(given: Any) -> tuple[tuple[int | str, ...], ...]:
    """Check a schedule: lists of numbers and names, not all of them empty."""
    try:
        lists = tuple(tuple(one) for one in given)
        good = any(lists) and not any(isinstance(one, str) for one in (given, *given))
    except TypeError:
        good, lists = False, ()
    known = (type(c) in (int, str) or is_number(c, whole=True) for one in lists for c in one)
    if not good or not all(known):
        wanted = "a list of client numbers or names for every round, such as [[0, 1], [2, 3]]"
        raise InputError(f"schedule = {brief(given)}: expected {wanted}")
    return tuple(tuple(c if isinstance(c, str) else int(c) for c in one) for one in lists)
