"""Compare algorithms on paired seeds: curves, scores, a paired test against the first one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedzmg.algorithms import ALGORITHMS
from fedzmg.errors import InputError
from fedzmg.experiment.plain import aligned
from fedzmg.experiment.progress import Progress
from fedzmg.experiment.rules_hash import PlannedRun, say_changed_runs
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.results import scores
from fedzmg.results.curves import curve, final, whole
from fedzmg.results.significance import PairedTest, paired_t
from fedzmg.simulation import History
from fedzmg.storage.files import folder_name
from fedzmg.tasks.task import Task


@dataclass(frozen=True)
class Row:
    """One algorithm's line in the table of a comparison."""

    algorithm: str
    final: list[float]
    """Final metric of every seed; 0 for a run that diverged."""
    mean: float
    sd: float | None
    rounds_to_threshold: int | None
    """Index of the round at which the mean curve's rolling average has reached the threshold:
    index ``r`` is the state after round ``r + 1``."""
    test: PairedTest | None
    """Paired test of the reference minus this algorithm; None for the reference itself."""
    bytes_down: int
    """Arrays of one run, all rounds and clients."""
    bytes_up: int
    bytes_up_bound: int
    scalar_bytes: int
    """Scalars of one run, both ways."""
    bytes_kept: int
    """Kept by each client that took part."""
    metric_per_mib: float
    """Mean final metric over the MiB that moved in one run, both ways."""
    inferred: str
    """What of the algorithm is inferred because no source could be read."""
    dropped: int
    diverged: int


