"""Training protocol of a federation."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fedzmg.data.plan import Batching
from fedzmg.errors import InputError, brief, check_names
from fedzmg.storage.reading import MOST_PLANNED

LARGEST = {  # a larger number is a mistake
    "rounds": MOST_PLANNED, "cohort": 10**6, "batch_size": 10**9, "epochs": 10**5,
    "eval_every": 10**9, "fine_tune": 10**5,
}  # fmt: skip
_EXPECTED = {int: "a whole number from {} to {}", bool: "true or false", float: "a finite number"}


@dataclass(frozen=True)
class Protocol:
    """Training protocol of a federation."""

    rounds: int = 100
    cohort: int = 10
    replacement: bool = False
    """True if a client can be drawn twice in one round."""
    batch_size: int = 20
    epochs: int = 1
    straddle: bool = False
    keep_partial: bool = True
    eval_every: int = 1
    threshold: float = 0.9
    fine_tune: int = 0
    """Epochs for which clients fine-tune their models, on a copy, before they are evaluated."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, kind = getattr(self, item.name), type(item.default)
            right = isinstance(value, kind | int) and isinstance(value, bool) == (kind is bool)
            most = LARGEST.get(item.name, sys.float_info.max)
            least = min(1, item.default) if kind is int else -most  # type: ignore[type-var]
            if not right or not least <= value <= most:
                expected = _EXPECTED[kind].format(least, most)
                raise InputError(f"{item.name} = {brief(value)}: expected {expected}")

    @property
    def batching(self) -> Batching:
        """Settings of a client's local steps."""
        return Batching(self.batch_size, self.epochs, self.straddle, self.keep_partial)

    def with_options(self, options: Mapping[str, Any]) -> "Protocol":
        """Copy with some fields changed; the nearest name is suggested for an unknown one."""
        check_names("protocol field", options, [f.name for f in fields(self)])
        return replace(self, **options)
