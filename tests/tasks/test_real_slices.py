"""Every preset from file to trained model, on a few clients of real data.

Presets of TFF's files read the stand-ins, which have the same layout.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from fedzmg import Trial, simulate, tasks
from fedzmg.data import catalog
from fedzmg.data.federated import Examples

REAL = os.environ.get("FEDZMG_REAL_DATA")
pytestmark = pytest.mark.skipif(
    REAL is None, reason="FEDZMG_REAL_DATA does not name a folder with the real files"
)


@dataclass(frozen=True)
class Slice:
    """A few clients, a short training, and an accuracy that chance does not reach."""

    files: str
    chance: float
    beats: float
    lr: float
    cohort: int
    epochs: int
    rounds: int = 4
    options: dict[str, Any] = field(default_factory=dict)


DIGITS = Slice("mnist_by_writer", 1 / 10, 0.2, lr=0.1, cohort=3, epochs=1)
LETTERS = Slice("chars74k_by_writer", 1 / 62, 0.08, lr=0.1, cohort=3, epochs=2)
# Sequences of 12 characters: a GRU of 1024 units is slow without a GPU.
LINES = Slice(
    "shakespeare_by_role", 1 / 66, 0.12, lr=0.1, cohort=2, epochs=1, options={"length": 12}
)
SLICES = {
    "emnist62": LETTERS,
    "emnist10": DIGITS,
    "emnist10-head62": DIGITS,
    "mnist-by-writer": DIGITS,
    "chars74k": LETTERS,
    # Short of a thousand steps it finds out little more than which labels there are.
    "cifar100": Slice("cifar-100-binary", 1 / 100, 0.15, lr=0.03, cohort=2, epochs=1, rounds=2),
    "shakespeare": LINES,
    "shakespeare-by-role": LINES,
}
CLIENTS = 10
TESTED = 50


def cut_h5(source: Path, target: Path, names: list[str]) -> Path:
    with h5py.File(source) as file, h5py.File(target, "w") as out:
        for name in names:
            file.copy(f"examples/{name}", out.require_group("examples"), name)
    return target


def some_clients(path: Path) -> list[str]:
    """Choose the shortest texts that make a few batches, or the first images."""
    with h5py.File(path) as file:
        names = sorted(file["examples"])
        if "snippets" in file["examples"][names[0]]:
            sizes = {n: sum(map(len, file["examples"][n]["snippets"])) for n in names}
            names = sorted((n for n in names if sizes[n] > 350), key=sizes.__getitem__)
    return names[:CLIENTS]


def cut_records(source: Path, target: Path, images: int) -> Path:
    """Images of four of the hundred labels: apple, plain, sea, skyscraper."""
    rows = np.fromfile(source, np.uint8).reshape(-1, 3074)
    rows[np.isin(rows[:, 1], (0, 60, 71, 76))][:images].tofile(target)
    return target


@pytest.fixture
def here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Bring the slice of a preset into a cache of its own; the preset's name."""
    assert REAL is not None
    name: str = request.param
    part, real = SLICES[name], Path(REAL)
    files = [tmp_path / f"slice_{split}" for split in ("train", "test")]
    if name == "cifar100":
        for file, split, images in zip(files, ("train", "test"), (1000, 2 * TESTED), strict=True):
            cut_records(real / part.files / f"{split}.bin", file.with_suffix(".bin"), images)
        files = [file.with_suffix(".bin") for file in files]
    else:
        sources = [real / f"{part.files}_{split}.h5" for split in ("train", "test")]
        names = some_clients(sources[0])
        files = [
            cut_h5(source, file.with_suffix(".h5"), names)
            for source, file in zip(sources, files, strict=True)
        ]
    data = tasks.info(name).data
    assert data is not None
    monkeypatch.setenv("FEDZMG_DATA", str(tmp_path / "cache"))
    catalog.import_files(data, files)
    return name


@pytest.mark.parametrize("here", SLICES, indirect=True)
def test_preset_learns_and_engines_agree(here: str) -> None:
    part = SLICES[here]
    task = tasks.get(here, part.options)
    assert len(task.train) == CLIENTS
    short = {"cohort": part.cohort, "epochs": part.epochs, "eval_every": part.rounds - 1}
    task = replace(
        task,
        test=Examples(task.test.x[:TESTED], task.test.y[:TESTED]),
        protocol=task.protocol.with_options(short),
    )
    trial = Trial.of("fedzmg", client_lr=part.lr)
    [history] = simulate(task, trial, rounds=part.rounds, engine="sequential", device="cpu")
    losses = [r.loss for r in history.records if r.loss is not None]
    assert losses[-1] < losses[0]
    assert history.metrics[-1] > part.beats > part.chance

    # In double precision, because momentum makes much of the last bits of single precision.
    narrow = replace(task, protocol=task.protocol.with_options({"cohort": 2, "epochs": 1}))
    loop, mapped = (
        simulate(narrow, trial, rounds=1, engine=engine, device="cpu", dtype=torch.float64)[0]  # type: ignore[arg-type]
        for engine in ("sequential", "vectorized")
    )
    assert loop.records[0].steps == mapped.records[0].steps > 0
    for key, leaf in loop.params.items():
        torch.testing.assert_close(leaf, mapped.params[key], rtol=0, atol=1e-8)
