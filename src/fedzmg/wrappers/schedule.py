"""Learning rates that change from round to round, around any rule that has an ``lr``.

With ``t = round - 1``, so that the first round has the given learning rate::

    constant     lr
    step         lr gamma^floor(t / every)
    exponential  lr gamma^t
    cosine       lr (floor + (1 - floor) (1 + cos(pi t / horizon)) / 2)    until the horizon

``floor`` is a fraction of ``lr`` below which no schedule falls; absent, there is none. Per round
these are StepLR, ExponentialLR and CosineAnnealingLR (with ``eta_min = floor lr``) of
``torch.optim.lr_scheduler``.

Differences from torch: after its horizon a cosine does not rise again. With a floor it stays there.
Without one it keeps the learning rate of the last round before the horizon, because rules that
divide by a learning rate of zero fail. ``floor = 0`` asks for zero.
Degenerate cases: ``constant`` is the rule inside bit for bit, and so is every first round.
"""

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fedzmg.contract import ClientRule, chain
from fedzmg.errors import InputError
from fedzmg.messages import ClientContext, Cohort
from fedzmg.rule import Number, Rule, choice, inner_rules, number, replace_in_chain, rule_class
from fedzmg.tree import State, Tree
from fedzmg.wrappers.wrapper import ServerWrapper, Wrapper, rate_of

R = TypeVar("R", bound=Rule)
NEEDS: dict[str, tuple[str, ...]] = {  # all but the constant one take a floor, too
    "constant": (), "step": ("every", "gamma"), "cosine": ("horizon",), "exponential": ("gamma",),
}  # fmt: skip


@dataclass(frozen=True)
class Schedule(Rule):
    """Factor of the learning rate in a round; base of client and server schedules."""

    schedule: str = choice(*NEEDS, doc="change of the learning rate over rounds")
    every: Number | None = number(None, low=1, doc="step: rounds between two changes")
    gamma: Number | None = number(None, above=0, doc="step, exponential: factor of a change")
    horizon: Number | None = number(None, low=1, doc="cosine: rounds until the fall ends")
    floor: Number | None = number(None, low=0, high=1, doc="least factor of lr; absent: none")

    def __post_init__(self) -> None:
        super().__post_init__()
        needs = NEEDS[self.schedule]
        takes = (*needs, "floor") if needs else ()
        given = {name: getattr(self, name) for name in ("every", "gamma", "horizon", "floor")}
        given = {name: value for name, value in given.items() if value is not None}
        if not given.keys() >= set(needs):
            raise InputError(f"schedule {self.schedule!r} needs {' and '.join(needs)}")
        for name, value in given.items():
            if name not in takes:
                known = f"schedule {self.schedule!r} takes {', '.join(takes) or 'no numbers'}"
                raise InputError(f"{name} = {value!r}: {known}; leave it out")
            if name in ("every", "horizon") and isinstance(value, float) and value % 1:
                raise InputError(f"{name} = {value!r}: expected a whole number of rounds")
        for inner in inner_rules(self).values():
            if rate_of(inner) is None:
                name = type(chain(inner)[-1]).__name__
                raise InputError(f"schedule {self.schedule!r} scales lr, which {name} lacks")

    def factor(self, round_: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the factor of the learning rate in a round, counted from 1."""
        done = (round_ - 1).to(dtype)
        floor = 0.0 if self.floor is None else self.floor
        if self.horizon is not None:
            # Without a floor, stop one round before the horizon, where the factor is zero.
            last = self.horizon - 1 if self.floor is None else self.horizon
            part = torch.minimum(done, torch.ones_like(done) * last) / self.horizon
            # One minus the fall, so that the first round's factor is one exactly.
            return 1 - (1 - floor) * (1 - torch.cos(math.pi * part)) / 2
        if self.gamma is None:
            return torch.ones_like(done)
        # Half a round keeps rounding errors away from whole quotients.
        changes = done if self.every is None else ((done + 0.5) / self.every).floor()
        factor: Tensor = self.gamma**changes
        return factor if self.floor is None else torch.maximum(factor, factor * 0 + floor)

    def at(self, rule: R, round_: Tensor, params: Tree) -> R:
        """Return the rule inside with the learning rate of a round."""
        rate = rate_of(rule)
        if self.schedule == "constant" or rate is None:
            return rule
        dtype = next(iter(params.values())).dtype
        scaled: R = replace_in_chain(rule, "lr", rate * self.factor(round_, dtype))
        return scaled


@rule_class
class ClientSchedule(Schedule, Wrapper):
    """Any client rule with an ``lr``, scaled by a factor of the round."""

    wrapper_kind = "schedule"

    def inner_at(self, context: ClientContext) -> ClientRule:
        return self.at(self.inner, context.round, context.params)


@rule_class
class ServerSchedule(Schedule, ServerWrapper):
    """Any server rule with an ``lr``, scaled by a factor of the round."""

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        return self.at(self.inner, cohort.round, params).update(params, state, cohort)
