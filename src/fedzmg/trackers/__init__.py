"""Experiment trackers: TensorBoard, MLflow, Weights & Biases, or your own.

::

    with Tracking(trackers.named("tensorboard"), out) as progress:
        run_study(spec, out, progress=progress)

Trackers are imported when a run starts. Tracking is a progress observer: the training loop does
not know of it.
"""

import contextlib
import importlib.util
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol

from fedzmg.errors import InputError
from fedzmg.experiment.progress import Progress, Silent
from fedzmg.experiment.specs.files import GridSpec
from fedzmg.plugins import Registry
from fedzmg.simulation import Record, RoundReport, Simulation, Trial
from fedzmg.storage.files import folder_name, write_atomic
from fedzmg.storage.formats import flat
from fedzmg.version import __version__

Ending = Literal["finished", "stopped"]


class TrackedRun(NamedTuple):
    """Description of a run before its first round."""

    name: str  # name within the directory, such as fedzmg/seed-0
    project: str  # name of the directory of all runs
    settings: Mapping[str, Any]
    directory: Path  # for this kind of tracker, shared by all runs
    done: int  # rounds that are not repeated; later ones supersede what was logged before


class Tracker(Protocol):
    """Receives one run; an exception is reported and ends the tracking only."""

    def start(self, run: TrackedRun) -> None:
        """Start a run, or continue it after ``run.done`` rounds."""

    def log(self, step: int, values: Mapping[str, float], /) -> None:
        """Log round ``step``, counted from 1."""

    def finish(self, ending: Ending, /) -> None:
        """End the run; a stopped one may continue later."""


Make = Callable[[], Tracker]
Naming = Callable[[str, Trial], str]


class Tracking(contextlib.AbstractContextManager["Tracking"]):
    """Progress observer that forwards rounds to trackers; one that raises is switched off."""

    def __init__(
        self, trackers: Mapping[str, Make], out: Path, progress: Progress | None = None,
        naming: Naming | None = None,
    ) -> None:  # fmt: skip
        self._makers, self._out = dict(trackers), Path(out)
        self._inner, self._naming = progress or Silent(), naming or by_seed
        self.say, self.show_packs = self._inner.say, self._inner.show_packs
        self._open: dict[str, list[Tracker]] = {}

    def __exit__(self, *_: object) -> None:
        self._close("stopped")

    def begin(self, label: str, rounds: int, done: int) -> None:
        self._close("stopped")
        self._label, self._rounds, self._done = label, rounds, done
        self._stopped: frozenset[int] = frozenset()
        self._inner.begin(label, rounds, done)

    def advance(self, report: RoundReport) -> None:
        simulation, project = report.simulation, self._out.resolve().name or "fedzmg"
        metric = simulation.task.metric.name

        def log(name: str) -> None:
            directory = self._out / "tracking" / name
            for trial in simulation.trials if name not in self._open else ():
                run, facts = self._naming(self._label, trial), settings(simulation, trial)
                tracker = self._makers[name]()
                tracker.start(TrackedRun(run, project, facts, directory, self._done))
                self._open.setdefault(name, []).append(tracker)
            for i, record in enumerate(report.records):
                if i not in self._stopped:  # a trial stopped in this round still logs it
                    self._open[name][i].log(report.round, values(record, metric))

        self._for_each(self._makers, log)
        self._stopped = simulation.stopped_trials
        if report.round == self._rounds or simulation.all_stopped:
            self._close("finished")
        self._inner.advance(report)

    def _close(self, ending: Ending) -> None:
        def finish(name: str) -> None:
            for tracker in self._open.pop(name):
                tracker.finish(ending)

        self._for_each(self._open, finish)

    def _for_each(self, names: Iterable[str], step: Callable[[str], None]) -> None:
        """Do something with trackers; switch off those that fail."""
        for name in list(names):
            try:
                step(name)
            except Exception as error:
                del self._makers[name]
                for tracker in self._open.pop(name, []):
                    with contextlib.suppress(Exception):
                        tracker.finish("stopped")
                reason = " ".join(str(error).split())[:300] or type(error).__name__
                self._inner.say(f"{name} is switched off, training continues: {reason}")


def by_seed(label: str, trial: Trial) -> str:
    """Name a run of a study or comparison."""
    return f"{folder_name(trial.name or label)}/seed-{trial.seed}"


def by_point(spec: GridSpec) -> Naming:
    """Name trials of a grid by the values that it varies."""

    def name(label: str, trial: Trial) -> str:
        options = trial.algorithm.options()
        point = ",".join(f"{key}={options[key]:.6g}" for key in spec.axes_of(label))
        return f"{spec.folder(label)}/{point}/seed-{trial.seed}"

    return name


def values(record: Record, metric: str) -> dict[str, float]:
    """Collect the numbers of a round."""
    keys = {
        "train/loss": "train_loss", "train/clients": "clients", "train/dropped": "dropped",
        "traffic/total_bytes_down": "total_bytes_down", "time/seconds": "seconds",
        "traffic/total_bytes_up": "total_bytes_up",
    }  # fmt: skip
    if record.metric is not None:
        keys |= {"eval/loss": "loss", f"eval/{metric}": "metric", "eval/diverged": "diverged"}
    return {key: float(getattr(record, name)) for key, name in keys.items()}


