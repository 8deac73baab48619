"""Results of a directory that have to be equal, whatever disturbed the training."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import safetensors.numpy

from fedzmg.errors import InputError
from fedzmg.experiment.run_directory import export_model
from fedzmg.storage.client_metrics import read_clients


def is_refused(path: Path) -> bool:
    """Tell whether a missing or damaged file of tensors, which training did not need, is found."""
    try:
        if path.name.startswith("checkpoint") and path.exists():
            with tempfile.TemporaryDirectory() as folder:
                export_model(path.parent, Path(folder, "model"))
        elif path.exists():
            read_clients(path.parent)
    except InputError:
        return True
    return not path.exists()


def results(out: Path) -> dict[str, Any]:
    """Read everything that has to be equal: logs, scores, models and metrics of clients."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.suffix == ".jsonl":
            for text in path.read_bytes().splitlines():
                with contextlib.suppress(ValueError):  # a torn line, as for every reader
                    row = without_times(json.loads(text))
                    found[f"{name}, {row.get('trial')}, {row.get('round')}"] = row
        elif path.suffix == ".json" and path.name != "manifest.json":
            found[name] = without_times(json.loads(path.read_bytes()))
        elif path.suffix == ".toml":
            found[name] = path.read_text()
        elif path.name in ("checkpoint.safetensors", "clients.safetensors"):
            try:
                tensors = safetensors.numpy.load_file(path)
            except safetensors.SafetensorError as error:
                tensors = {}
                found[f"{name}, error"] = str(error)
            digests = {key: hashlib.sha256(t.tobytes()) for key, t in sorted(tensors.items())}
            found[name] = {key: digest.hexdigest() for key, digest in digests.items()}
    return found


def without_times(value: Any) -> Any:
    """Drop durations, and hashes that cover them."""
    if isinstance(value, dict):
        volatile = ("seconds", "sha256")
        return {k: without_times(v) for k, v in value.items() if not k.endswith(volatile)}
    return [without_times(item) for item in value] if isinstance(value, list) else value
