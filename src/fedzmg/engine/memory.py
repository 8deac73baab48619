"""What clients remember between the rounds they take part in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedzmg.contract import State
from fedzmg.tree import leaves, row, stack


@dataclass
class MemoryStore:
    """Memories by (trial, client), kept on the host; a client never seen starts from ``fresh``.

    Args:
        fresh: what a client remembers before its first round, one row per trial.
    """

    fresh: State
    seen: dict[tuple[int, int], State] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether clients of this algorithm remember nothing at all."""
        return not leaves(self.fresh)

    def read(self, owners: list[tuple[int, int]]) -> State:
        """Stacked memories of some clients."""
        if self.is_empty:
            return self.fresh
        return stack([self.seen.get(owner, row(self.fresh, owner[0])) for owner in owners])

    def write(self, owners: list[tuple[int, int]], memory: State, accepted: list[bool]) -> None:
        """Keep the memories whose upload was accepted; of a client drawn twice, the later one."""
        if self.is_empty:
            return
        for i, (owner, good) in enumerate(zip(owners, accepted, strict=True)):
            if good:
                self.seen[owner] = row(memory, i)

    def of_trial(self, trial: int) -> dict[int, State]:
        """Every memory of one trial, by client."""
        return {client: state for (t, client), state in self.seen.items() if t == trial}

    def put(self, trial: int, memories: dict[int, Any]) -> None:
        """Restore the memories of one trial."""
        self.seen |= {(trial, client): state for client, state in memories.items()}
