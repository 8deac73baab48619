"""Differences of two runs, studies or grids: settings, environment, curves and scores."""

import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fedzmg.errors import InputError, check_names
from fedzmg.results.formatting import options_text
from fedzmg.results.runs import read_run
from fedzmg.results.scores import finals
from fedzmg.results.significance import PairedTest, paired_t
from fedzmg.storage.formats import flat, flat_facts, json_words, log_rows, read_json, read_toml
from fedzmg.storage.reading import files_below

Aspect = Literal["spec", "options", "versions", "data", "curves", "scores", "runs"]
# options: hyper-parameters of the algorithm; spec: all other settings; versions: of programs,
# machine and execution path; data: fingerprints of task and data; runs: that only one side has.
ASPECTS: tuple[Aspect, ...] = get_args(Aspect)

OPTIONS = ("algorithm", "weights", "client", "server", "parts", "algorithms", "axes")
DATA = ("data_sha256", "task_sha256", "clients", "examples", "preset", "metric")
TIME = "seconds"
# Facts of a manifest about time and command, not about the training.
NEVER_EQUAL = (
    "started", "finished", "engine_reason", "command", "logs", "spec_sha256", TIME,
    "rules_sha256")  # of older versions  # fmt: skip
CURVES = ("metric", "loss", "train_loss")
Rows = Mapping[Any, Mapping[str, Any]]  # lines of a log by round; in a grid, by trial and round


@dataclass(frozen=True)
class Change:
    """A value that differs."""

    aspect: Aspect
    key: str
    left: Any
    right: Any
    runs: tuple[str, ...]  # pairs of runs that differ in it; empty for the studies themselves


@dataclass(frozen=True)
class Curves:
    """Comparison of two logs, line by line."""

    name: str
    shared: int  # rounds that both have; in a grid, lines
    rounds: tuple[int, int]
    first: int | None  # first round with any difference except times
    fields: tuple[str, ...]  # fields that differ there
    largest: Mapping[str, float]  # absolute differences; inf if only one is finite
    identical: bool  # True if both have the same rounds with the same bits


@dataclass(frozen=True)
class Scores:
    """Final metrics of one algorithm on both sides."""

    name: str
    left: Mapping[str, float]  # by seed, or by point of a grid; nan: the run diverged
    right: Mapping[str, float]
    test: PairedTest | None  # test of left minus right over the seeds that finished on both sides

    @property
    def equal(self) -> bool:
        return bool(json_words(self.left) == json_words(self.right))


class Unit(NamedTuple):
    """A run directory, or one algorithm of a grid."""

    name: str
    group: str
    seed: int | None
    spec: Mapping[str, Any]
    manifest: Mapping[str, Any]
    rows: Rows
    finals: Mapping[str, float]


@dataclass(frozen=True)
class Difference:
    """All differences of two directories."""

    left: str
    right: str
    metric: str
    higher_is_better: bool
    changes: tuple[Change, ...]
    curves: tuple[Curves, ...]
    scores: tuple[Scores, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]

    def differs(self, aspects: Iterable[str] = ASPECTS) -> bool:
        found = {change.aspect for change in self.changes}
        found |= {"curves" for pair in self.curves if not pair.identical}
        found |= {"scores" for pair in self.scores if not pair.equal}
        found |= {"runs" for _ in (*self.only_left, *self.only_right)}
        return not found.isdisjoint(aspects)

    def as_dict(self) -> dict[str, Any]:
        """Return everything ready for JSON; non-finite numbers become words."""
        equal = {aspect: not self.differs([aspect]) for aspect in ASPECTS}
        return {**json_words(asdict(self)), "equal": equal}


