"""The checkpoint of a pack of trials: one file for all of them, with a hash of its content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedzmg.simulation import Checkpoint, Simulation
from fedzmg.storage.files import sync_directory

FORMAT = 1


class Unusable(Exception):
    """A checkpoint that cannot be believed, and why."""


class PackCheckpoint(NamedTuple):
    """Where a pack stopped."""

    round: int
    trials: dict[int, Checkpoint]
    """By number in the grid; trials that train no further are not in it."""


def save(path: Path, pack: Sequence[int], simulation: Simulation, trials: Sequence[int]) -> None:
    """Replace the checkpoint of a pack.

    Args:
        path: where it lies.
        pack: numbers of the trials that the pack began with.
        simulation: the pack as it is now.
        trials: numbers of the simulation's trials.
    """
    simulation.memory.flush()
    tensors = {
        f"{trial}|{name}": tensor
        for i, trial in enumerate(trials)
        if i not in simulation.stopped_trials
        for name, tensor in simulation.checkpoint(i).tensors.items()
    }
    metadata = {
        "format": str(FORMAT),
        "round": str(simulation.round),
        "members": json.dumps(list(pack)),
        "sha256": _digest(tensors),
    }
    temporary = path.with_name(f".{path.name}.new")
    try:
        # Straight to the file: a copy of a pack in memory may not fit.
        safetensors.torch.save_file(tensors, temporary, metadata)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    simulation.memory.commit(simulation.round)


def load(path: Path, pack: Sequence[int]) -> PackCheckpoint | None:
    """Where a pack stopped; None if there is nothing of it.

    Raises:
        Unusable: if the file is damaged.
    """
    if not path.exists():
        return None
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            if json.loads(facts["members"]) != list(pack):
                return None  # of a pack that is finished
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if facts["sha256"] != _digest(tensors):
            raise Unusable("its hash is wrong")
        round_ = int(facts["round"])
        found: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            trial, _, own = name.partition("|")
            found.setdefault(int(trial), {})[own] = tensor
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise Unusable(str(error)) from None
    return PackCheckpoint(round_, {trial: Checkpoint(round_, t) for trial, t in found.items()})


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
