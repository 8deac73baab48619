"""What a message weighs, counted from the shapes and types of what would travel.

Arrays and scalars (steps, rounds, losses, rates) are counted apart. Whole numbers travel in the
narrowest integer type that holds the round's longest stream of local steps; the number of bits that
would suffice is given beside it as a lower bound.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fedzmg.tree import leaves

EXAMPLE_COUNT = 8
"""Bytes of the example count by which a client's upload is weighted."""


class Message(NamedTuple):
    """Bytes of one client's message."""

    arrays: int
    scalars: int
    bound: int
    """The arrays, if whole numbers used no more bits than they need."""

    def times(self, messages: int) -> Message:
        """Several messages of this size."""
        return Message(*(messages * part for part in self))


def integer_bytes(longest: int) -> int:
    """Width of the narrowest signed integer type for sums of up to ``longest`` signs.

    >>> [integer_bytes(k) for k in (1, 127, 128, 32767, 32768)]
    [1, 1, 2, 2, 4]
    """
    return 1 if longest < 2**7 else 2 if longest < 2**15 else 4


def weigh(stacked: Any, longest: int) -> Message:
    """Weigh one row of stacked values."""
    arrays = scalars = bits = 0
    for leaf in leaves(stacked):
        size = leaf[0].numel()
        if leaf.ndim == 1:
            scalars += leaf.element_size()
        elif leaf.is_floating_point():
            arrays += size * leaf.element_size()
            bits += size * leaf.element_size() * 8
        else:
            arrays += size * integer_bytes(longest)
            bits += size * math.ceil(math.log2(2 * longest + 1))
    return Message(arrays, scalars, math.ceil(bits / 8))
