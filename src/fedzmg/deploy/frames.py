"""Messages of a federation, and of a client app to the worker of its device; imports no torch."""

import json
from collections.abc import Mapping
from multiprocessing.connection import Connection
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

    def send(self, connection: Connection) -> None:
        """Send facts and heads of arrays as JSON, then their bytes: nothing is pickled."""
        heads = [(name, array.dtype, array.shape) for name, array in self.arrays.items()]
        connection.send_bytes(json.dumps([dict(self.facts), heads]).encode())
        for array in self.arrays.values():
            connection.send_bytes(array.data)

    @classmethod
    def receive(cls, connection: Connection) -> "Frame":
        facts, heads = json.loads(connection.recv_bytes())
        arrays = {n: Wire(dtype, tuple(s), connection.recv_bytes()) for n, dtype, s in heads}
        return cls(facts, arrays)
