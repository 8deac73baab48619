"""Frames between the client app and the long-lived worker of a device; imports no torch."""

import json
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

LONGEST_HEADER = 1 << 24
"""Bytes of a frame's header at most."""


class Wire(NamedTuple):
    """One array of a message, without padding or header."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Frame(NamedTuple):
    """A message: facts, and arrays by name."""

    facts: Mapping[str, Any]
    arrays: Mapping[str, Wire] = {}


def send_frame(connection: socket.socket, frame: Frame) -> None:
    """Write a frame: the length of a JSON header, the header, and the bytes of all arrays."""
    arrays = [(name, w.dtype, w.shape, len(w.data)) for name, w in frame.arrays.items()]
    header = json.dumps([dict(frame.facts), arrays]).encode()
    connection.sendall(len(header).to_bytes(8, "little") + header)
    for wire in frame.arrays.values():
        connection.sendall(wire.data)


def receive_frame(connection: socket.socket) -> Frame:
    """Read a frame; raise ``ConnectionError`` if the other side has gone."""
    size = int.from_bytes(_receive(connection, 8), "little")
    if size > LONGEST_HEADER:
        raise ConnectionError(f"a header of {size} bytes")
    facts, arrays = json.loads(_receive(connection, size))
    return Frame(
        facts,
        {n: Wire(kind, tuple(s), _receive(connection, size)) for n, kind, s, size in arrays},
    )


def _receive(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(min(size - len(found), 1 << 20))
        if not part:
            raise ConnectionError("the other side has closed the connection")
        found += part
    return bytes(found)


def ask(path: str, frame: Frame, seconds: float | None = None) -> Frame:
    """Send a frame to the worker at a Unix socket, and return its answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect(path)
        send_frame(connection, frame)
        return receive_frame(connection)
