"""Optional stages of a round; an absent stage costs nothing and moves no bit."""

from dataclasses import dataclass

from fedzmg import aggregators
from fedzmg.contract import Aggregator, check_rule
from fedzmg.errors import InputError
from fedzmg.participation import Participation


@dataclass(frozen=True)
class Federation:
    """Stages of a round besides local training and the server step."""

    guard: bool = False  # reject updates whose norm is above 100 times the median of the cohort
    participation: Participation = Participation()
    aggregator: Aggregator | None = None
    """Way to merge updates, also by name; by default the algorithm's, usually the weighted mean."""

    def __post_init__(self) -> None:
        if not isinstance(self.guard, bool):
            raise InputError(f"guard = {self.guard!r}: expected true or false")
        if not isinstance(self.participation, Participation):
            raise InputError(f"participation = {self.participation!r}: expected a Participation")
        if isinstance(self.aggregator, str):
            object.__setattr__(self, "aggregator", aggregators.get(self.aggregator))
        elif self.aggregator is not None:
            check_rule("aggregator", self.aggregator, Aggregator)
