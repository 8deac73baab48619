"""Run directories: what is kept of a run, and how it survives a crash.

::

    spec.toml                        what was asked for, every default written out
    manifest.json                    versions, device, commit, data hash, execution path
    metrics.jsonl                    one line a round, append-only; a later line supersedes another
    checkpoint.safetensors           where to go on
    checkpoint.previous.safetensors  the one before, for when the newest is damaged
    memory.rows, memory.stamps       what clients remember between rounds, if they do
    clients.safetensors              metric and loss on each client's own examples, by round
    stopped.json                     round and reason, if it was trained no further before its end
    lock.json                        the process at work, while there is one

Whole files are written beside their place and moved there, so a reader never sees half of one.
A checkpoint carries the hash of all of its own bytes, so any damage shows, and the two files need
nothing beside them to be judged. No pickle is ever written or read.

The format's number changes when older versions would misread a directory. New fields of the log and
new files do not change it: readers leave out what they do not know, and do without what is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch

from fedzmg.errors import InputError
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.simulation import Checkpoint, ClientMetrics, Record
from fedzmg.storage import lock
from fedzmg.storage.client_metrics import CLIENTS as CLIENTS
from fedzmg.storage.client_metrics import ClientTable, read_clients, write_clients
from fedzmg.storage.files import (
    append,
    is_leftover,
    remove_leftovers,
    sync_directory,
    write_atomic,
)
from fedzmg.storage.formats import json_nulls, json_words, log_lines, read_json

FORMAT = 1

NEWEST = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
LOG = "metrics.jsonl"

_BLANK = b"0" * 64
"""Stands where the hash of a checkpoint's bytes will be, while they are hashed."""


class Position(NamedTuple):
    """Where a run goes on."""

    checkpoint: Checkpoint
    before: int
    """Round of the checkpoint before this one. What clients learnt to remember between the two is
    copied into this one."""
    rejected: str = ""
    """Why a newer checkpoint is not used."""


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write strict JSON atomically; what is not finite becomes null."""
    write_atomic(path, json.dumps(json_nulls(values), indent=1, allow_nan=False).encode())


@dataclass(frozen=True)
class RunDirectory:
    """One run on disk."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether anything is there yet; what a crash leaves of a beginning does not count."""
        if not self.path.is_dir():
            return False
        names = ("manifest.json", "spec.toml", lock.NAME)
        return any(
            found.name not in ("manifest.json", lock.NAME, lock.GUARD)
            and not any(is_leftover(found, name) for name in names)
            for found in self.path.iterdir()
        )

    def create(self, spec: RunSpec, manifest: dict[str, Any]) -> None:
        """Start a new run directory.

        Raises:
            InputError: if it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "manifest.json", manifest)
            # The specification comes last: a directory that has it is complete.
            write_atomic(self.path / "spec.toml", spec.to_toml().encode())
        except OSError as error:
            raise InputError(
                f"cannot write the run directory {self.path}: {error.strerror}; choose another "
                "place with --out"
            ) from None

    def spec(self) -> RunSpec:
        """What was asked for.

        Raises:
            InputError: if this is no run directory.
        """
        if not self.path.is_dir():
            raise InputError(f"{self.path} is no directory: give a run directory")
        if not (self.path / "spec.toml").is_file():
            inside = min(self.path.glob("*/seed-*/spec.toml"), default=None)
            remedy = (
                "another directory"
                if inside is None
                else f"a run inside it, such as {inside.parent}"
            )
            raise InputError(
                f"{self.path} holds no spec.toml, so it is no whole run: give {remedy}"
            )
        return RunSpec.read(self.path / "spec.toml")

    def note(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest, with something that came to light later."""
        write_json(self.path / "manifest.json", manifest)

    def manifest(self) -> dict[str, Any]:
        """Versions, device and data of the run.

        Raises:
            InputError: if it is missing, damaged or of a newer format.
        """
        path = self.path / "manifest.json"
        if not path.exists():
            raise InputError(f"{path} is missing: restore it, or choose another place with --out")
        manifest = read_json(path)
        found = manifest.get("format")
        if found != FORMAT:
            raise InputError(
                f"{path} has format {found!r}, this version reads {FORMAT}: use the version that "
                "wrote it"
            )
        return manifest

    def append(self, record: Record) -> None:
        """Add a round to the log."""
        line = json.dumps(json_words(record._asdict()), allow_nan=False)
        append(self.path / LOG, f"{line}\n".encode())

    def records(self) -> list[Record]:
        """The log in order of rounds; of lines for the same round the last counts.

        Raises:
            InputError: for a line that is damaged and was not merely broken off.
        """
        by_round = {record.round: record for record in log_lines(self.path / LOG, _record)}
        return [by_round[round_] for round_ in sorted(by_round)]

    def save(self, checkpoint: Checkpoint, before: int = 0) -> None:
        """Put a checkpoint in place; the one that was there becomes the previous one.

        Args:
            checkpoint: where the run is.
            before: round of the checkpoint that was there.
        """
        write_atomic(self.path / NEWEST, _sealed(checkpoint, before), keep=self.path / PREVIOUS)

    def save_clients(self, found: Sequence[ClientMetrics]) -> None:
        """Put in place how single clients did, all evaluations of the run together."""
        last = found[-1]
        table = ClientTable(
            last.part,
            last.population,
            last.clients,
            last.examples,
            rounds=np.array([one.round for one in found]),
            metric=np.stack([one.metric for one in found]),
            loss=np.stack([one.loss for one in found]),
        )
        write_clients(self.path, table)

    def clients(self, until: int | None = None) -> tuple[ClientMetrics, ...]:
        """How single clients did, in the order of rounds; empty if it was never looked at.

        Args:
            until: leave out rounds after this one, which are about to be repeated.

        Raises:
            InputError: if the file is damaged.
        """
        table = read_clients(self.path)
        if table is None:
            return ()
        evaluations = zip(table.rounds.tolist(), table.metric, table.loss, strict=True)
        return tuple(
            ClientMetrics(
                round_, table.part, table.population, table.clients, table.examples, metric, loss
            )
            for round_, metric, loss in evaluations
            if until is None or round_ <= until
        )

    def position(
        self, logged: Container[int] | None = None, until: int | None = None
    ) -> Position | None:
        """Where to go on: the newest checkpoint that is whole, or None before the first one.

        Args:
            logged: rounds of the log; a checkpoint that needs others is not used.
            until: a checkpoint of a later round is not used, and none may be left.

        Raises:
            InputError: if there are checkpoints and none can be used.
        """
        reasons = []
        for path in (self.path / NEWEST, self.path / PREVIOUS):
            if not path.exists():
                reasons.append(f"{path} is missing")
                continue
            try:
                found = _unsealed(path)
            except _Damaged as error:
                reasons.append(f"{path} is damaged ({error})")
                continue
            round_ = found.checkpoint.round
            if until is not None and round_ > until:
                reasons.append(f"{path} is of round {round_}")
                continue
            if logged is not None and any(r not in logged for r in range(1, round_ + 1)):
                reasons.append(
                    f"{self.path / LOG} lacks rounds that the checkpoint has, of which "
                    f"there are {round_} in {path.name}"
                )
                continue
            return found._replace(rejected="; ".join(reasons))
        if until is not None or all(reason.endswith(" is missing") for reason in reasons):
            return None
        raise InputError(
            f"{'; '.join(reasons)}: restore one of them, or remove {NEWEST} and {PREVIOUS} to "
            "start this run again from round 1"
        )

    def checkpoint(self) -> Checkpoint | None:
        """The last checkpoint, or None before the first one; for readers, who repair nothing.

        Raises:
            InputError: if it is damaged.
        """
        found = self.position()
        # Between two moves there is only the previous one, which is the last that is whole.
        if found is not None and found.rejected and (self.path / NEWEST).exists():
            raise InputError(
                f"{found.rejected}: run the same command again, it goes on from round "
                f"{found.checkpoint.round}"
            )
        return None if found is None else found.checkpoint

    def repair(self, position: Position | None) -> None:
        """Remove what a crash left and what is damaged, so that work can go on from a position."""
        if not self.path.is_dir():
            return
        for name in ("manifest.json", "spec.toml", NEWEST, CLIENTS):
            remove_leftovers(self.path / name)
        if position is None:
            # Nothing relies on what clients remembered; a crash may have left half of it.
            for name in (NEWEST, PREVIOUS, "memory.rows", "memory.stamps"):
                with contextlib.suppress(FileNotFoundError):
                    (self.path / name).unlink()
        elif position.rejected:
            os.replace(self.path / PREVIOUS, self.path / NEWEST)
            sync_directory(self.path)


