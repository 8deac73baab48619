"""Progress of the work in a directory, read from its files; nothing is locked or written."""

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedzmg.algorithms import ALGORITHMS
from fedzmg.algorithms.options import known_options
from fedzmg.errors import InputError
from fedzmg.results.reading import variants
from fedzmg.storage.checkpoint import checkpointed
from fedzmg.storage.fields import MOST_POINTS
from fedzmg.storage.files import compressed, folder_name
from fedzmg.storage.formats import flat, json_nulls, log_rows, read_or_empty, read_toml
from fedzmg.storage.lock import Owner, read_owner
from fedzmg.storage.reading import check_folder, walk

Kind = Literal["run", "study", "grid", "starting"]
State = Literal["waiting", "running", "interrupted", "stopped", "diverged", "done"]

PLANS: dict[Kind, str] = {"study": "study.toml", "grid": "grid.toml", "run": "spec.toml"}
MANIFESTS = {"run": "manifest.json", "grid": "*/manifest.json", "study": "*/*/manifest.json"}


class Training(NamedTuple):
    """One run of a study, or trial of a grid."""

    name: str  # name for programs; it begins with ``group``
    group: str  # name of its algorithm in the study or grid
    state: State
    round: int
    rounds: int
    ended: bool  # True if no further round will be trained; a diverged run may still be trained
    evaluated: int | None = None
    metric: float | None = None  # after the round evaluated; in a grid, mean of scoring rounds
    seconds: float | None = None  # time of a round over the number of runs in the pack
    why: str = ""
    label: str = ""  # label of its algorithm in tables and figures

    @property
    def shown(self) -> str:
        return self.label + self.name.removeprefix(self.group)

    @property
    def point(self) -> str:
        """Name without the algorithm."""
        return self.name.removeprefix(self.group).strip(" /")

    def as_dict(self) -> dict[str, Any]:
        return {k: json_nulls(v) for k, v in self._asdict().items() if k != "label"}


class Work(NamedTuple):
    """A run, a study or a grid."""

    directory: str
    kind: Kind
    task: str
    metric: str
    higher_is_better: bool
    trainings: tuple[Training, ...]
    owner: Owner | None
    command: str = ""  # command line that started it, if known

    @property
    def alive(self) -> bool:
        return self.owner is not None and not self.owner.is_gone

    @property
    def complete(self) -> bool:
        return bool(self.trainings) and all(one.ended for one in self.trainings)

    @property
    def best(self) -> Training | None:
        """The training with the best last metric, diverged ones excluded."""
        found = [one for one in self.trainings if one.state != "diverged"]
        found = [one for one in found if one.metric is not None and math.isfinite(one.metric)]
        sign = 1 if self.higher_is_better else -1
        return max(found, key=lambda one: sign * (one.metric or 0.0), default=None)

    @property
    def rate(self) -> float | None:
        """Rounds per second of all trainings that run now."""
        shares = [one.seconds for one in self.trainings if one.state == "running" and one.seconds]
        return 1 / sum(shares) if shares else None

    @property
    def seconds_left(self) -> float | None:
        """Estimated time to the end at the speed so far; None before the first round."""
        known = [one.seconds for one in self.trainings if one.seconds is not None]
        if not known:
            return None
        usual, left = statistics.fmean(known), [one for one in self.trainings if not one.ended]
        times = [usual if one.seconds is None else one.seconds for one in left]
        return sum((o.rounds - o.round) * time for o, time in zip(left, times, strict=True))

    def as_dict(self) -> dict[str, Any]:
        best = self.best
        return {
            **{key: getattr(self, key) for key in self._fields[:5]}, "complete": self.complete,
            "lock": self.owner and {**asdict(self.owner), "gone": not self.alive},
            "command": self.command, "rounds_per_second": self.rate,
            "seconds_left": self.seconds_left, "best": None if best is None else best.name,
            "trainings": [one.as_dict() for one in self.trainings],
        }  # fmt: skip