def settings(simulation: Simulation, trial: Trial) -> dict[str, Any]:
    """Collect a trial's settings, with flat keys."""
    task, participation = simulation.task, simulation.federation.participation.describe()
    tables: dict[str, Any] = {"preset": task.preset, "protocol": vars(task.protocol)}
    return {
        "task": task.name, "algorithm": trial.algorithm.name, "seed": trial.seed,
        **trial.algorithm.options(), **flat({**tables, "participation": participation}),
        "engine": simulation.choice.path, "device": simulation.device.type, "fedzmg": __version__,
        "dtype": str(simulation.dtype).removeprefix("torch."), "precision": simulation.precision,
    }  # fmt: skip


class TensorBoard:
    """Writes event files to ``tracking/tensorboard/RUN``."""

    def start(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hides later rounds of older files.
        self._writer = SummaryWriter(str(run.directory / run.name), purge_step=run.done + 1)
        rows = [f"| {key} | {value} |" for key, value in run.settings.items()]
        self._writer.add_text("settings", "\n".join(["| key | value |", "|---|---|", *rows]), 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()  # a killed process must not lose finished rounds

    def finish(self, _ending: Ending) -> None:
        self._writer.close()


class MLflow:
    """Writes ``tracking/mlflow/mlflow.db``, or to ``MLFLOW_TRACKING_URI`` if it is set."""

    def start(self, run: TrackedRun) -> None:
        # MLflow reads this when it is imported.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        run.directory.mkdir(parents=True, exist_ok=True)
        own = f"sqlite:///{(run.directory / 'mlflow.db').absolute().as_posix()}"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or own
        self._client = MlflowClient(tracking_uri=uri)
        self._id = _kept_id(run, lambda: self._create(run, local=uri == own))
        self._client.update_run(self._id, status="RUNNING")
        keys, history = self._client.get_run(self._id).data.metrics, self._client.get_metric_history
        found = [(key, one) for key in keys for one in history(self._id, key)]
        self._logged = {(key, one.step): str(one.value) for key, one in found}

    def _create(self, run: TrackedRun, *, local: bool) -> str:
        from mlflow.entities import Param

        artifacts = (run.directory / "artifacts").absolute().as_uri() if local else None
        if self._client.get_experiment_by_name(run.project) is None:
            self._client.create_experiment(run.project, artifact_location=artifacts)
        experiment = self._client.get_experiment_by_name(run.project).experiment_id
        made = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(key, str(value)) for key, value in run.settings.items()]
        self._client.log_batch(made, params=params)
        return str(made)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        # MLflow keeps every value of a step. Text compares NaN as equal.
        results = [key for key in values if not key.startswith("time/")]
        if all(self._logged.get((key, step)) == str(values[key]) for key in results):
            return
        now = int(1000 * time.time())
        metrics = [Metric(key, value, now, step) for key, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, ending: Ending) -> None:
        status = {"finished": "FINISHED", "stopped": "KILLED"}[ending]
        self._client.set_terminated(self._id, status=status)


class WeightsAndBiases:
    """Writes ``tracking/wandb``, offline unless ``WANDB_MODE`` is set."""

    def start(self, run: TrackedRun) -> None:
        # wandb reads this when it is imported.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        # One id for all pieces of a resumed run: they become one run when synced.
        own_id = _kept_id(run, lambda: secrets.token_hex(8))
        project = os.environ.get("WANDB_PROJECT", "fedzmg")
        options = wandb.Settings(
            mode=os.environ.get("WANDB_MODE", "offline"), silent=True, console="off",
            disable_git=True, save_code=False, x_disable_stats=True,
        )  # fmt: skip
        self._run = wandb.init(
            dir=str(run.directory), project=project, group=run.project, name=run.name, id=own_id,
            resume="allow", reinit="create_new", config=dict(run.settings), settings=options,
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, ending: Ending) -> None:
        self._run.finish(exit_code={"finished": 0, "stopped": 1}[ending])


def _kept_id(run: TrackedRun, make: Callable[[], str]) -> str:
    """Return the id that a run was tracked under before, or make and keep a new one."""
    path = run.directory / "ids" / f"{run.name.replace('/', '--')}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        write_atomic(path, make().encode())
    return path.read_text().strip()


class TrackerInfo(NamedTuple):
    """A factory of trackers, and modules that it needs."""

    make: Make
    modules: tuple[str, ...] = ()  # required, installed by the extra of the tracker's name


def _entry(value: Any, name: str, _: ModuleType | None) -> tuple[str, TrackerInfo]:
    if not callable(value):
        raise InputError(f"{value!r:.80}: expected a class, or a function that makes a Tracker")
    return name or value.__name__.lower(), TrackerInfo(value)


_BUILT_IN = {
    "tensorboard": TrackerInfo(TensorBoard, ("tensorboard",)),
    "mlflow": TrackerInfo(MLflow, ("mlflow", "sqlalchemy", "alembic")),
    "wandb": TrackerInfo(WeightsAndBiases, ("wandb",)),
}
TRACKERS = Registry("tracker", _BUILT_IN, _entry, lambda old, new: old.make is new.make)


def named(names: str | Sequence[str] | None) -> dict[str, Make]:
    """Return the factories of named trackers; a text is comma-separated."""
    listed = names.split(",") if isinstance(names, str) else names or []
    found = {}
    for name in filter(None, map(str.strip, listed)):
        found[name], modules = TRACKERS.look_up(name)
        for module in modules:
            if importlib.util.find_spec(module) is None:
                remedy = f"pip install 'fedzmg[{name}]'"
                raise InputError(f"tracker {name!r} needs the package {module!r}: {remedy}")
    return found