@dataclass(frozen=True)
class Comparison:
    """Histories by algorithm, in the order asked for; the first algorithm is the reference.

    All of them have the same seeds in the same order.
    """

    task: Task
    histories: dict[str, list[History]]

    def __post_init__(self) -> None:
        """Refuse runs that make no pairs."""
        seeds = {name: [h.trial.seed for h in runs] for name, runs in self.histories.items()}
        if not seeds or not all(seeds.values()):
            raise InputError("histories: give at least one of each algorithm, and one algorithm")
        first, *others = seeds
        for name in others:
            if seeds[name] != seeds[first]:
                raise InputError(
                    f"histories: {name} has the seeds {seeds[name]} and {first} {seeds[first]}; "
                    "runs are paired by their seeds, so give the same in the same order"
                )

    def __repr__(self) -> str:
        """Which algorithms, and how well; ``print`` shows the table."""
        finals = ", ".join(f"{row.algorithm} {row.mean:.4g}" for row in self.rows())
        return f"<Comparison on {self.task.name!r}, {self._over()}: {finals}>"

    def __str__(self) -> str:
        """The table in short, reference first; :meth:`rows` has all numbers."""
        rows, name = self.rows(), self.task.metric.name
        columns = {
            "algorithm": [row.algorithm for row in rows],
            f"final {name}": [f"{row.mean:.4f}" for row in rows],
            "sd": ["" if row.sd is None else f"{row.sd:.4f}" for row in rows],
            f"to {self.threshold:g}": [
                "never" if row.rounds_to_threshold is None else str(row.rounds_to_threshold)
                for row in rows
            ],
            "diff.": [f"{row.test.mean_difference:+.4f}" if row.test else "" for row in rows],
            "p": [f"{row.test.p:.3g}" if row.test else "" for row in rows],
            "diverged": [str(row.diverged) if row.diverged else "" for row in rows],
        }
        words = [
            f"final: mean over the last tenth of the rounds; to {self.threshold:g}: index of the "
            "round that arrives"
        ]
        if any(row.test for row in rows):
            words.append(f"diff. and p: paired t-test of {rows[0].algorithm} minus this one")
        return "\n".join([f"{self.task.name}, {self._over()}", "", aligned(columns), "", *words])

    def _over(self) -> str:
        """What the numbers are about."""
        runs = next(iter(self.histories.values()))
        seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} paired seeds"
        return f"{seeds}, {runs[0].task.protocol.rounds} rounds"

    @property
    def threshold(self) -> float:
        """The metric to be reached."""
        return next(iter(self.histories.values()))[0].task.protocol.threshold

    def rows(self) -> list[Row]:
        """The table, reference first."""
        finals = {name: [final(h) for h in runs] for name, runs in self.histories.items()}
        reference = next(iter(finals.values()))
        out = []
        for name, runs in self.histories.items():
            values, one = finals[name], whole(runs)
            spread = len(values) > 1 and all(map(math.isfinite, values))
            paired = values is not reference and spread and all(map(math.isfinite, reference))
            out.append(
                Row(
                    algorithm=name,
                    final=values,
                    mean=statistics.fmean(values),
                    sd=statistics.stdev(values) if spread else None,
                    rounds_to_threshold=self._arrival(runs),
                    test=paired_t(reference, values) if paired else None,
                    bytes_down=sum(r.bytes_down for r in one.records),
                    bytes_up=sum(r.bytes_up for r in one.records),
                    bytes_up_bound=sum(r.bytes_up_bound for r in one.records),
                    scalar_bytes=sum(r.scalar_bytes_down + r.scalar_bytes_up for r in one.records),
                    bytes_kept=one.records[-1].bytes_kept,
                    metric_per_mib=statistics.fmean(values) * 2**20 / _moved(one),
                    inferred=ALGORITHMS[name].inferred if name in ALGORITHMS else "",
                    dropped=sum(r.dropped for h in runs for r in h.records),
                    diverged=sum(h.diverged is not None for h in runs),
                )
            )
        return out

    def _arrival(self, runs: list[History]) -> int | None:
        metric = self.task.metric
        curves = [curve(h) for h in runs]
        return scores.rounds_to_threshold(
            curves[0].indices,
            scores.mean_curve([one.metrics for one in curves]),
            self.threshold,
            higher_is_better=metric.higher_is_better,
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything a program or a report would read; a diverged run's curve ends in null."""
        return {
            "task": self.task.name,
            "metric": self.task.metric.name,
            "threshold": self.threshold,
            "reference": next(iter(self.histories)),
            "seeds": [h.trial.seed for h in next(iter(self.histories.values()))],
            "algorithms": [asdict(row) for row in self.rows()],
            "curves": {
                name: {
                    "indices": curve(runs[0]).indices,
                    "runs": [_until_diverged(h) for h in runs],
                }
                for name, runs in self.histories.items()
            },
        }


def _moved(history: History) -> int:
    last = history.records[-1]
    return last.total_bytes_down + last.total_bytes_up


def _until_diverged(history: History) -> list[float | None]:
    end = history.diverged or history.task.protocol.rounds + 1
    return [
        value if index + 1 < end else None for index, value in zip(*curve(history), strict=True)
    ]


def compare_specs(
    task: Task,
    specs: Sequence[RunSpec],
    seeds: Sequence[int],
    out: Path | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Run every specification under every seed; the seeds of one specification train together.

    Args:
        task: the task that all specifications name.
        specs: one per algorithm; the first is the reference of the paired tests.
        seeds: every seed fixes initial weights, cohorts, batches and dropout for all algorithms.
        out: a directory for run directories, ``ALGORITHM/seed-SEED`` each.
        progress: what shows the user how far the work is.
    """
    histories = {}
    runs_of = [[spec.model_copy(update={"seed": seed}) for seed in seeds] for spec in specs]
    if out is not None and progress is not None:
        planned = [
            PlannedRun(run.algorithm, run, run_place(out, run.algorithm, run.seed))
            for runs in runs_of
            for run in runs
        ]
        say_changed_runs(task, planned, out, progress.say)
    for runs in runs_of:
        name = runs[0].algorithm
        places = None if out is None else [run_place(out, name, run.seed) for run in runs]
        histories[name] = run_pack(task, runs, places, progress=progress)
    return Comparison(task, histories)


def run_place(out: Path, algorithm: str, seed: int) -> Path:
    """The run directory of one algorithm and seed."""
    return out / folder_name(algorithm) / f"seed-{seed}"
