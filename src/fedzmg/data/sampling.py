"""Samplers: the clients of every round, as a function of (seed, round, client)."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Ids
from fedzmg.data.federated import FederatedData
from fedzmg.data.plan import sample_cohort
from fedzmg.errors import InputError, brief
from fedzmg.participation import Participation, function_name
from fedzmg.seeds import key, stream


def inclusion_probabilities(examples: Ids, size: int) -> npt.NDArray[np.float64]:
    """Compute the probabilities of a draw by examples: in proportion to them, but at most one."""
    sure = _always_drawn(examples, size)
    others = np.where(sure, 0, examples)
    found: npt.NDArray[np.float64] = sure + (size - sure.sum()) * others / max(others.sum(), 1)
    return found


def _always_drawn(examples: Ids, size: int) -> npt.NDArray[np.bool_]:
    """Flag the clients whose share of the cohort would be one or more."""
    sure = np.zeros(len(examples), dtype=np.bool_)
    while True:
        others = np.where(sure, 0, examples)
        more = (others > 0) & (others * (size - sure.sum()) >= others.sum())
        if not more.any():
            return sure
        sure |= more


def _draw_by_examples(rng: np.random.Generator, examples: Ids, size: int) -> Ids:
    """Draw systematically on a shuffled order; sequential draws would favour small clients."""
    sure = _always_drawn(examples, size)
    left, order = size - int(sure.sum()), rng.permutation(np.flatnonzero(~sure))
    if not left:
        return np.flatnonzero(sure)
    ends = np.cumsum(examples[order])
    points = (rng.random() + np.arange(left)) * (ends[-1] / left)
    # Rounding must not move the last point behind the last example.
    places = np.searchsorted(ends, np.minimum(points, ends[-1] - 0.5), side="right")
    return np.concatenate([np.flatnonzero(sure), order[places]])


class Sampler:
    """Sampler of the clients of every round, checked against the data before the first one."""

    def __init__(
        self, participation: Participation, data: FederatedData, cohort: int, *, replacement: bool
    ) -> None:
        self._how, self._cohort, self._replacement = participation.sampler, cohort, replacement
        self._examples = data.counts.copy()
        self._examples.flags.writeable = False  # a user's function gets it
        self._schedule = self._numbered(participation.schedule or (), data.names)
        if self._how == "poisson" and replacement:
            problem = 'sampler = "poisson" draws every client at most once'
            raise InputError(f"{problem}: use replacement = false")
        held = int((self._examples > 0).sum())
        if self._how == "examples" and (held if not replacement else held and cohort) < cohort:
            remedy = 'choose a smaller cohort, or another sampler than "examples"'
            raise InputError(f"cohort = {cohort} but {held} clients have examples: {remedy}")

    def draw(self, seed: int, round_: int) -> list[int]:
        """Return the clients of a round, the same for every algorithm under this seed."""
        how, examples, size = self._how, self._examples, self._cohort
        population = len(examples)
        if how == "schedule":
            return self._schedule[(round_ - 1) % len(self._schedule)]
        if callable(how):
            given = how(round_, key(seed, "cohort", round_), population, examples)
            return self._own(given, f"{function_name(how)}, round {round_}")
        if how == "uniform":
            found = sample_cohort(seed, round_, population, size, replacement=self._replacement)
            return [int(client) for client in found]
        rng = stream(seed, "cohort", round_)
        if how == "poisson":
            found = np.flatnonzero(rng.random(population) < size / population)
        elif self._replacement:
            found = rng.choice(population, size=size, p=examples / examples.sum())
        else:
            found = _draw_by_examples(rng, examples, size)
        return [int(client) for client in found]

    def _numbered(self, schedule: Sequence[Any], names: Sequence[str]) -> list[list[int]]:
        known = {name: number for number, name in enumerate(names)} if schedule else {}
        for client in (c for one in schedule for c in one if isinstance(c, str)):
            if client not in known:
                expected = f"a name of one of the {len(names)} clients, such as {names[0]!r}"
                raise InputError(f"schedule: no client {client!r}: expected {expected}")
        lists = [[known[c] if isinstance(c, str) else c for c in one] for one in schedule]
        return [self._own(one, f"schedule, list {i}") for i, one in enumerate(lists, 1)]

    def _own(self, given: Any, source: str) -> list[int]:
        try:
            cohort = [operator.index(client) for client in given]
        except TypeError:
            expected = "a list of client numbers"
            raise InputError(f"{source}: {brief(given)}: expected {expected}") from None
        population = len(self._examples)
        for client in cohort:
            if not 0 <= client < population:
                raise InputError(f"{source}: no client {client}: expected 0 to {population - 1}")
        if len(set(cohort)) < len(cohort) and not self._replacement:
            remedy = "name each once, or set replacement = true"
            raise InputError(f"{source}: {brief(cohort)} names a client twice: {remedy}")
        return cohort