class Watch:
    """Repeated look at a run, a study, a grid or some of them; it reads only changed logs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._logs: dict[Path, tuple[Any, dict[Any, dict[str, Any]]]] = {}

    def look(self) -> list[Work]:
        found, owner = self._works(), read_owner(self.directory)
        if not found and owner is None:
            what = "no run (spec.toml), study (study.toml) or grid (grid.toml)"
            raise InputError(f"{self.directory} holds {what}: give a directory of results")
        return found or [Work(str(self.directory), "starting", "", "metric", True, (), owner)]

    def follow(self, every: float, *, once: bool, wait: bool) -> Iterator[list[Work]]:
        """Look every few seconds until all is complete, or no process is at work."""
        while True:
            works = self.look()
            yield works
            if once or not any(work.alive or (wait and not work.complete) for work in works):
                return
            time.sleep(every)

    def unfinished(self) -> list[str]:
        """Return a sentence about every work in the directory that is not finished."""
        left = [work for work in self._works() if not work.complete]
        return [f"the {work.kind} {work.directory} is not finished" for work in left]

    def _works(self) -> list[Work]:
        """Read the studies, grids and runs at or below the directory, in order."""
        found = []
        for directory, below, files in walk(self.directory):
            kind = next((kind for kind, name in PLANS.items() if name in files), None)
            if kind is not None:
                below.clear()
                check_folder(directory)
                found.append(self._work(directory, kind))
        return found

    def _work(self, directory: Path, kind: Kind) -> Work:
        manifests = map(read_or_empty, sorted(directory.glob(MANIFESTS[kind])))
        facts: Mapping[str, Any] = next(filter(None, manifests), {})
        plan = read_toml(directory / PLANS[kind])
        whole = directory.resolve()  # a run may be held as part of a study
        holders = [whole, *whole.parents[:2]] if kind == "run" else [whole]
        owners = list(filter(None, map(read_owner, holders)))
        alive = [owner for owner in owners if not owner.is_gone]
        read = self._grid if kind == "grid" else self._runs
        return Work(
            str(directory), kind, str(plan.get("task", "")), str(facts.get("metric", "metric")),
            higher_is_better=bool(facts.get("higher_is_better", True)),
            trainings=tuple(read(directory, plan)), owner=next(iter(alive or owners), None),
            command=str(facts.get("command") or ""),
        )  # fmt: skip

    def _runs(self, directory: Path, plan: Mapping[str, Any]) -> Iterator[Training]:
        """Describe a run, or the runs of a study, which may not exist yet."""
        rounds, seeds, found = plan.get("rounds", 0), plan.get("seeds", []), variants(plan)
        names = itertools.islice(itertools.product(found, seeds), MOST_POINTS)
        jobs = [(directory / folder_name(name) / f"seed-{s}", name, s) for name, s in names]
        if (directory / PLANS["run"]).is_file():
            rounds = plan.get("protocol", {}).get("rounds", 0)
            jobs = [(directory, str(plan.get("algorithm", "")), plan.get("seed", 0))]
        alive = _is_alive(directory)
        for path, group, seed in jobs:
            rows = list(self._log(path / "metrics.jsonl", "round").values())
            last = max((row["round"] for row in rows), default=0)
            early = read_or_empty(path / "stopped.json")
            early = early if last >= early.get("round", math.inf) else {}
            begun = bool(rows) or (path / "spec.toml").is_file()
            yield _training(
                rows, early, running=_is_alive(path), waiting=alive or not begun,
                name=f"{group}/seed-{seed}", group=group, round=last, rounds=int(rounds),
                label=found.get(group, {}).get("label") or group,
                ended=bool(early) or last >= rounds,
            )  # fmt: skip

    def _grid(self, directory: Path, plan: Mapping[str, Any]) -> Iterator[Training]:
        """Describe the trials of a grid, whose algorithms and packs are trained in order."""
        alive, rounds = _is_alive(directory), plan.get("rounds", 0)
        for group, variant in variants(plan).items():
            path = directory / folder_name(group)
            points = list(itertools.islice(_points(group, variant, plan), MOST_POINTS))
            scored = (path / "scores.json").is_file()
            rows: dict[int, list[Mapping[str, Any]]] = {i: [] for i in range(len(points))}
            for line in self._log(path / "metrics.jsonl", "trial", "round").values():
                rows.setdefault(line["trial"], []).append(line)
            begun, members = checkpointed(path / "checkpoint.safetensors")
            seen = {i: max((row["round"] for row in own), default=0) for i, own in rows.items()}
            lasts = [max(begun * (i in members), last) for i, last in seen.items()]
            early = self._log(path / "stopped.jsonl", "trial")
            ended = [scored or last >= rounds or i in early for i, last in enumerate(lasts)]
            size = int(plan.get("together", 0)) or len(points)
            pack = next((i // size for i, end in enumerate(ended) if not end), None)
            proposed = plan.get("search", {}).get("method") == "optuna"
            for i, point in enumerate(points):
                if proposed and not lasts[i] and i not in early:
                    continue
                yield _training(
                    sorted(rows[i], key=lambda row: row["round"]), early.get(i, {}),
                    running=alive and i // size == pack, waiting=alive or not lasts[i],
                    counted=rounds - int(plan.get("last", 1)),
                    name=f"{group} {point}", group=group, label=variant.get("label") or group,
                    round=lasts[i], rounds=rounds, ended=ended[i],
                )  # fmt: skip
            alive = alive and scored  # the first algorithm without scores is running

    def _log(self, path: Path, *keys: str) -> dict[Any, dict[str, Any]]:
        """Return the lines of a log by these fields, read again if it has changed."""
        files = [file.stat() for file in (path, compressed(path)) if file.is_file()]
        state = [(file.st_ino, file.st_size, file.st_mtime_ns) for file in files]
        if self._logs.get(path, ([], {}))[0] != state:
            self._logs[path] = state, log_rows(path, *keys)
        return self._logs.get(path, ([], {}))[1]


def _training(
    rows: Sequence[Mapping[str, Any]], early: Mapping[str, Any], *, running: bool, waiting: bool,
    counted: float = math.inf, **facts: Any,
) -> Training:  # fmt: skip
    """Describe a training by its log; a grid scores by the mean over rounds after ``counted``."""
    evaluated = [row for row in rows if row.get("metric") is not None]
    scored = [row for row in evaluated if row["round"] > counted]
    metrics = [row["metric"] for row in scored or evaluated[-1:]]
    # Speed of the last twenty rounds; the first round includes one-time costs.
    recent = [row["seconds"] for row in (rows[1:] or rows)[-20:] if "seconds" in row]
    states: dict[State, Any] = {
        "diverged": any(row.get("diverged") for row in rows) or early.get("why") == "diverged",
        "stopped": early, "done": facts["ended"], "running": running, "waiting": waiting,
        "interrupted": True,
    }  # fmt: skip
    return Training(
        state=next(state for state, holds in states.items() if holds),
        evaluated=evaluated[-1]["round"] if evaluated else None,
        metric=statistics.fmean(metrics) if metrics else None,
        seconds=statistics.fmean(recent) if recent else None,
        why=str(early.get("words", "")), **facts,
    )  # fmt: skip


def _is_alive(directory: Path) -> bool:
    owner = read_owner(directory)
    return owner is not None and not owner.is_gone


def _points(group: str, variant: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options and seeds of a grid's trials, in their order."""
    axes = flat(variant.get("axes") or plan.get("axes", {}))
    # An algorithm of a plugin or an installed package is not imported for this.
    info = ALGORITHMS.data.get(str(variant.get("algorithm") or group))
    known = list(axes) if info is None else known_options(info.algorithm)
    own = {key: values for key, values in axes.items() if key in known}
    for point in itertools.product(*own.values()):
        options = [f"{key}={value:.4g}" for key, value in zip(own, point, strict=True)]
        for seed in plan.get("seeds", []):
            yield " ".join([*options, f"seed={seed}"])
