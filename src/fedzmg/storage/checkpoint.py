"""Checkpoint files: safetensors with a hash of the file, bound to a specification and trials."""

import errno
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
from torch import Tensor

from fedzmg.storage.files import UNSEALED, has_seal, replacing, seal
from fedzmg.storage.formats import file_sha256

FORMAT = 4


class UnusableCheckpoint(Exception):
    """A checkpoint file that is damaged or belongs to another training."""


def bound_to(spec: Path, trials: Sequence[int] = (0,), name: str = "") -> str:
    """Name the training of a checkpoint: a specification, an algorithm in it, trials of a pack."""
    whole = hashlib.sha256(f"{file_sha256(spec)} {name}".encode())
    return f"{whole.hexdigest()} {list(trials)}"


class StoredCheckpoint(NamedTuple):
    """State of trials after a round."""

    round: int
    previous: int  # round of the checkpoint before this one
    tensors: Mapping[int, Mapping[str, Tensor]]  # named tensors by trial; a stopped trial has none
    logs: Mapping[str, str]  # marks of the logs that belong to it, by name; see ``log_marks``
    memory: Mapping[int, str]  # mark of the client memory by trial; empty without one


def write_checkpoint(
    path: Path, checkpoint: StoredCheckpoint, binding: str, keep: Path | None = None
) -> None:
    """Replace a checkpoint file; ``keep`` is the new name of the old one."""
    trials = checkpoint.tensors.items()
    tensors = {f"{t}|{name}": tensor for t, named in trials for name, tensor in named.items()}
    metadata = {
        "format": str(FORMAT), "round": str(checkpoint.round),
        "previous": str(checkpoint.previous), "binding": binding,
        "logs": json.dumps(checkpoint.logs), "memory": json.dumps(checkpoint.memory), **UNSEALED,
    }  # fmt: skip
    with replacing(path, keep) as temporary:
        try:
            # Straight to the file: a second copy of a pack may not fit into memory.
            safetensors.torch.save_file(tensors, temporary, metadata)
        except safetensors.SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from None
        seal(temporary)


def read_checkpoint(path: Path, binding: str) -> StoredCheckpoint:
    """Read a checkpoint; ``UnusableCheckpoint`` if it is damaged or of another training."""
    try:
        if not has_seal(path):
            raise UnusableCheckpoint("its hash is wrong")
        with safetensors.safe_open(path, framework="pt") as content:
            metadata = content.metadata()
            if int(metadata["format"]) != FORMAT:
                raise UnusableCheckpoint(f"it has format {metadata['format']}, not {FORMAT}")
            if metadata["binding"] != binding:
                raise UnusableCheckpoint("it belongs to another training")
            tensors: dict[int, dict[str, Tensor]] = {}
            for name in content.keys():  # noqa: SIM118
                trial, _, own = name.partition("|")
                tensors.setdefault(int(trial), {})[own] = content.get_tensor(name)
            memory = {int(trial): mark for trial, mark in json.loads(metadata["memory"]).items()}
        rounds = int(metadata["round"]), int(metadata["previous"])
        return StoredCheckpoint(*rounds, tensors, json.loads(metadata["logs"]), memory)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnusableCheckpoint(error.strerror or str(error)) from None
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError):
        size = path.stat().st_size
        raise UnusableCheckpoint(f"its {size} bytes are not a complete checkpoint") from None


def checkpointed(path: Path) -> tuple[int, list[int]]:
    """Return round and trials of a checkpoint for display, unchecked; ``0, []`` without one."""
    try:
        with safetensors.safe_open(path, framework="numpy") as content:
            metadata = content.metadata()
        return int(metadata["round"]), list(json.loads(metadata["binding"].partition(" ")[2]))
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError):
        return 0, []
