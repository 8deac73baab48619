"""Specification files: grids, studies, and readers and JSON Schema of every kind."""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)
import itertools
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import pydantic

from fedzmg import algorithms, plugins, tasks
from fedzmg.algorithms.options import known_options, number_options
from fedzmg.errors import InputError, brief, check_names, unknown
from fedzmg.experiment.plugin_files import refuse_unloaded
from fedzmg.experiment.specs.plan import MOST_TRIALS, PAPER_RATES, Axes, Plan, Seeds
from fedzmg.experiment.specs.run import COUNT, RunSpec
from fedzmg.experiment.specs.strict import Strict
from fedzmg.storage.formats import read_toml
from fedzmg.storage.reading import MOST_PLANNED
from fedzmg.tasks.preset import tuned
from fedzmg.tasks.task import Task

NO_GRID = ("tuned", "known", "given")  # values of ``rates`` that name no directory of a grid
Rung: TypeAlias = Annotated[list[int], pydantic.Field(min_length=2, max_length=2)]
"""A round, and the number of points that continue after it."""


class Search(Strict):
    """Options of a search."""

    halving: Annotated[list[Rung], pydantic.Field(max_length=100)] = []
    """Successive halving, ``[[50, 16], [150, 4]]``: after round 50 only the best 16 points
    continue, after round 150 the best 4 of them, by the mean metric of the last rounds then. The
    first seed decides; the other seeds train the points that are left. A heuristic: a point that
    begins slowly and would win is lost. With Optuna the points of a batch are compared."""
    method: Literal["grid", "optuna"] = "grid"
    """``grid`` trains every point, ``optuna`` those that Optuna proposes, batch after batch."""
    budget: int = pydantic.Field(default=40, ge=1, le=MOST_TRIALS)
    """Number of points that Optuna proposes for each algorithm."""
    batch: int = pydantic.Field(default=8, ge=1, le=MOST_TRIALS)
    """Number of points that Optuna proposes at once, and that train together."""


