"""Take the trained model out of a run directory."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch

from fedzmg.errors import InputError
from fedzmg.experiment.runs.store import RunDirectory
from fedzmg.storage.files import write_atomic
from fedzmg.storage.lock import kept_copy


def export_model(run: Path, to: Path | None = None) -> Path:
    """Write the model of a run's last checkpoint as a state dict in safetensors.

    The file loads with ``safetensors.torch.load_file`` and ``module.load_state_dict``; frozen
    parameters are not in it (``strict=False``).

    Raises:
        InputError: if the directory is no run, holds no checkpoint yet, or cannot be written.
    """
    directory = RunDirectory(run)
    spec = directory.spec()
    checkpoint = directory.checkpoint()
    if checkpoint is None:
        kept = kept_copy(run)
        remedy = (
            f"it belongs to the kept copy {kept}; export from the original"
            if kept is not None
            else "let the run finish a round, or train it again if its checkpoints were removed"
        )
        raise InputError(f"{run} holds no checkpoint: {remedy}")
    path = to or run / "model.safetensors"
    facts = {
        "format": "pt",
        "task": spec.task,
        "algorithm": spec.algorithm,
        "seed": str(spec.seed),
        "round": str(checkpoint.round),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, safetensors.torch.save(dict(checkpoint.params().items()), facts))
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose another --to") from None
    return path
