"""Progress of the work in a directory, read from its files; nothing is locked or written."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedzmg import algorithms
from fedzmg.algorithms.options import known_options
from fedzmg.errors import InputError
from fedzmg.results.grouping import variants
from fedzmg.storage.files import folder_name
from fedzmg.storage.formats import Tail, flat, json_nulls, read_json, read_toml
from fedzmg.storage.lock import NAME as LOCK
from fedzmg.storage.lock import Owner, read_owner

Kind = Literal["run", "study", "grid", "starting"]
State = Literal["waiting", "running", "interrupted", "stopped", "diverged", "done"]

PLANS: dict[str, Kind] = {"study.toml": "study", "grid.toml": "grid", "spec.toml": "run"}
MANIFESTS = {"run": "manifest.json", "grid": "*/manifest.json", "study": "*/*/manifest.json"}
RECENT = 20
"""Number of last rounds that the speed is measured over."""


class Training(NamedTuple):
    """One run of a study, or trial of a grid."""

    name: str
    """Name for programs; it begins with ``group``."""
    group: str
    """Name of its algorithm in the study or grid."""
    state: State
    round: int
    rounds: int
    ended: bool
    """True if no further round will be trained; a diverged run may still be trained."""
    evaluated: int | None = None
    metric: float | None = None
    """Metric after the round ``evaluated``; in a grid, mean over the rounds that score."""
    seconds: float | None = None
    """Time of a round, divided by the number of runs that train together."""
    why: str = ""
    label: str = ""
    """Label of its algorithm in tables and figures."""
    options: Mapping[str, str] = {}
    """Options that distinguish a grid's trial from others of its algorithm."""

    @property
    def shown(self) -> str:
        """Name in tables."""
        return self.label + self.name.removeprefix(self.group)

    @property
    def point(self) -> str:
        """Name without the algorithm."""
        return self.name.removeprefix(self.group).strip(" /")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON without those for tables; non-finite numbers become null."""
        values: dict[str, Any] = json_nulls(self._asdict())
        return {key: value for key, value in values.items() if key not in ("label", "options")}


class Work(NamedTuple):
    """A run, a study or a grid."""

    directory: str
    kind: Kind
    task: str
    metric: str
    higher_is_better: bool
    trainings: tuple[Training, ...]
    owner: Owner | None
    command: str = ""
    """Command line that started it, if known."""

    @property
    def alive(self) -> bool:
        """True if a process is working on it."""
        return self.owner is not None and not self.owner.is_gone

    @property
    def complete(self) -> bool:
        """True if every training has ended."""
        return bool(self.trainings) and all(one.ended for one in self.trainings)

    @property
    def best(self) -> Training | None:
        """The training with the best last metric, diverged ones excluded."""
        found = [
            one
            for one in self.trainings
            if one.metric is not None and one.state != "diverged" and math.isfinite(one.metric)
        ]
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
        known: dict[str, list[float]] = {}
        for one in self.trainings:
            if one.seconds is not None:
                known.setdefault(one.group, []).append(one.seconds)
        if not known:
            return None
        usual = statistics.fmean(itertools.chain(*known.values()))
        left = 0.0
        for one in self.trainings:
            if not one.ended:
                mean = statistics.fmean(known[one.group]) if one.group in known else usual
                left += (one.rounds - one.round) * (mean if one.seconds is None else one.seconds)
        return left

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON; non-finite numbers become null."""
        best = self.best
        return {
            **{key: getattr(self, key) for key in self._fields[:5]},
            "complete": self.complete,
            "lock": self.owner and {**asdict(self.owner), "gone": not self.alive},
            "command": self.command,
            "rounds_per_second": self.rate,
            "seconds_left": self.seconds_left,
            "best": None if best is None else best.name,
            "trainings": [one.as_dict() for one in self.trainings],
        }


