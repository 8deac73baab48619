"""Runs as plain data, read from a run directory or taken from a history in memory."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedzmg.errors import InputError
from fedzmg.storage.client_metrics import ClientMetrics, read_clients
from fedzmg.storage.formats import RESTORE, by_side, flat, log_rows, read_manifest, read_toml

if TYPE_CHECKING:
    from fedzmg.simulation import History

FORMAT = 1


class UnusualClient(NamedTuple):
    """A client with uploads that are not finite, or outliers of their cohorts."""

    name: str
    rounds: tuple[int, ...]  # rounds of these uploads, ascending
    rejected: int
    flagged: int  # outliers that were merged
    ratio: float  # largest norm over the cohort's median; of flagged uploads, if there are any
    worst: int

    def __str__(self) -> str:
        """Describe the largest update and what happened to all of them."""
        fates = ["rejected"] * (self.rejected > 0) + ["flagged"] * (self.flagged > 0)
        often = f" in {len(self.rounds)} rounds" * (len(self.rounds) > 1)
        remedy = "; federation.guard = true rejects such updates" * (self.flagged > 0)
        what = f"{' or '.join(fates)}{often}{remedy}"
        size = f"{self.ratio:.2g} x the median" if math.isfinite(self.ratio) else "not finite"
        return f"client {self.name}: update {size} in round {self.worst} ({what})"


def unusual_clients(rounds: Iterable[tuple[int, Any, Any]]) -> tuple[UnusualClient, ...]:
    """Sum up (round, rejected, flagged) by client with its ratio: flagged first, then by size."""
    uploads: dict[str, list[tuple[bool, float, int]]] = defaultdict(list)
    for round_, *both in rounds:
        for is_flagged, clients in enumerate(both):
            for name, ratio in clients:
                uploads[str(name)].append((bool(is_flagged), float(ratio), -round_))
    found = []
    for name, own in uploads.items():
        _, ratio, worst = max(own)
        flagged, numbers = sum(one[0] for one in own), sorted({-one[2] for one in own})
        counts = len(own) - flagged, flagged
        found.append(UnusualClient(name, tuple(numbers), *counts, ratio, -worst))
    return tuple(sorted(found, key=lambda one: (not one.flagged, -one.ratio, one.name)))


@dataclass(frozen=True, eq=False)
class Run:
    """One run, and its log by round in order; rounds count from 1."""

    shown: str  # path for display, from the given directory; empty in memory
    path: str  # the directory relative to the working directory; empty in memory
    spec: Mapping[str, Any]
    manifest: Mapping[str, Any]
    done: int  # number of rounds in the log
    dropped: int
    diverged: int | None
    metrics: Mapping[int, float]
    moved: Mapping[int, int]  # bytes moved until each evaluation, both ways, with scalars
    traffic: Mapping[str, int]  # sums over rounds; total: both ways; kept: per client
    seconds: float
    steps: int = 0
    plan: str = ""  # directory of the study that the run belongs to, if any
    label: str = ""
    clients: tuple[ClientMetrics, ...] = ()  # metrics on single clients by round
    unusual: tuple[UnusualClient, ...] = ()  # clients whose uploads were rejected or flagged

    @property
    def algorithm(self) -> str:
        return str(self.spec["algorithm"])

    @property
    def seed(self) -> int:
        """The seed that pairs runs."""
        return int(self.spec["seed"])

    @property
    def asked(self) -> int | None:
        rounds = self.spec.get("protocol", {}).get("rounds")
        return None if rounds is None else int(rounds)

    @property
    def complete(self) -> bool:
        """True if every round is there or the run diverged."""
        trained = bool(self.metrics) and self.done >= (self.asked or math.inf)
        return trained or self.diverged is not None

    @property
    def due(self) -> range | list[int]:
        """Rounds whose evaluations count for scores."""
        every = int(self.spec.get("protocol", {}).get("eval_every", 1))
        return scheduled(self.asked or self.done, every)

    @property
    def scored(self) -> dict[int, float]:
        """Evaluations that count for scores by round; they end where the run diverged."""
        due, end = self.due, self.diverged or math.inf
        return {r: metric for r, metric in self.metrics.items() if r in due and r < end}

    @property
    def variant(self) -> dict[str, Any]:
        """Settings that distinguish runs of one algorithm, by dotted key."""
        keys = ("client", "server", "parts", "weights", "dtype", "precision")
        stages = {k: v for k, v in self.spec.get("federation", {}).items() if k != "participation"}
        return flat({k: self.spec[k] for k in keys if k in self.spec} | {"federation": stages})

    @property
    def participation(self) -> dict[str, Any]:
        """Choice of clients and local work, as far as it is not the default."""
        return dict(self.spec.get("federation", {}).get("participation", {}))

    @property
    def shared(self) -> dict[str, Any]:
        """Settings and data that all runs of one study share."""
        hashes = {name: self.manifest.get(name) for name in ("data_sha256", "task_sha256")}
        tables = {name: self.spec.get(name, {}) for name in ("preset", "protocol")}
        # Runs of other cohorts are not paired.
        return {"task": self.spec["task"], **tables, "participation": self.participation, **hashes}

    @classmethod
    def of_history(cls, history: "History", label: str) -> "Run":
        task, algorithm = history.task, history.trial.algorithm
        spec: dict[str, Any] = {
            "task": task.name, "algorithm": algorithm.name, "seed": history.trial.seed,
            "weights": algorithm.weights, "preset": dict(task.preset),
            "protocol": dict(vars(task.protocol)), **by_side(algorithm.options()),
        }  # fmt: skip
        facts = {"metric": task.metric.name, "higher_is_better": task.metric.higher_is_better}
        log = _log([record._asdict() for record in history.records])
        return cls("", "", spec, facts, **log, label=label, clients=history.clients[-1:])


def scheduled(total: int, every: int) -> range | list[int]:
    """Return rounds whose evaluations score; the last one only if no other is in the last tenth."""
    regular = range(1, total + 1, every)
    late = total - max(1, total // 10) + 1
    return [*regular, total] if regular and regular[-1] < late else regular


def read_run(directory: Path, shown: str, notes: list[str]) -> Run | None:
    """Read the directory of a ``spec.toml``; None, and a note, if there is nothing to show."""
    spec = read_toml(directory / "spec.toml")
    if not (directory / "manifest.json").is_file():
        notes.append(f"{shown} has no manifest.json and is left out")
        return None
    manifest, log = read_manifest(directory, FORMAT), read_log(directory / "metrics.jsonl")
    if not log["done"]:
        notes.append(f"{shown} has no finished round yet")
        return None
    return Run(shown, directory.as_posix(), spec, manifest, **log, clients=read_clients(directory))


def read_log(path: Path) -> dict[str, Any]:
    """Read the fields of a run from its log; of lines for the same round the last counts."""
    by_round = log_rows(path, "round")
    try:
        return _log([by_round[round_] for round_ in sorted(by_round)])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{path} lacks a field or has a wrong one ({error}): {RESTORE}") from None


def _log(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    by_round = {int(one["round"]): one for one in records}
    evaluated = {r: one for r, one in by_round.items() if one.get("metric") is not None}
    down, up = "total_bytes_down", "total_bytes_up"
    moved = {r: int(one[down]) + int(one[up]) for r, one in by_round.items()}
    sizes = ("bytes_down", "bytes_up", "bytes_up_bound", "scalar_bytes_down", "scalar_bytes_up")
    unusual = ((r, o.get("rejected", ()), o.get("flagged", ())) for r, o in by_round.items())
    return {
        "done": max(by_round, default=0),
        "dropped": sum([int(one["dropped"]) for one in records]),
        "diverged": next((r for r, one in by_round.items() if one.get("diverged")), None),
        "metrics": {r: one["metric"] for r, one in evaluated.items()},
        "moved": {r: moved[r] for r in evaluated},
        "traffic": {
            **{name: sum([int(one[name]) for one in records]) for name in sizes},
            "kept": int(records[-1].get("bytes_kept", 0)) if records else 0,
            "total": next(reversed(moved.values()), 0),
        },
        "seconds": sum([float(one["seconds"]) for one in records]),
        "steps": sum([int(one["steps"]) for one in records]),
        "unusual": unusual_clients(unusual),
    }