def aspects(text: str | None) -> tuple[Aspect, ...]:
    """Parse a comma-separated list of aspects; empty means all."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    check_names("aspect", names, ASPECTS)
    return tuple(a for a in ASPECTS if a in names) or ASPECTS


def compare(left: Path, right: Path) -> Difference:
    """Compare two directories: single runs, or runs paired by path, else algorithm and seed."""
    only_left, only_right = list(read(left)), list(read(right))
    keys: list[Callable[[Unit], Hashable]] = [
        lambda unit: unit.name,
        lambda unit: (unit.spec.get("algorithm"), unit.seed),
    ]
    if len(only_left) == len(only_right) == 1:
        keys = [lambda _: None]
    pairs: list[tuple[Unit, Unit]] = []
    for key in keys:
        for unit in list(only_left):
            matching = [other for other in only_right if key(other) == key(unit)]
            if len(matching) == sum(key(other) == key(unit) for other in only_left) == 1:
                pairs.append((unit, matching[0]))
                only_left.remove(unit)
                only_right.remove(matching[0])
    if not pairs:
        raise InputError(f"{left} and {right} have no run in common: give two runs or like studies")
    facts = pairs[0][0].manifest
    changes = []
    for plan in ("study.toml", "grid.toml"):
        if (left / plan).is_file() and (right / plan).is_file():
            unequal = _unequal(*(flat(read_toml(side / plan)) for side in (left, right)))
            changes += [Change(_aspect(name), name, a, b, ()) for name, a, b in unequal]
    return Difference(
        str(left), str(right), str(facts.get("metric", "metric")),
        higher_is_better=bool(facts.get("higher_is_better", True)),
        changes=(*changes, *_changes(pairs)), scores=tuple(_scores(pairs)),
        curves=tuple(compare_logs(a.name, a.rows, b.rows) for a, b in pairs),
        only_left=tuple(unit.name for unit in only_left),
        only_right=tuple(unit.name for unit in only_right),
    )  # fmt: skip


def compare_logs(name: str, left: Rows, right: Rows) -> Curves:
    """Compare the logs of a run line by line."""
    shared = sorted(left.keys() & right.keys())
    largest: dict[str, float] = {}
    first: int | None = None
    fields: tuple[str, ...] = ()
    for key in shared:
        a, b = left[key], right[key]
        round_ = int(key[-1] if isinstance(key, tuple) else key)
        # A field that only newer versions log is not a difference of the training.
        unequal = tuple(k for k in a if k in b and k != TIME and a[k] != b[k])
        if unequal and (first is None or round_ < first):
            first, fields = round_, unequal
        for curve in CURVES:
            if a.get(curve) is not None and b.get(curve) is not None:
                largest[curve] = max(largest.get(curve, 0.0), _distance(a[curve], b[curve]))
    rounds, identical = (len(left), len(right)), first is None and left.keys() == right.keys()
    return Curves(name, len(shared), rounds, first, fields, largest, identical)


def read(top: Path) -> Iterator[Unit]:
    """Read every run below a directory and every algorithm of a grid."""
    runs = [path.parent for path in files_below(top, "spec.toml")]
    scored = [path.parent for path in files_below(top, "scores.json")]
    searches = [path for path in scored if (path.parent / "grid.toml").is_file()]
    if not runs and not searches:
        what = "no run (spec.toml) and no scored grid (scores.json)"
        raise InputError(f"{top} holds {what}: give a directory of results")
    for directory in (*runs, *searches):
        inner = directory.relative_to(top).as_posix()
        path, name = directory / "manifest.json", top.resolve().name if inner == "." else inner
        manifest = read_json(path) if path.exists() else {}
        yield (_read_run if directory in runs else _read_search)(directory, name, manifest)


def _read_run(directory: Path, name: str, manifest: Mapping[str, Any]) -> Unit:
    rows = json_words(log_rows(directory / "metrics.jsonl", "round"))
    spec, run = read_toml(directory / "spec.toml"), read_run(directory, name, [])
    ends: dict[int, float] = {}
    if run is not None:
        ends = finals([run]) if run.diverged is None else {run.seed: math.nan}
    group = name.rpartition("/")[0] or str(spec["algorithm"])
    scores = {f"seed {seed}": score for seed, score in ends.items()}
    return Unit(name, group, spec["seed"], flat(spec), manifest, rows, scores)


def _read_search(directory: Path, name: str, manifest: Mapping[str, Any]) -> Unit:
    scores = {}
    for point in read_json(directory / "scores.json").get("points", []):
        score = math.nan if point["score"] is None else float(point["score"])
        scores[options_text(point["options"], 6)] = score
    rows = json_words(log_rows(directory / "metrics.jsonl", "trial", "round"))
    return Unit(name, name, None, {}, manifest, rows, scores)


def _changes(pairs: Sequence[tuple[Unit, Unit]]) -> list[Change]:
    """Return differences of specifications and manifests, each once with the runs it is in."""
    found: dict[str, tuple[Aspect, str, Any, Any, list[str]]] = {}
    for a, b in pairs:
        ignored = set(NEVER_EQUAL)
        if a.manifest.get("device") == b.manifest.get("device") == "cpu":
            ignored |= {"pack", "pack_changes"}  # packing changes no bit on CPUs
        listed = [(_aspect(key), key, x, y) for key, x, y in _unequal(a.spec, b.spec)]
        for key, x, y in _unequal(flat_facts(a.manifest), flat_facts(b.manifest)):
            if key not in ignored:
                listed.append(("data" if key in DATA else "versions", key, x, y))
        for one in listed:
            same = json.dumps(one, sort_keys=True, default=str)
            found.setdefault(same, (*one, []))[-1].append(a.name)
    entries = sorted(found.values(), key=lambda entry: ASPECTS.index(entry[0]))
    return [Change(*entry[:4], tuple(entry[4])) for entry in entries]


def _unequal(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    keys = dict.fromkeys([*left, *right])
    return [(k, left.get(k), right.get(k)) for k in keys if left.get(k) != right.get(k)]


def _aspect(key: str) -> Aspect:
    return "options" if key.partition(".")[0] in OPTIONS else "spec"


def _distance(a: Any, b: Any) -> float:
    """Return the absolute difference of two numbers, or words for non-finite ones."""
    found = 0.0 if a == b else abs(float(a) - float(b))
    return found if math.isfinite(found) else math.inf


def _scores(pairs: Sequence[tuple[Unit, Unit]]) -> Iterator[Scores]:
    groups: dict[tuple[str, str], list[tuple[Unit, Unit]]] = {}
    for pair in pairs:
        groups.setdefault((pair[0].group, pair[1].group), []).append(pair)
    for names, members in groups.items():
        left = {k: v for a, _ in members for k, v in a.finals.items()}
        right = {k: v for _, b in members for k, v in b.finals.items()}
        both = [(left[k], right[k]) for k in left if k in right]
        both = [pair for pair in both if all(map(math.isfinite, pair))]
        # Points of a grid are not a sample of anything.
        tested = len(both) > 1 and members[0][0].seed is not None
        test = paired_t(*zip(*both, strict=True)) if tested else None
        if left or right:
            yield Scores(", ".join(dict.fromkeys(names)), left, right, test)
