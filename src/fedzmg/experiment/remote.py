"""Interface to other processes that train packs of trials, on this machine or on others."""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from fedzmg.experiment.progress import Progress
from fedzmg.experiment.specs.files import GridSpec, StudySpec
from fedzmg.experiment.specs.run import ResolvedRun
from fedzmg.tasks.task import Task

StudyPacks: TypeAlias = Mapping[str, Sequence[tuple[ResolvedRun, Path]]]
"""Runs and their directories by the label of their pack."""


class Remote(Protocol):
    """Trains packs elsewhere, into the same directories; the caller then only reads them."""

    def train_study(
        self, spec: StudySpec, task: Task, out: Path, packs: StudyPacks, progress: Progress,
        end: float,
    ) -> Generator[str]:  # fmt: skip
        """Train the runs of packs; yield labels in the order in which they finish."""

    def train_grid(
        self, spec: GridSpec, task: Task, folders: Mapping[str, Path], progress: Progress,
        end: float, seconds: float,
    ) -> Generator[str]:  # fmt: skip
        """Train the points of algorithms, each in its folder; yield those that are finished."""
