"""A rule that trials share, with the numbers in which they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.contract import bind, numbers


class PackedRule(NamedTuple):
    """The client or the server rule of trials that train together."""

    rule: Any
    """The structure that all of them have."""
    numbers: dict[str, Tensor]
    """Hyper-parameters, one row per trial."""

    @classmethod
    def of(
        cls, rule: Any, each: Sequence[Any], dtype: torch.dtype, device: torch.device
    ) -> PackedRule:
        """Pack the rules of ``each`` trial, which are ``rule`` but for their numbers."""
        values = [numbers(own) for own in each]
        return cls(
            rule,
            {
                path: torch.tensor([v[path] for v in values], dtype=dtype, device=device)
                for path in values[0]
            },
        )

    def map(self, function: Callable[..., Any], *args: Any) -> Any:
        """Map ``function(rule, *args)`` over trials, the rule bound to each trial's numbers."""
        with torch.no_grad():
            return torch.vmap(lambda n, *a: function(bind(self.rule, n), *a))(self.numbers, *args)
