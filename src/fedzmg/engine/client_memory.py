"""State that clients keep between the rounds they take part in.

Every visited client has three slots, each stamped with the round that wrote it: for the previous
checkpoint, the newest one and the current round. A write never touches a slot that a checkpoint
relies on. After a checkpoint is restored, a client's memory is its newest slot that is not
younger. A checkpoint has a hash of these slots, so a changed byte is noticed.

Slots are in sparse files. Only the cohort's share is ever in memory and on the device, except on a
GPU with room for all clients: it holds them, and files receive what has changed at a checkpoint.
"""

import contextlib
import errno
import functools
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedzmg.errors import InputError
from fedzmg.storage.files import check_fences, naming_errors
from fedzmg.tree import Flat, State, flatten_rows, leaves, row, tree_map, unflatten_rows

NEVER = -1
SLOTS = 3
STAMP = np.dtype([("round", np.int64), ("hash", np.uint8, 32)])  # round and checksum of a row
SHARDS = "; "  # separator of the marks of shards
GPU_SHARE = 4  # a quarter of the free memory of a GPU is for the memories of clients
_writing = functools.partial(naming_errors, remedy="free space or set TMPDIR to another folder")


def shard_folder(directory: Path, shard: int) -> Path:
    """Return the directory of the client memory of a shard."""
    return directory / f"shard-{shard}"


class DamagedMemory(Exception):
    """Client memory that does not belong to its checkpoint."""


class FileRows:
    """Rows in a sparse file, without memory mapping, which would count as memory of the process."""

    def __init__(self, path: Path, width: int, dtype: npt.DTypeLike) -> None:
        self.path, self._dtype = path, np.dtype(dtype)
        self.bytes = width * self._dtype.itemsize

    @functools.cached_property
    def _file(self) -> int:
        # Opened at the first use: a run directory must be complete before files are added.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        weakref.finalize(self, os.close, file)
        return file

    def read(self, index: int) -> npt.NDArray[Any]:
        data = os.pread(self._file, self.bytes, index * self.bytes)
        if len(data) != self.bytes:
            raise InputError(f"{self.path} is truncated: restore it or start afresh")
        return np.frombuffer(data, dtype=self._dtype).copy()

    def write(self, index: int, values: npt.NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, dtype=self._dtype)
        if os.pwrite(self._file, data.data, index * self.bytes) != data.nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def flush(self) -> None:
        os.fsync(self._file)


