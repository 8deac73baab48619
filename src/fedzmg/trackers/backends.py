"""Trackers for TensorBoard, MLflow and Weights & Biases, each imported when a run starts."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from fedzmg.storage.files import write_atomic
from fedzmg.trackers.tracking import Ending, TrackedRun


class TensorBoard:
    """Writes event files to ``tracking/tensorboard/RUN``."""

    _writer: Any

    def start(self, run: TrackedRun) -> None:
        """Open the event file and write the settings."""
        from torch.utils.tensorboard import SummaryWriter

        # Hides later rounds of older files.
        self._writer = SummaryWriter(str(run.directory / run.name), purge_step=run.done + 1)
        rows = [f"| {key} | {value} |" for key, value in run.settings.items()]
        self._writer.add_text("settings", "\n".join(["| key | value |", "|---|---|", *rows]), 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a round's numbers."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        # A killed process must not lose finished rounds.
        self._writer.flush()

    def finish(self, _ending: Ending) -> None:
        """Close the file."""
        self._writer.close()


class MLflow:
    """Writes ``tracking/mlflow/mlflow.db``, or to ``MLFLOW_TRACKING_URI`` if it is set."""

    _client: Any
    _id: str
    _logged: dict[tuple[str, int], str]

    def start(self, run: TrackedRun) -> None:
        """Create or reopen the run."""
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
        self._logged = {
            (key, found.step): str(found.value)
            for key in self._client.get_run(self._id).data.metrics
            for found in self._client.get_metric_history(self._id, key)
        }

    def _create(self, run: TrackedRun, *, local: bool) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(run.project)
        if found is None:
            artifacts = (run.directory / "artifacts").absolute().as_uri() if local else None
            experiment = self._client.create_experiment(run.project, artifact_location=artifacts)
        else:
            experiment = found.experiment_id
        made = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(key, str(value)) for key, value in run.settings.items()]
        self._client.log_batch(made, params=params)
        return str(made)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log a round's numbers, unless a resumed run repeats them."""
        from mlflow.entities import Metric

        # MLflow keeps every value of a step. Text compares NaN as equal.
        results = [key for key in values if not key.startswith("time/")]
        if all(self._logged.get((key, step)) == str(values[key]) for key in results):
            return
        now = int(1000 * time.time())
        metrics = [Metric(key, value, now, step) for key, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, ending: Ending) -> None:
        """Set the run's final status."""
        status = {"finished": "FINISHED", "stopped": "KILLED"}[ending]
        self._client.set_terminated(self._id, status=status)


class WeightsAndBiases:
    """Writes ``tracking/wandb``, offline unless ``WANDB_MODE`` is set."""

    _run: Any

    def start(self, run: TrackedRun) -> None:
        """Create or resume the run."""
        # wandb reads this when it is imported.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        run.directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            dir=str(run.directory),
            project=os.environ.get("WANDB_PROJECT", "fedzmg"),
            group=run.project,
            name=run.name,
            # One id for all pieces of a resumed run: they become one run when synced.
            id=_kept_id(run, lambda: secrets.token_hex(8)),
            resume="allow",
            reinit="create_new",
            config=dict(run.settings),
            settings=wandb.Settings(
                mode=os.environ.get("WANDB_MODE", "offline"),
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
            ),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log a round's numbers."""
        self._run.log(dict(values), step=step)

    def finish(self, ending: Ending) -> None:
        """Close the run."""
        self._run.finish(exit_code={"finished": 0, "stopped": 1}[ending])


def _kept_id(run: TrackedRun, make: Callable[[], str]) -> str:
    """Return the id that a run was tracked under before, or make and keep a new one."""
    path = run.directory / "ids" / f"{run.name.replace('/', '--')}.txt"
    if path.is_file():
        return path.read_text().strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    made = make()
    write_atomic(path, made.encode())
    return made
