"""State that clients keep between the rounds they take part in.

Every visited client has three slots, each stamped with the round that wrote it: for the previous
checkpoint, the newest one and the current round. A write never touches a slot that a checkpoint
relies on. To go back to a checkpoint is to take, for every client, the newest slot that is not
younger.

Slots are in sparse files. Only the cohort's share is ever in memory and on the device.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedzmg.errors import InputError
from fedzmg.storage.files import check_fences
from fedzmg.tree import Flat, State, flatten_rows, leaves, row, tree_map, unflatten_rows

NEVER = -1
SLOTS = 3


class FileRows:
    """Rows in a sparse file; plain reads and writes keep the process small, a map would not."""

    def __init__(self, path: Path, width: int, dtype: npt.DTypeLike) -> None:
        self.path, self._dtype = path, np.dtype(dtype)
        self._bytes = width * self._dtype.itemsize

    @functools.cached_property
    def _file(self) -> int:
        # Opened at the first use: a run directory must be complete before files are added.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        weakref.finalize(self, os.close, file)
        return file

    def read(self, index: int) -> npt.NDArray[Any]:
        data = os.pread(self._file, self._bytes, index * self._bytes)
        if len(data) != self._bytes:
            raise InputError(f"{self.path} is truncated: restore it or start afresh")
        return np.frombuffer(data, dtype=self._dtype).copy()

    def write(self, index: int, values: npt.NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, dtype=self._dtype).tobytes()
        if os.pwrite(self._file, data, index * self._bytes) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def flush(self) -> None:
        os.fsync(self._file)


class Slots:
    """Stamped slots of the clients of one trial."""

    def __init__(self, directory: Path, clients: int, width: int, dtype: npt.DTypeLike) -> None:
        self._rows = FileRows(directory / "memory.rows", width, dtype)
        self._stamp_rows = FileRows(directory / "memory.stamps", SLOTS, np.int64)
        self._stamps = np.full((clients, SLOTS), NEVER, dtype=np.int64)
        self.committed: tuple[int, ...] = (0,)
        """Rounds whose state a checkpoint needs, at most two."""
        self.path = self._stamp_rows.path
        self.saved = self.path.exists()
        """The file has the stamps of all clients."""
        if self.saved:
            known = np.fromfile(self.path, dtype=np.int64)
            if known.size != self._stamps.size:
                raise InputError(f"{self.path} is damaged: restore it or start afresh")
            self._stamps = known.reshape(clients, SLOTS)

    def visited(self) -> list[int]:
        """List clients that have a memory."""
        return np.flatnonzero(self._stamps.max(1) != NEVER).tolist()

    def read(self, client: int) -> npt.NDArray[Any] | None:
        """Read a client's memory; None if it never took part."""
        stamps = self._stamps[client]
        if stamps.max() == NEVER:
            return None
        return self._rows.read(SLOTS * client + int(stamps.argmax()))

    def write(self, client: int, round_: int, values: npt.NDArray[Any]) -> None:
        """Write a client's memory, but not to the slot of a checkpoint."""
        check_fences(self.path)
        stamps = self._stamps[client]
        needed = {int(np.where(stamps <= r, stamps, NEVER).argmax()) for r in self.committed}
        # The newest of the others is of the current rounds, if there is one.
        slot = max(set(range(SLOTS)) - needed, key=lambda i: int(stamps[i]))
        # A crash in the middle of the row must not leave half of it under a valid stamp.
        self._stamp(client, slot, NEVER)
        self._rows.write(SLOTS * client + slot, values)
        self._stamp(client, slot, round_)

    def _stamp(self, client: int, slot: int, round_: int) -> None:
        self._stamps[client, slot] = round_
        if self.saved:
            self._stamp_rows.write(client, self._stamps[client])
        else:
            self._save_stamps()

    def _save_stamps(self) -> None:
        self._stamp_rows.write(0, self._stamps)
        self.saved = True

    def flush(self) -> None:
        """Write everything to disk."""
        self._rows.flush()
        self._save_stamps()
        self._stamp_rows.flush()

    def rewind(self, round_: int) -> None:
        """Forget everything younger than a checkpoint."""
        self._stamps[self._stamps > round_] = NEVER
        self.committed = (round_,)
        if self.saved:
            self._save_stamps()


class MemoryStore:
    """Memories of the clients of every trial; a client never seen starts from ``fresh``.

    ``directories`` has a directory per trial; None: files are temporary.
    """

    kept_bytes = 0
    """Bytes that each client keeps after it took part."""

    def __init__(
        self, fresh: State, clients: int, directories: Sequence[Path] | None = None
    ) -> None:
        self.fresh = tree_map(lambda leaf: leaf.cpu(), fresh)
        self._trials: list[Slots] = []
        self._form: Flat | None = None
        self._is_temporary = directories is None
        if self.is_empty:
            return
        self._fresh_rows, self._form = flatten_rows(self.fresh)
        trials, width = self._fresh_rows.shape
        self.kept_bytes = width * self._fresh_rows.element_size()
        if directories is None:
            scratch = Path(tempfile.mkdtemp(prefix="fedzmg-memory-"))
            weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
            directories = [scratch / str(i) for i in range(trials)]
        dtype = self._fresh_rows.numpy().dtype
        self._trials = [Slots(path, clients, width, dtype) for path in directories]

    @property
    def is_empty(self) -> bool:
        """Clients of this algorithm keep no state."""
        return not leaves(self.fresh)

    def read(self, owners: list[tuple[int, int]]) -> State:
        """Stack memories of some (trial, client) pairs, on the host."""
        if self._form is None:
            return self.fresh
        kept = [(trial, self._trials[trial].read(client)) for trial, client in owners]
        rows = [self._fresh_rows[t] if own is None else torch.from_numpy(own) for t, own in kept]
        return unflatten_rows(torch.stack(rows), self._form, exact=True)

    def write(
        self, owners: list[tuple[int, int]], round_: int, memory: State, accepted: list[bool]
    ) -> None:
        """Write memories whose upload was accepted; the later one of a client drawn twice."""
        if self._form is None:
            return
        rows = flatten_rows(memory)[0].cpu().numpy()
        for (trial, client), values, use in zip(owners, rows, accepted, strict=True):
            if use:
                self._trials[trial].write(client, round_, values)

    def of_trial(self, trial: int) -> dict[int, State]:
        """Return every memory of one trial, by client."""
        clients = self._trials[trial].visited() if self._trials else []
        return {c: row(self.read([(trial, c)]), 0) for c in clients}

    def put(self, trial: int, round_: int, memories: dict[int, State]) -> None:
        """Restore the memories of one trial."""
        for client, state in memories.items():
            self.write([(trial, client)], round_, tree_map(lambda t: t[None], state), [True])

    def flush(self) -> None:
        """Write everything to disk."""
        for slots in () if self._is_temporary else self._trials:
            slots.flush()

    def commit(self, *rounds: int) -> None:
        """Protect the states after these rounds, which checkpoints name."""
        for slots in self._trials:
            slots.committed = rounds

    def rewind(self, trial: int, round_: int) -> None:
        """Take one trial back to a checkpoint's round."""
        if self._trials:
            slots = self._trials[trial]
            if round_ and not slots.saved and not self._is_temporary:
                raise InputError(f"{slots.path} is missing: restore it or start afresh")
            slots.rewind(round_)