class Slots:
    """Stamped slots of the clients of one trial."""

    def __init__(self, directory: Path, clients: int, width: int, dtype: npt.DTypeLike) -> None:
        self._rows = FileRows(directory / "memory.rows", width, dtype)
        self._stamp_rows = FileRows(directory / "memory.stamps", SLOTS, STAMP)
        self._stamps = np.zeros((clients, SLOTS), dtype=STAMP)
        self._stamps["round"] = NEVER
        self._unhashed: set[tuple[int, int]] = set()
        self.committed: tuple[int, ...] = (0,)  # rounds whose state a checkpoint needs, at most two
        self.path = self._stamp_rows.path
        self.saved = self.path.exists()  # the file has the stamps of all clients
        if self.saved:
            known = np.fromfile(self.path, dtype=STAMP)
            if known.size != self._stamps.size:
                raise InputError(f"{self.path} is damaged: restore it or start afresh")
            self._stamps = known.reshape(clients, SLOTS)

    def visited(self) -> list[int]:
        """List clients that have a memory."""
        return np.flatnonzero(self._stamps["round"].max(1) != NEVER).tolist()

    def rounds(self, client: int) -> list[int]:
        """List the rounds of a client's slots that later rounds or checkpoints may need."""
        return [int(r) for r in self._stamps["round"][client] if r != NEVER]

    def read(self, client: int) -> npt.NDArray[Any] | None:
        """Read a client's memory; None if it never took part."""
        rounds = self._stamps["round"][client]
        if rounds.max() == NEVER:
            return None
        return self._rows.read(SLOTS * client + int(rounds.argmax()))

    def write(self, client: int, round_: int, values: npt.NDArray[Any]) -> None:
        """Write a client's memory, but not to the slot of a checkpoint."""
        check_fences(self.path)
        rounds = self._stamps["round"][client]
        needed = {int(np.where(rounds <= r, rounds, NEVER).argmax()) for r in self.committed}
        # The newest of the others is of the current rounds, if there is one.
        slot = max(set(range(SLOTS)) - needed, key=lambda i: int(rounds[i]))
        # A crash in the middle of the row must not leave half of it under a valid stamp.
        self._stamp(client, slot, NEVER)
        self._rows.write(SLOTS * client + slot, values)
        self._stamp(client, slot, round_)
        self._unhashed.add((client, slot))

    def _stamp(self, client: int, slot: int, round_: int) -> None:
        self._stamps[client, slot] = round_, 0
        if self.saved:
            self._stamp_rows.write(client, self._stamps[client])
        else:
            self._save_stamps()

    def _save_stamps(self) -> None:
        self._stamp_rows.write(0, self._stamps)
        self.saved = True

    def flush(self) -> None:
        """Hash what was written, and write everything to disk."""
        for client, slot in self._unhashed:
            row_ = self._rows.read(SLOTS * client + slot)
            self._stamps["hash"][client, slot] = np.frombuffer(_hash(row_), np.uint8)
        self._unhashed.clear()
        self._rows.flush()
        self._save_stamps()
        self._stamp_rows.flush()

    def mark(self, round_: int) -> str:
        """Return numbers of clients and bytes, and a hash of all memories after a round."""
        clients, size = len(self._stamps), self._rows.bytes
        return f"{clients} {size} {_hash(self._needed(round_)[1]).hex()}"

    def check(self, round_: int, mark: str) -> None:
        """Raise ``DamagedMemory`` if a memory after a round differs from the one marked."""
        slots, stamps = self._needed(round_)
        if self.mark(round_) != mark:
            raise DamagedMemory(f"{self.path} does not belong to it")
        for client in np.flatnonzero(stamps["round"] != NEVER):
            row_ = self._rows.read(SLOTS * int(client) + int(slots[client]))
            if _hash(row_) != stamps["hash"][client].tobytes():
                raise DamagedMemory(f"{self._rows.path} is damaged")

    def _needed(self, round_: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the slot of every client after a round, and its stamp."""
        rounds = self._stamps["round"]
        slots = np.where(rounds <= round_, rounds, NEVER).argmax(1)
        stamps = self._stamps[np.arange(len(slots)), slots]
        stamps[stamps["round"] > round_] = NEVER, 0
        return slots, stamps

    def rewind(self, round_: int) -> None:
        """Forget everything younger than a checkpoint."""
        self._stamps[self._stamps["round"] > round_] = NEVER, 0
        self._unhashed.clear()
        self.committed = (round_,)
        if self.saved:
            self._save_stamps()


def _hash(values: npt.NDArray[Any]) -> bytes:
    return blake2b(values.tobytes(), digest_size=32).digest()


def check_memory(directory: Path, round_: int, mark: str) -> None:
    """Check the client memory that a checkpoint of a round relies on, if there is any."""
    if not mark:
        return
    marks = mark.split(SHARDS)
    for i, own in enumerate(marks):
        clients, size, _ = own.split()
        folder = directory if len(marks) == 1 else shard_folder(directory, i)
        try:
            Slots(folder, int(clients), int(size), np.uint8).check(round_, own)
        except InputError as error:
            raise DamagedMemory(str(error)) from None


def _room(device: torch.device) -> int:
    """Return the bytes of client memory that a GPU may hold; zero for a CPU, which uses files."""
    return torch.cuda.mem_get_info(device)[0] // GPU_SHARE if device.type == "cuda" else 0


class MemoryStore:
    """Memories of the clients of every trial; a client never seen starts from ``fresh``.

    ``directories`` has a directory per trial; None: files are temporary.
    """

    kept_bytes = 0  # bytes that each client keeps after it took part

    def __init__(
        self, fresh: State, clients: int, directories: Sequence[Path] | None = None
    ) -> None:
        self.fresh = tree_map(lambda leaf: leaf.cpu(), fresh)
        self._trials: list[Slots] = []
        self._form: Flat | None = None
        self._place = torch.device("cpu")
        self._held: dict[tuple[int, int], torch.Tensor] = {}  # rows on the GPU, by trial and client
        self._unwritten: dict[tuple[int, int], int] = {}  # rounds of those that files do not have
        self._is_temporary = directories is None
        if self.is_empty:
            return
        self._fresh_rows, self._form = flatten_rows(self.fresh)
        trials, width = self._fresh_rows.shape
        self.kept_bytes = width * self._fresh_rows.element_size()
        dtype, device = self._fresh_rows.numpy().dtype, leaves(fresh)[0].device
        self._holds = trials * clients * self.kept_bytes <= _room(device)
        if self._holds:
            self._place, self._fresh_rows = device, self._fresh_rows.to(device)
            self._table = self._fresh_rows.new_empty(trials, clients, width)
        if directories is None:
            with _writing("to a temporary folder"):
                place = tempfile.gettempdir()
            with _writing(f"client memory in {place}"):
                scratch = Path(tempfile.mkdtemp(prefix="fedzmg-memory-"))
            weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
            directories = [scratch / str(i) for i in range(trials)]
        self._trials = [Slots(path, clients, width, dtype) for path in directories]

    @property
    def is_empty(self) -> bool:
        """Clients of this algorithm keep no state."""
        return not leaves(self.fresh)

    def read(self, owners: list[tuple[int, int]]) -> State:
        """Stack memories of some (trial, client) pairs, on the host or on a GPU that holds them."""
        if self._form is None:
            return self.fresh
        rows = torch.stack([self._row(*owner) for owner in owners])
        return unflatten_rows(rows, self._form, exact=True)

    def _row(self, trial: int, client: int) -> torch.Tensor:
        if (trial, client) in self._held:
            return self._held[trial, client]
        own, fresh = self._trials[trial].read(client), self._fresh_rows[trial]
        return fresh if own is None else torch.from_numpy(own).to(fresh.device)

    def flat(self, memory: State) -> torch.Tensor:
        """Copy memories as flat rows to where they are kept."""
        return flatten_rows(memory)[0].to(self._place)

    def write(
        self, owners: list[tuple[int, int]], round_: int, rows: torch.Tensor, accepted: list[bool]
    ) -> None:
        """Write flat memories whose upload was accepted; the later one of a client drawn twice.

        Nothing is allocated, so a GPU without free memory cannot interrupt it.
        """
        for owner, values, use in zip(owners, rows, accepted, strict=True):
            if use and self._holds:
                self._held[owner] = self._table[owner].copy_(values)
                self._unwritten[owner] = round_
            elif use:
                self._write(*owner, round_, values)

    def _write(self, trial: int, client: int, round_: int, values: torch.Tensor) -> None:
        slots = self._trials[trial]
        # A run names its own folder in an error.
        named = _writing(f"client memory in {slots.path.parent}")
        with named if self._is_temporary else contextlib.nullcontext():
            slots.write(client, round_, values.numpy())

    def rounds(self, trial: int, client: int) -> list[int]:
        """List the rounds after which a client's memory is kept."""
        return self._trials[trial].rounds(client) if self._trials else []

    def of_trial(self, trial: int) -> dict[int, State]:
        """Return every memory of one trial, by client."""
        known = self._trials[trial].visited() if self._trials else []
        clients = sorted({*known, *(client for own, client in self._unwritten if own == trial)})
        return {c: tree_map(torch.Tensor.cpu, row(self.read([(trial, c)]), 0)) for c in clients}

    def put(self, trial: int, round_: int, memories: dict[int, State]) -> None:
        """Restore the memories of one trial."""
        for client, state in memories.items():
            rows = self.flat(tree_map(lambda t: t[None], state))
            self.write([(trial, client)], round_, rows, [True])

    def flush(self) -> None:
        """Write everything to disk."""
        if self._is_temporary:
            return
        for owner, round_ in self._unwritten.items():
            self._write(*owner, round_, self._held[owner].cpu())
        self._unwritten.clear()
        for slots in self._trials:
            slots.flush()

    def mark(self, trial: int, round_: int) -> str:
        """Return a hash of one trial's memories after a round, for its checkpoint."""
        return "" if self._is_temporary or not self._trials else self._trials[trial].mark(round_)

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
            for kept in (self._held, self._unwritten):
                for owner in [owner for owner in kept if owner[0] == trial]:
                    del kept[owner]
