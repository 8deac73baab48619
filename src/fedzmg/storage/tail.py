"""Incremental reader of a growing log."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from fedzmg.storage.files import log_bytes


class Tail:
    """Lines of a growing ``metrics.jsonl`` by key; of lines with the same key the last counts.

    An incomplete last line is read once it is complete; a broken one is skipped.

    Args:
        path: the file; it need not exist yet.
        keys: fields that identify a line: the round, and in a grid the trial before it.
    """

    def __init__(self, path: Path, *keys: str) -> None:
        self.path, self._keys = path, keys
        self.rows: dict[Hashable, dict[str, Any]] = {}
        self._read = 0

    def update(self) -> dict[Hashable, dict[str, Any]]:
        """Read the lines added since the last call, and return all lines."""
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