class Watch:
    """Repeated look at a directory; every look reads only new lines.

    Args:
        directory: a run, a study, a grid, or a directory that holds some of them.

    Raises:
        InputError: if there is none, now or at a later look.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._tails: dict[Path, Tail] = {}
        if not directory.is_dir():
            raise InputError(
                f"{directory} is not a directory; give the directory of a command's work"
            )

    def look(self) -> list[Work]:
        """Return the work in the directory as it is now."""
        found = [self._work(*work) for work in find_works(self.directory)]
        if found:
            return found
        owner = read_owner(self.directory)
        if owner is None:
            raise InputError(
                f"{self.directory} holds no run (spec.toml), study (study.toml) or grid "
                "(grid.toml); give the directory that a command shows at its end, or its --out"
            )
        return [Work(str(self.directory), "starting", "", "metric", True, (), owner)]

    def unfinished(self) -> list[str]:
        """Return a sentence about every work in the directory that is not finished."""
        found = []
        for work in itertools.starmap(self._work, find_works(self.directory)):
            if not work.complete:
                now = " and runs now" if work.alive else ""
                ended = sum(training.ended for training in work.trainings)
                of = f" ({ended} of {len(work.trainings)} trained)" if work.kind != "run" else ""
                found.append(f"the {work.kind} {work.directory} is not finished{of}{now}")
        return found

    def _work(self, directory: Path, kind: Kind) -> Work:
        found = map(_json_or_empty, sorted(directory.glob(MANIFESTS[kind])))
        facts: Mapping[str, Any] = next(filter(None, found), {})
        file = next(name for name, known in PLANS.items() if known == kind)
        plan = read_toml(directory / file)
        trainings = {"run": self._run, "study": self._study, "grid": self._grid}[kind]
        return Work(
            directory=str(directory),
            kind=kind,
            task=str(plan.get("task", "")),
            metric=str(facts.get("metric", "metric")),
            higher_is_better=bool(facts.get("higher_is_better", True)),
            trainings=tuple(trainings(directory, plan)),
            owner=_owner_of(directory, kind),
            command=str(facts.get("command") or ""),
        )

    def _run(self, directory: Path, plan: Mapping[str, Any]) -> Iterator[Training]:
        group = str(plan.get("algorithm", ""))
        rounds = int(plan.get("protocol", {}).get("rounds", 0))
        name = f"{group}/seed-{plan.get('seed', 0)}"
        one = self._training(directory, name, group, rounds, _is_alive(directory))
        yield one._replace(label=group)

    def _study(self, directory: Path, plan: Mapping[str, Any]) -> Iterator[Training]:
        for group, variant in variants(plan).items():
            for seed in plan.get("seeds", []):
                path = directory / folder_name(group) / f"seed-{seed}"
                name, rounds = f"{group}/seed-{seed}", int(plan["rounds"])
                one = self._training(path, name, group, rounds, _is_alive(directory))
                yield one._replace(label=_label(group, variant))

    def _training(self, path: Path, name: str, group: str, rounds: int, alive: bool) -> Training:
        """Describe a run directory, which may not exist yet; ``alive``: its study is running."""
        rows = self._tail(path / "metrics.jsonl", "round")
        if not rows and not (path / "spec.toml").is_file():
            return Training(name, group, "waiting", 0, rounds, ended=False)
        last = max(rows, default=0)
        early = _json_or_empty(path / "stopped.json")
        at = early.get("round")
        stopped = at is not None and last >= at
        return Training(
            name=name,
            group=group,
            state=_state(
                rows.values(), early if stopped else {}, last >= rounds,
                running=_is_alive(path), waiting=alive,
            ),
            round=last,
            rounds=rounds,
            ended=stopped or last >= rounds,
            **_latest(rows.values()),
            why=str(early.get("words", "")) if stopped else "",
        )  # fmt: skip

    def _grid(self, directory: Path, plan: Mapping[str, Any]) -> Iterator[Training]:
        alive, reached = _is_alive(directory), False
        for group, variant in variants(plan).items():
            path = directory / folder_name(group)
            scored = (path / "scores.json").is_file()
            # Algorithms are searched in order: the first without scores is running.
            yield from self._search(path, group, variant, plan, scored, alive and not reached)
            reached = reached or not scored

    def _search(
        self,
        path: Path,
        group: str,
        variant: Mapping[str, Any],
        plan: Mapping[str, Any],
        scored: bool,
        alive: bool,
    ) -> Iterator[Training]:
        rounds = int(plan["rounds"])
        rows: dict[int, list[Mapping[str, Any]]] = {}
        for line in self._tail(path / "metrics.jsonl", "trial", "round").values():
            rows.setdefault(line["trial"], []).append(line)
        stops = self._tail(path / "stopped.jsonl", "trial")
        points = list(_points(group, variant, plan))
        begun, members = _checkpointed(path / "checkpoint.safetensors")
        size = int(plan.get("together", 0)) or len(points)
        lasts = [
            max([begun if i in members else 0, *(int(r["round"]) for r in rows.get(i, []))])
            for i in range(len(points))
        ]
        early = {i: s for i, s in stops.items() if not s.get("revoked")}
        ended = [scored or last >= rounds or i in early for i, last in enumerate(lasts)]
        # Packs are trained in order, too.
        pack = next((i // size for i, end in enumerate(ended) if not end), None)
        for i, options in enumerate(points):
            yield Training(
                name=" ".join([group, *(f"{key}={value}" for key, value in options.items())]),
                group=group,
                state=_state(
                    rows.get(i, []), early.get(i, {}), ended[i],
                    running=alive and i // size == pack, waiting=alive or not lasts[i],
                ),
                round=lasts[i],
                rounds=rounds,
                ended=ended[i],
                **_latest(
                    sorted(rows.get(i, []), key=lambda row: int(row["round"])),
                    counted=rounds - int(plan.get("last", 1)),
                ),
                why=str(early.get(i, {}).get("words", "")),
                label=_label(group, variant),
                options=options,
            )  # fmt: skip

    def _tail(self, path: Path, *keys: str) -> dict[Any, dict[str, Any]]:
        return self._tails.setdefault(path, Tail(path, *keys)).update()


def find_works(top: Path) -> Iterator[tuple[Path, Kind]]:
    """Yield the studies, grids and runs at or below a directory, in order."""
    for current, below, files in os.walk(top):
        below[:] = sorted(name for name in below if not name.startswith("."))
        kind = next((kind for name, kind in PLANS.items() if name in files), None)
        if kind is not None:
            below.clear()
            yield Path(current), kind


def _owner_of(directory: Path, kind: Kind) -> Owner | None:
    """Return the holder of a directory; a run may be held as part of a study."""
    whole = directory.resolve()
    holders = [whole, *whole.parents[:2]] if kind == "run" else [whole]
    found = list(filter(None, map(read_owner, holders)))
    return next((owner for owner in found if not owner.is_gone), found[0] if found else None)


def _is_alive(directory: Path) -> bool:
    """Return True if a process holds a directory."""
    owner = read_owner(directory) if (directory / LOCK).exists() else None
    return owner is not None and not owner.is_gone


def _json_or_empty(path: Path) -> dict[str, Any]:
    """Read a file that may be missing, or be about to be replaced."""
    try:
        return read_json(path)
    except InputError:
        return {}


def _state(
    rows: Iterable[Mapping[str, Any]],
    early: Mapping[str, Any],
    ended: bool,
    *,
    running: bool,
    waiting: bool,
) -> State:
    if any(row.get("diverged") for row in rows) or early.get("why") == "diverged":
        return "diverged"
    if early:
        return "stopped"
    if ended:
        return "done"
    if running:
        return "running"
    return "waiting" if waiting else "interrupted"


def _latest(rows: Iterable[Mapping[str, Any]], counted: int | None = None) -> dict[str, Any]:
    """Return the last evaluation and the time of a round.

    A grid scores trials by the mean over rounds after ``counted``.
    """
    listed = list(rows)
    evaluated = [row for row in listed if row.get("metric") is not None]
    scored = [row for row in evaluated if counted is not None and row["round"] > counted]
    shown = [float(row["metric"]) for row in scored or evaluated[-1:]]
    # The first round includes one-time costs.
    recent = [float(row["seconds"]) for row in (listed[1:] or listed)[-RECENT:] if "seconds" in row]
    return {
        "evaluated": int(evaluated[-1]["round"]) if evaluated else None,
        "metric": statistics.fmean(shown) if shown else None,
        "seconds": statistics.fmean(recent) if recent else None,
    }


def _label(group: str, variant: Mapping[str, Any]) -> str:
    return str(variant.get("label") or group)


def _points(
    group: str, variant: Mapping[str, Any], plan: Mapping[str, Any]
) -> Iterator[dict[str, str]]:
    """Yield the options of a grid's trials, in their order."""
    axes = flat(variant.get("axes") or plan.get("axes", {}))
    try:
        known = known_options(algorithms.get(str(variant.get("algorithm") or group)))
    except InputError:
        known = list(axes)
    own = {key: values for key, values in axes.items() if key in known}
    for point in itertools.product(*own.values()):
        options = {key: f"{value:.4g}" for key, value in zip(own, point, strict=True)}
        for seed in plan.get("seeds", []):
            yield {**options, "seed": str(seed)}


def _checkpointed(path: Path) -> tuple[int, Sequence[int]]:
    """Return the round of a grid's checkpoint and its trials; only the header is read."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            facts = json.loads(file.read(size))["__metadata__"]
        return int(facts["round"]), list(json.loads(facts["members"]))
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError):
        return 0, ()
