"""Messages of a federation, and of a client app to the worker of its device; imports no torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

UNKNOWN = "this federation is unknown here"  # error of a device that lost its disk or greeting


class Wire(NamedTuple):
    """One array of a message, without padding or header."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Frame(NamedTuple):
    """A message: facts, and arrays by name."""

    facts: Mapping[str, Any]
    arrays: Mapping[str, Wire] = {}
