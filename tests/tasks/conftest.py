"""The small data sets, imported through the catalog."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_sets import characters, lines, photographs, records, write_h5

from fedzmg.data import catalog


@pytest.fixture(scope="session")
def small_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds every data set of the presets, some clients and examples each."""
    files, cache = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("cache")

    def bring(name: str, train: Path, test: Path) -> None:
        catalog.import_files(name, [train, test], cache)

    for name, classes in {
        "emnist62": 62,
        "emnist10": 10,
        "mnist-by-writer": 10,
        "chars74k": 62,
    }.items():
        parts = [
            write_h5(files / f"{name}_{split}.h5", characters(seed, classes))
            for seed, split in enumerate(("train", "test"))
        ]
        bring(name, *parts)
    for name in ("shakespeare", "shakespeare-by-role"):
        parts = [
            write_h5(files / f"{name}_{split}.h5", lines(seed))
            for seed, split in ((0, "train"), (1000, "test"))
        ]
        bring(name, *parts)
    bring(
        "cifar100-tff",
        write_h5(files / "fed_cifar100_train.h5", photographs(0, 11, 6)),
        write_h5(files / "fed_cifar100_test.h5", photographs(1, 3, 4)),
    )
    bring("cifar100", records(files / "train.bin", 0, 1050), records(files / "test.bin", 1, 31))
    return cache


@pytest.fixture
def cache(small_sets: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDZMG_DATA", str(small_sets))
    return small_sets