class GridSpec(Plan):
    """A search over hyper-parameters: short trainings, scored by their last rounds."""

    listing: ClassVar[str] = "fedzmg schema grid"
    tables: ClassVar[tuple[str, ...]] = (*Plan.tables, "search", "axes")
    sparse: ClassVar[tuple[str, ...]] = (*Plan.sparse, "search", "eval_every", "thresholds")

    kind: Literal["grid"] = "grid"
    seeds: Seeds = [1000]
    """Seeds of the search; no reported run should use them."""
    rounds: int = pydantic.Field(default=50, ge=1, le=MOST_PLANNED)
    last: int = pydantic.Field(default=10, ge=1, le=MOST_TRIALS)
    """Number of last rounds whose mean metric is the score; a diverged trial scores 0."""
    selection: Literal["tune", "test"] = "tune"
    """Examples that choose: a half that reports nothing, or all test examples, as in the paper."""
    also_by_test: bool = False
    """Also score every point on all test examples, as the paper does. The choice of the grid does
    not change; a study can use the other one (``rates_by = "test"``)."""
    together: int = pydantic.Field(default=0, ge=0, le=COUNT)
    """Maximum number of trials that train together; 0: all of an algorithm's."""
    axes: Axes = dict.fromkeys(("client.lr", "server.lr"), PAPER_RATES)
    """Values by option, such as ``client.lr``; by default the paper's learning rates of clients and
    servers. An algorithm without such an option has one axis less."""
    search: Search = Search()
    """Successive halving and Optuna; off by default."""
    eval_every: int = pydantic.Field(default=0, ge=0, le=COUNT)
    """Interval of further evaluations, for ``thresholds``; 0: none."""
    thresholds: list[float] = pydantic.Field(default=[], max_length=100)
    """Metrics for which the point that reaches them first is shown, too."""

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        if not 1 <= self.last <= self.rounds:
            raise InputError(f"last = {self.last}: expected 1 to {self.rounds}, the rounds")
        if self.also_by_test and self.selection == "test":
            raise InputError('also_by_test = true: selection = "test" chooses by it already')
        if self.selection == "tune" and self.preset.get("selection") == "test":
            raise InputError('preset.selection = "test": set selection = "test", too')
        rungs = self.search.halving
        pairs = itertools.pairwise([[self.last - 1, MOST_TRIALS], *rungs, [self.rounds, 1]])
        if rungs and not all(r < s and k >= max(m, 1) for (r, k), (s, m) in pairs):
            wanted = f"rising rounds, {self.last} (last) to {self.rounds - 1}, and falling numbers"
            raise InputError(f"search.halving = {brief(rungs)}: expected {wanted} of points")
        if rungs and self.together:
            raise InputError("search.halving compares all points: leave out together")
        if self.search.method == "optuna" and self.together:
            raise InputError(f"together = {self.together}: with Optuna set search.batch instead")
        if bool(self.thresholds) != bool(self.eval_every):
            raise InputError("thresholds and eval_every: give both or none")
        return self

    def logged(self) -> list[int]:
        """Return the rounds that are evaluated: those of scores, and every so many."""
        ends = [*(end for end, _ in self.search.halving), self.rounds]
        further = range(1, self.rounds + 1, self.eval_every) if self.eval_every else ()
        return sorted({end - i for end in ends for i in range(self.last)}.union(further))

    def orders(self) -> dict[str, list[str]]:
        # The order of axes numbers the trials.
        own = {f"order of {n}.axes": list(v.axes or ()) for n, v in self.algorithms.items()}
        return {"order of axes": list(self.axes), **own}

    def packs(self) -> dict[str, int]:
        each = min(2, len(self.seeds)) if self.search.halving else 1
        together = self.together or MOST_TRIALS
        if self.search.method == "optuna":
            together = self.search.batch * len(self.seeds)
        return {name: each * -(-self.trials(name) // together) for name in self.algorithms}

    def trials(self, name: str) -> int:
        """Count the trials that an algorithm trains: points under every seed."""
        points = self._points(name)
        few = min(points, self.search.budget) if self.search.method == "optuna" else points
        return few * len(self.seeds)

    def _points(self, name: str) -> int:
        return math.prod(map(len, self.axes_of(name).values()))

    def trial_rounds(self, name: str) -> int:
        left, total = self.trials(name) // len(self.seeds), 0
        size = self.search.batch if self.search.method == "optuna" else left
        for points in (min(size, left - i) for i in range(0, left, size)):
            kept, done = points, 0
            for end, keep in self.search.halving:
                total, kept, done = total + kept * (end - done), min(kept, keep), end
            total += kept * (self.rounds * len(self.seeds) - done)
        return total

    def axes_of(self, name: str) -> Axes:
        axes = self.algorithms[name].axes
        known = known_options(algorithms.get(self.base(name)))
        return {k: v for k, v in (self.axes if axes is None else axes).items() if k in known}

    def points(self, name: str) -> list[dict[str, float]]:
        """Return every combination of an algorithm's axes; the last axis varies fastest."""
        axes = self.axes_of(name)
        return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]

    def build_task(self) -> Task:
        """Build the task; with ``selection = "test"`` all test examples choose."""
        preset = dict(self.preset)
        if self.selection == "test" and "selection" in tasks.info(self.task).options():
            preset["selection"] = "test"
        return tasks.info(self.task).with_options(preset).build()

    def check(self, task: Task | None = None) -> None:
        own = {f"axis of {n}": (v.axes, [self.base(n)]) for n, v in self.algorithms.items()}
        for what, (axes, names) in {**own, "axis": (self.axes, self.bases())}.items():
            found = [algorithms.get(name) for name in names]
            known = {key for algorithm in found for key in known_options(algorithm)}
            numbers = {key for algorithm in found for key in number_options(algorithm)}
            for key in axes or {}:
                if key not in known:
                    raise unknown(what, key, numbers, f"fedzmg list {names[0]}")
        if self.search.method == "optuna" and find_spec("optuna") is None:
            raise InputError("a search by Optuna needs the package: pip install 'fedzmg[optuna]'")
        if (trials := sum(map(self._points, self.algorithms)) * len(self.seeds)) > MOST_TRIALS:
            raise InputError(f"the grid has {trials:,} trials: shorten it to {MOST_TRIALS:,}")
        if (lines := len(self.logged()) * max(map(self.trials, self.algorithms))) > MOST_PLANNED:
            remedy = f"shorten the axes or seeds, or last = {self.last}"
            raise InputError(f"the log would have over {MOST_PLANNED:,} lines, {lines:,}: {remedy}")
        super().check(task)

    def check_algorithm(self, name: str, task: Task | None) -> None:
        axes, fixed = self.axes_of(name), self.fixed(name)
        if not self.axes:
            raise InputError("axes is empty: leave it out for the paper's, or name an option")
        if not axes:
            raise InputError(f"{name} has none of the axes {', '.join(self.axes)}: leave it out")
        if both := fixed.keys() & axes.keys():
            raise InputError(f"{name}: {min(both)} is both fixed and an axis: choose one")
        # No rule restricts two options together: every value is tried once, not every point.
        first = {**fixed, **{key: values[0] for key, values in axes.items()}}
        for key, values in axes.items():
            for value in values:
                self.configured(name, {**first, key: value}, task)


class StudySpec(Plan):
    """A comparison of algorithms on identical cohorts and batches, over several seeds."""

    listing: ClassVar[str] = "fedzmg schema study"

    kind: Literal["study"] = "study"
    seeds: Seeds = [0, 1, 2, 3, 4]
    rounds: int = pydantic.Field(default=1000, ge=1, le=MOST_PLANNED)
    eval_every: int = pydantic.Field(default=5, ge=1, le=COUNT)
    client_metrics_every: int = pydantic.Field(default=0, ge=0, le=COUNT)
    """Interval of evaluations on each client's own examples: after rounds 1, 1 + N, ... and the
    last; 0: only after the last."""
    rates: str = "tuned"
    """``tuned``: found for the task before; ``known``: the same, else defaults; ``given``: defaults
    and the tables here; otherwise the directory of a finished grid. Options in the tables go
    first."""
    rates_by: Literal["tune", "test"] = "tune"
    """Examples by which the grid's point is chosen: those set aside, or all, as in the paper; then
    all have to report, too, which ``preset.selection = "test"`` says."""
    thresholds: list[float] = pydantic.Field(default=[], max_length=100)
    """Thresholds of the metric; by default the task's own."""
    window: int = pydantic.Field(default=4, ge=1, le=COUNT)
    """Number of evaluations whose average, or smallest, has to reach a threshold."""
    tests: Literal["reference", "pairs"] = "reference"
    """The family of tests: the first algorithm against every other, or every pair."""

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        if (runs := len(self.algorithms) * len(self.seeds)) > MOST_TRIALS:
            raise InputError(f"{runs:,} runs: choose at most {MOST_TRIALS:,} in one study")
        if not all(map(math.isfinite, self.thresholds)):
            raise InputError(f"thresholds = {brief(self.thresholds)}: expected finite numbers")
        if self.rates_by == "test" and self.rates in NO_GRID:
            remedy = "leave it out, or name a grid's directory as rates"
            raise InputError(f'rates_by = "test": rates = {self.rates!r} names none: {remedy}')
        if any(variant.axes is not None for variant in self.algorithms.values()):
            raise InputError("axes belong to a grid: a study has none")
        return self

    def extends(self, kept: Plan) -> bool:
        """Return True if this study only adds algorithms or seeds to another one."""
        added = {"algorithms": self.algorithms, "seeds": self.seeds}
        same = all(self.algorithms.get(name) == own for name, own in kept.algorithms.items())
        return same and set(kept.seeds) <= set(self.seeds) and self == kept.model_copy(update=added)

    def orders(self) -> dict[str, list[str]]:
        # The others are tested against the first.
        return {"reference": [next(iter(self.algorithms))]}

    def check(self, task: Task | None = None) -> None:
        if task is None:
            can_report_all = "selection" in tasks.info(self.task).options()
            all_report = can_report_all and self.preset.get("selection") == "test"
        else:
            can_report_all = "selection" in task.preset
            all_report = task.tune is None or task.tune.x is task.test.x
            for level in self.thresholds:
                task.metric.check_level("thresholds", level)
        if self.rates_by == "test" and not all_report:
            why = f"{self.task} would report on some of the examples that chose its rates"
            remedy = 'say preset.selection = "test" as well' if can_report_all else "leave it out"
            raise InputError(f'rates_by = "test": {why}: {remedy}')
        super().check(task)

    def check_algorithm(self, name: str, task: Task | None) -> None:
        super().check_algorithm(name, task)
        known = tuned(self.task) if task is None else task.options
        rated = self.base(name) in known or "lr" in self.algorithms[name].client
        if self.rates == "tuned" and not rated:
            remedy = 'name the directory of a grid as rates, or set rates = "given"'
            raise InputError(f"no rates are known for {self.base(name)} on {self.task}: {remedy}")


Spec: TypeAlias = RunSpec | GridSpec | StudySpec
SPECS: dict[str, type[Spec]] = {"run": RunSpec, "grid": GridSpec, "study": StudySpec}


def read(path: Path, kind: str | None = None) -> Spec:
    """Read a run, a grid or a study, as the file's ``kind`` says; ``kind`` requires one.

    ``plugins`` lists files that are loaded first, and ``task`` may be ``FILE.py:NAME``; paths are
    relative to the file. A file beside results loads nothing.
    """
    values = read_toml(path, typed=True)
    if "kind" not in values and kind in (None, "run") and "algorithms" in values:
        raise InputError(f'{path}: kind is missing: add kind = "grid" or kind = "study" at its top')
    found = values.pop("kind", kind or "run")
    if not isinstance(found, str) or found not in SPECS:
        raise InputError(f"{path}: {unknown('kind', str(found), SPECS)}")
    if kind is not None and found != kind:
        raise InputError(f"{path} is a {found}: use 'fedzmg {found} {path}'")
    files = values.pop("plugins", [])
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise InputError(f'{path}: plugins = {brief(files)}: expected files, ["mine.py"]')
    results = ["manifest.json", "study.json", "grid.json"]
    if path.name in ("grid.toml", "study.toml"):
        results += ["*/manifest.json", "*/seed-*/manifest.json"]
    beside_results = any(True for pattern in results for _ in path.parent.glob(pattern))
    if beside_results and files:
        remedy = " ".join(f"--plugin {file}" for file in files)
        raise InputError(f"{path} is in a folder of results, which loads no code: pass {remedy}")
    if not beside_results:
        for file in files:
            plugins.load(path.parent / file)
        if isinstance(values.get("task"), str):
            values["task"] = plugins.load_reference(values["task"], path.parent)
    spec = SPECS[found].parse(values, path)
    if beside_results:
        # An unknown task was made in Python; elsewhere it is a mistake in the file.
        call = "tune" if found == "grid" else "compare"
        refuse_unloaded(spec.task, spec.bases(), path, f"fedzmg.{call}(task, ..., out=DIR)")
    return spec


def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a file with all known names, for editors."""
    check_names("kind", [kind], SPECS)
    found = SPECS[kind].model_json_schema()
    properties = found["properties"]
    own = {"type": "string", "pattern": r"\.py:\w+$"}
    properties["task"] = {"title": "Task", "anyOf": [{"enum": list(tasks.TASKS)}, own]}
    properties["plugins"] = {
        "description": "Python files that define algorithms or tasks, relative to this file.",
        "type": "array", "items": {"type": "string"}, "default": [],
    }  # fmt: skip
    names = {"type": "string", "enum": list(algorithms.ALGORITHMS)}
    if kind == "run":
        properties["algorithm"] |= names
    else:
        listed = {"type": "array", "items": names, "minItems": 1, "uniqueItems": True}
        table = properties["algorithms"]
        either = {"description": table.pop("description"), "anyOf": [listed, table]}
        properties["algorithms"] = either
        found["$defs"]["Variant"]["properties"]["algorithm"]["anyOf"][0] = names
    if kind == "grid":
        del properties["axes"]["additionalProperties"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
