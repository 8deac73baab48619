"""Small data sets in the layouts that users have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fedzmg.data.formats.images import FINE_TO_COARSE

WRITERS = tuple(f"f{i:04d}_{i:02d}" for i in range(12))
COUNTS = (5, 16, 17, 1, 33, 2, 3, 4, 5, 6, 7, 8)
ROLES = {
    # Snippets by their sizes: 808 characters make a batch of 8 sequences, 807 make none.
    "A_FULL": (500, 308),
    "B_SHORT": (400, 407),
    "C_SILENT": (99,),
    "D_LONG": (1, 2000, 6),
    "E_ONE": (101,),
    **{f"F_MORE{i}": (203 + i, 30) for i in range(6)},
}


def write_h5(path: Path, clients: Mapping[str, Mapping[str, Any]]) -> Path:
    with h5py.File(path, "w") as file:
        for client, columns in clients.items():
            group = file.create_group(f"examples/{client}")
            for name, values in columns.items():
                kind = h5py.string_dtype() if name == "snippets" else None
                group.create_dataset(name, data=values, dtype=kind)
    return path


def speech(seed: int, size: int) -> str:
    letters = np.array(list("abcdefgh XYZ\n.9é"))
    return "".join(np.random.default_rng(seed).choice(letters, size))


def characters(seed: int, classes: int) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return {
        writer: {
            "pixels": rng.integers(0, 256, (count, 28, 28)).astype(np.float32) / 255,
            "label": rng.integers(0, classes, count).astype(np.int32),
        }
        for writer, count in zip(WRITERS, COUNTS, strict=True)
    }


def photographs(seed: int, clients: int, each: int) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return {
        str(i): {
            "image": rng.integers(0, 256, (each, 32, 32, 3)).astype(np.uint8),
            "label": rng.integers(0, 100, each),
            "coarse_label": rng.integers(0, 20, each),
        }
        for i in range(clients)
    }


def lines(seed: int) -> dict[str, dict[str, Any]]:
    return {
        role: {"snippets": [speech(seed + i, size) for i, size in enumerate(sizes)]}
        for role, sizes in ROLES.items()
    }


def records(path: Path, seed: int, images: int) -> Path:
    """CIFAR-100's binary form; five fine labels below each coarse one."""
    rng = np.random.default_rng(seed)
    fine = rng.permutation(np.arange(images) % 100)
    rows = rng.integers(0, 256, (images, 3074))
    rows[:, 0], rows[:, 1] = np.array(FINE_TO_COARSE)[fine], fine
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(rows.astype(np.uint8).tobytes())
    return path
