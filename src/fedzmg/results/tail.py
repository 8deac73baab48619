"""A log that grows while it is read: whole lines only, and only what is new."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from fedzmg.storage.files import log_bytes


class Tail:
    """The lines of a ``metrics.jsonl`` by key; of lines with the same key the last counts.

    A line that is half written waits for its rest; one that a crash broke off is passed over.

    Args:
        path: the file; it need not be there yet.
        keys: what tells lines apart: the round, and in a grid the trial before it.
    """

    def __init__(self, path: Path, *keys: str) -> None:
        self.path, self._keys = path, keys
        self.rows: dict[Hashable, dict[str, Any]] = {}
        self._read = 0

    def update(self) -> dict[Hashable, dict[str, Any]]:
        """Read what was added since, and give everything."""
        content = self._added()
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                values = json.loads(line)
                key = tuple(values[name] for name in self._keys)
                self.rows[key[0] if len(key) == 1 else key] = values
            except (ValueError, TypeError, KeyError):
                continue
        return self.rows

    def _added(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._read:  # another file took its place
                    self._read, self.rows = 0, {}
                file.seek(self._read)
                return file.read()
        except FileNotFoundError:
            # A kept copy's log is compressed, and does not grow.
            return b"" if self._read else log_bytes(self.path)
        except OSError:
            return b""
