"""Run directories: what is kept of a run, and how it survives a crash.

::

    spec.toml               what was asked for, every default written out
    manifest.json           versions, device, commit, data hash, execution path
    metrics.jsonl           one line a round, append-only; a later line supersedes an earlier one
    checkpoint.safetensors  where to go on

Whole files are written beside their place and moved there, so a reader never sees half of one.
No pickle is ever written or read.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from fedzmg.errors import InputError
from fedzmg.experiment.spec import RunSpec
from fedzmg.files import write_atomic
from fedzmg.simulation import Checkpoint, Record

FORMAT = 1


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write strict JSON atomically; what is not finite becomes null."""
    write_atomic(path, _json(values, indent=1))


@dataclass(frozen=True)
class RunDirectory:
    """One run on disk."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether anything is there yet."""
        return self.path.is_dir() and any(self.path.iterdir())

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
        if not (self.path / "spec.toml").is_file():
            raise InputError(
                f"{self.path} holds no spec.toml, so it is not a whole run directory: remove it or "
                "choose another place with --out"
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
        try:
            manifest = json.loads(path.read_text())
        except FileNotFoundError:
            raise InputError(
                f"{path} is missing: remove {self.path} or choose another place with --out"
            ) from None
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read ({error}): restore or remove it") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            found = manifest.get("format") if isinstance(manifest, dict) else None
            raise InputError(f"{path} has format {found!r}, this version reads {FORMAT}")
        return manifest

    def append(self, record: Record) -> None:
        """Add a round to the log; a line broken off by a crash is left behind it."""
        path = self.path / "metrics.jsonl"
        values = {k: _word(v) if isinstance(v, float) else v for k, v in record._asdict().items()}
        line = _json(values) + b"\n"
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def records(self, until: int | None = None) -> list[Record]:
        """The log in order of rounds; of lines for the same round the last counts.

        Args:
            until: leave out rounds after this one, which are about to be repeated.
        """
        path = self.path / "metrics.jsonl"
        by_round: dict[int, Record] = {}
        lines = path.read_bytes().splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
                floats = {k: float(v) for k, v in values.items() if isinstance(v, str)}
                record = Record(**{**values, **floats})
            except (ValueError, TypeError, KeyError):
                # A crash can break off a line, which is then superseded; anything else is damage.
                if number == len(lines) or not line.endswith(b"}"):
                    continue
                raise InputError(
                    f"{path}, line {number} is damaged: restore or remove it"
                ) from None
            by_round[record.round] = record
        rounds = sorted(r for r in by_round if until is None or r <= until)
        return [by_round[r] for r in rounds]

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint."""
        metadata = {"round": str(checkpoint.round), "format": str(FORMAT)}
        content = safetensors.torch.save(checkpoint.tensors, metadata)
        write_atomic(self.path / "checkpoint.safetensors", content)

    def checkpoint(self) -> Checkpoint | None:
        """Where the run stopped, or None before the first checkpoint.

        Raises:
            InputError: if the file is damaged.
        """
        path = self.path / "checkpoint.safetensors"
        if not path.exists():
            return None
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return Checkpoint(int(metadata["round"]), tensors)
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            raise InputError(
                f"{path} is damaged ({error}): remove it to start this run again from round 1"
            ) from None


def _word(value: float) -> float | str:
    """Strict JSON has no word for what is not finite, so it is written as a string."""
    return value if math.isfinite(value) else str(value)


def _json(values: dict[str, Any], indent: int | None = None) -> bytes:
    """Strict JSON: what is not finite becomes null."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [clean(v) for v in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value

    return json.dumps(clean(values), indent=indent, allow_nan=False).encode()