class _Damaged(Exception):
    """A checkpoint that cannot be believed."""


def _sealed(checkpoint: Checkpoint, before: int) -> bytes:
    """A checkpoint as a safetensors file whose header holds the hash of the whole file."""
    metadata = {
        "round": str(checkpoint.round),
        "before": str(before),
        "format": str(FORMAT),
        "sha256": _BLANK.decode(),
    }
    content = safetensors.torch.save(checkpoint.tensors, metadata)
    at = content.index(_seal(_BLANK)) + len(_seal(b"")) - 1
    digest = hashlib.sha256(content).hexdigest().encode()
    return b"".join((memoryview(content)[:at], digest, memoryview(content)[at + len(digest) :]))


def _seal(digest: bytes) -> bytes:
    return b'"sha256":"' + digest + b'"'


def _unsealed(path: Path) -> Position:
    try:
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8:end])["__metadata__"]
        if set(metadata) == {"round", "format"}:  # before there were hashes
            round_ = before = int(metadata["round"])
        else:
            _verify(content, metadata["sha256"].encode())
            round_, before = int(metadata["round"]), int(metadata["before"])
        tensors = safetensors.torch.load(content)
    except OSError as error:
        raise _Damaged(error.strerror) from None
    except (ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError):
        raise _Damaged(f"{len(content)} bytes that are not a whole checkpoint") from None
    return Position(Checkpoint(round_, tensors), before)


def _verify(content: bytes, digest: bytes) -> None:
    at = content.index(_seal(digest)) + len(_seal(b"")) - 1
    rest = memoryview(content)
    found = hashlib.sha256(rest[:at])
    found.update(_BLANK)
    found.update(rest[at + len(digest) :])
    if found.hexdigest().encode() != digest:
        raise _Damaged("its bytes do not have the hash they were written with")


def _record(values: dict[str, Any]) -> Record:
    return Record(**{k: _read(v) for k, v in values.items() if k in Record._fields})


def _read(value: Any) -> Any:
    """What a line's value was before it was written."""
    if isinstance(value, list):
        return tuple(float(part) for part in value)
    return float(value) if isinstance(value, str) else value
