"""How far the work in a directory is, as its files tell: nothing is locked, nothing is written."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedzmg import algorithms
from fedzmg.algorithms.options import known_options
from fedzmg.errors import InputError
from fedzmg.results.tail import Tail
from fedzmg.results.work_places import (
    Kind,
    Place,
    asked_by,
    is_alive,
    json_or_nothing,
    manifests,
    owner_of,
    places,
)
from fedzmg.storage.files import folder_name
from fedzmg.storage.formats import flat, json_nulls, read_toml
from fedzmg.storage.lock import Owner, read_owner

State = Literal["waiting", "running", "interrupted", "stopped", "diverged", "done"]

RECENT = 20
"""Rounds that speak for the speed."""


class Training(NamedTuple):
    """One run of a study or comparison, or trial of a grid."""

    name: str
    """For programs: it begins with ``group``."""
    group: str
    """Its algorithm, as the study or grid calls it."""
    state: State
    round: int
    rounds: int
    ended: bool
    """Whether nothing more comes; one that diverged may still be trained along."""
    evaluated: int | None = None
    metric: float | None = None
    """After the round ``evaluated``; of a grid's trial the mean over the rounds that score."""
    seconds: float | None = None
    """A round of it, as a share of what trains beside it."""
    why: str = ""
    label: str = ""
    """Its algorithm, as tables and figures call it."""
    options: Mapping[str, str] = {}
    """What tells a grid's trial apart from others of its algorithm, as it is shown."""

    @property
    def shown(self) -> str:
        """Its name in tables."""
        return self.label + self.name.removeprefix(self.group)

    @property
    def point(self) -> str:
        """Its name without the algorithm."""
        return self.name.removeprefix(self.group).strip(" /")

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; what tables show is left out, what is not finite becomes null."""
        values: dict[str, Any] = json_nulls(self._asdict())
        return {key: value for key, value in values.items() if key not in ("label", "options")}


class Work(NamedTuple):
    """A run, a study, a comparison or a grid."""

    place: str
    kind: Kind
    task: str
    metric: str
    higher_is_better: bool
    trainings: tuple[Training, ...]
    owner: Owner | None
    command: str = ""
    """That made it, where that is known."""

    @property
    def alive(self) -> bool:
        """Whether a process is at work."""
        return self.owner is not None and not self.owner.is_gone

    @property
    def complete(self) -> bool:
        """Whether all is trained."""
        return bool(self.trainings) and all(one.ended for one in self.trainings)

    @property
    def best(self) -> Training | None:
        """The training with the best last metric; one that diverged has none."""
        found = [
            one
            for one in self.trainings
            if one.metric is not None and one.state != "diverged" and math.isfinite(one.metric)
        ]
        sign = 1 if self.higher_is_better else -1
        return max(found, key=lambda one: sign * (one.metric or 0.0), default=None)

    @property
    def rate(self) -> float | None:
        """Rounds in a second of what is trained together now."""
        shares = [one.seconds for one in self.trainings if one.state == "running" and one.seconds]
        return 1 / sum(shares) if shares else None

    @property
    def seconds_left(self) -> float | None:
        """Time until the end at the speed so far; None before there is any."""
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
        """Everything, ready for JSON; what is not finite becomes null."""
        best = self.best
        held = None if self.owner is None else {**asdict(self.owner), "gone": not self.alive}
        return {
            "place": self.place,
            "kind": self.kind,
            "task": self.task,
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "complete": self.complete,
            "lock": held,
            "command": self.command,
            "rounds_per_second": self.rate,
            "seconds_left": self.seconds_left,
            "best": None if best is None else best.name,
            "trainings": [one.as_dict() for one in self.trainings],
        }


class Watch:
    """FullPassTiming at a directory again and again; every look reads only what is new.

    Args:
        place: a run, a study, a comparison, a grid, or a directory that holds some of them.

    Raises:
        InputError: if there is none, now or at a later look.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._tails: dict[Path, Tail] = {}
        self._owners: dict[Path, Owner] = {}
        if not place.is_dir():
            raise InputError(f"{place} is no directory: give one in which a command is at work")

    def look(self) -> list[Work]:
        """The work there is, as it is now."""
        found = [self._work(place) for place in places(self.place)]
        if found:
            return found
        owner = read_owner(self.place)
        if owner is None:
            raise InputError(
                f"{self.place} holds no run (spec.toml), study (study.toml) or grid (grid.toml): "
                "give the directory that a command shows at its end, or its --out"
            )
        return [Work(str(self.place), "starting", "", "metric", True, (), owner)]

    def _work(self, place: Place) -> Work:
        facts: Mapping[str, Any] = next(filter(None, map(json_or_nothing, manifests(place))), {})
        metric, owner = facts.get("metric", "metric"), owner_of(place)
        if place.kind == "comparison":
            plan = read_toml(place.runs[0] / "spec.toml")
            trainings = self._comparison(place)
            owner = self._between(place, owner)
        else:
            file, look = {
                "run": ("spec.toml", self._run),
                "study": ("study.toml", self._study),
                "grid": ("grid.toml", self._grid),
            }[place.kind]
            plan = read_toml(place.directory / file)
            trainings = look(place.directory, plan)
        return Work(
            place=str(place.directory),
            kind=place.kind,
            task=str(plan.get("task", "")),
            metric=str(metric["name"] if isinstance(metric, Mapping) else metric),
            higher_is_better=bool(facts.get("higher_is_better", True)),
            trainings=tuple(trainings),
            owner=owner,
            command=str(facts.get("command") or ""),
        )

    def _between(self, place: Place, owner: Owner | None) -> Owner | None:
        """Who holds a comparison, also in the moment between two algorithms, when nothing is held.

        A command ends with its work, so as long as it lives it is at work.
        """
        before = self._owners.get(place.directory)
        if owner is None and before is not None and not before.is_gone and asked_by(place):
            return before
        if owner is not None:
            self._owners[place.directory] = owner
        return owner

    def _comparison(self, place: Place) -> list[Training]:
        """Its runs, in the order of the command that makes it, and those that it has yet to begin.

        One that was made in Python has no such command; then those that have begun are all there
        is to tell.
        """
        alive = any(map(is_alive, place.runs))
        begun = [self._run(run, read_toml(run / "spec.toml"), alive)[0] for run in place.runs]
        groups = dict.fromkeys([*asked_by(place), *(one.group for one in begun)])
        known = {one.name: one for one in begun}
        waiting = begun[0]._replace(state="waiting", round=0, ended=False, why="")
        waiting = waiting._replace(evaluated=None, metric=None, seconds=None)
        seeds = sorted({int(one.name.rpartition("-")[2]) for one in begun})
        found = []
        for group in groups:
            for seed in seeds:
                name = f"{group}/seed-{seed}"
                found.append(
                    known.get(name) or waiting._replace(name=name, group=group, label=group)
                )
        return found

    def _run(
        self, directory: Path, plan: Mapping[str, Any], alive: bool | None = None
    ) -> list[Training]:
        """A run by itself or, if ``alive`` says whether all of it is at work, of a comparison."""
        group = str(plan.get("algorithm", ""))
        rounds = int(plan.get("protocol", {}).get("rounds", 0))
        name = f"{group}/seed-{plan.get('seed', 0)}"
        around = is_alive(directory) if alive is None else alive
        one = self._training(directory, name, group, rounds, around)
        return [one._replace(label=group)]

    def _study(self, directory: Path, plan: Mapping[str, Any]) -> list[Training]:
        found = []
        for group, variant in _variants(plan).items():
            for seed in plan.get("seeds", []):
                place = directory / folder_name(group) / f"seed-{seed}"
                name, rounds = f"{group}/seed-{seed}", int(plan["rounds"])
                one = self._training(place, name, group, rounds, is_alive(directory))
                found.append(one._replace(label=_label(group, variant)))
        return found

    def _training(self, place: Path, name: str, group: str, rounds: int, alive: bool) -> Training:
        """A run directory, which may not be there yet; ``alive``: its study is at work."""
        rows = self._tail(place / "metrics.jsonl", "round")
        if not rows and not (place / "spec.toml").is_file():
            return Training(name, group, "waiting", 0, rounds, ended=False)
        last = max(rows, default=0)
        early = json_or_nothing(place / "stopped.json")
        at = early.get("round")
        stopped = at is not None and last >= at
        return Training(
            name=name,
            group=group,
            state=_state(
                rows.values(), early if stopped else {}, last >= rounds,
                running=is_alive(place), waiting=alive,
            ),
            round=last,
            rounds=rounds,
            ended=stopped or last >= rounds,
            **_latest(rows.values()),
            why=str(early.get("words", "")) if stopped else "",
        )  # fmt: skip

    def _grid(self, directory: Path, plan: Mapping[str, Any]) -> list[Training]:
        found: list[Training] = []
        alive, reached = is_alive(directory), False
        for group, variant in _variants(plan).items():
            place = directory / folder_name(group)
            scored = (place / "scores.json").is_file()
            # Algorithms come one after another: the first without scores is at work.
            found += self._search(place, group, variant, plan, scored, alive and not reached)
            reached = reached or not scored
        return found

    def _search(
        self,
        place: Path,
        group: str,
        variant: Mapping[str, Any],
        plan: Mapping[str, Any],
        scored: bool,
        alive: bool,
    ) -> list[Training]:
        rounds = int(plan["rounds"])
        rows: dict[int, list[Mapping[str, Any]]] = {}
        for line in self._tail(place / "metrics.jsonl", "trial", "round").values():
            rows.setdefault(line["trial"], []).append(line)
        stops = self._tail(place / "stopped.jsonl", "trial")
        points = list(_points(group, variant, plan))
        begun, members = _checkpointed(place / "checkpoint.safetensors")
        size = int(plan.get("together", 0)) or len(points)
        lasts = [
            max([begun if i in members else 0, *(int(r["round"]) for r in rows.get(i, []))])
            for i in range(len(points))
        ]
        early = {i: s for i, s in stops.items() if not s.get("revoked")}
        ended = [scored or last >= rounds or i in early for i, last in enumerate(lasts)]
        # Packs come one after another, too.
        pack = next((i // size for i, end in enumerate(ended) if not end), None)
        return [
            Training(
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
            )
            for i, options in enumerate(points)
        ]  # fmt: skip

    def _tail(self, path: Path, *keys: str) -> dict[Any, dict[str, Any]]:
        if path not in self._tails:
            self._tails[path] = Tail(path, *keys)
        return self._tails[path].update()


def unfinished(place: Path) -> list[str]:
    """A sentence about every work in a directory that is not finished."""
    found, watch = [], Watch(place)
    for one in places(place):
        work = watch._work(one)
        if not work.complete:
            now = " and runs now" if work.alive else ""
            ended = sum(training.ended for training in work.trainings)
            counts = f" ({ended} of {len(work.trainings)} trained)" if work.kind != "run" else ""
            found.append(f"the {work.kind} {work.place} is not finished{counts}{now}")
    return found


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
    """The last evaluation, and the time that a round takes.

    A grid scores trials by the mean over rounds after ``counted``: so far, once there are any.
    """
    listed = list(rows)
    evaluated = [row for row in listed if row.get("metric") is not None]
    scored = [row for row in evaluated if counted is not None and row["round"] > counted]
    shown = [float(row["metric"]) for row in scored or evaluated[-1:]]
    # The first round also pays for what is done once.
    recent = [float(row["seconds"]) for row in (listed[1:] or listed)[-RECENT:] if "seconds" in row]
    return {
        "evaluated": int(evaluated[-1]["round"]) if evaluated else None,
        "metric": statistics.fmean(shown) if shown else None,
        "seconds": statistics.fmean(recent) if recent else None,
    }


def _variants(plan: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The algorithms of a plan, which a user may have listed by their names only."""
    listed = plan.get("algorithms", {})
    return listed if isinstance(listed, Mapping) else {name: {} for name in listed}


def _label(group: str, variant: Mapping[str, Any]) -> str:
    return str(variant.get("label") or group)


def _points(
    group: str, variant: Mapping[str, Any], plan: Mapping[str, Any]
) -> Iterator[dict[str, str]]:
    """Options of a grid's trials, in their order."""
    axes = flat(variant.get("axes") or plan.get("axes", {}))
    try:
        known = known_options(algorithms.get(str(variant.get("algorithm") or group)))
    except InputError:
        known = list(axes)
    own = {key: values for key, values in axes.items() if key in known}
    for point in itertools.product(*own.values()):
        told = {key: f"{value:.4g}" for key, value in zip(own, point, strict=True)}
        for seed in plan.get("seeds", []):
            yield {**told, "seed": str(seed)}


def _checkpointed(path: Path) -> tuple[int, Sequence[int]]:
    """Round of a grid's checkpoint and the trials in it; only its header is read."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            facts = json.loads(file.read(size))["__metadata__"]
        return int(facts["round"]), list(json.loads(facts["members"]))
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError):
        return 0, ()
