"""MLflow: a local SQLite file, or wherever ``MLFLOW_TRACKING_URI`` says."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from fedzmg.trackers.tracker import Ending, TrackedRun, kept_id


class MLflow:
    """Writes ``tracking/mlflow/mlflow.db``; nothing leaves the machine unless the user says so."""

    _client: Any
    _id: str
    _logged: dict[tuple[str, int], str]

    def start(self, run: TrackedRun) -> None:
        # Has to be said before the package is loaded, which else tells its makers of its use.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        run.place.mkdir(parents=True, exist_ok=True)
        own = f"sqlite:///{(run.place / 'mlflow.db').absolute().as_posix()}"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or own
        self._client = MlflowClient(tracking_uri=uri)
        self._id = kept_id(run, lambda: self._made(run, local=uri == own))
        self._client.update_run(self._id, status="RUNNING")
        self._logged = {}
        for key in self._client.get_run(self._id).data.metrics:
            for found in self._client.get_metric_history(self._id, key):
                self._logged[key, found.step] = str(found.value)

    def _made(self, run: TrackedRun, *, local: bool) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(run.project)
        if found is None:
            artifacts = (run.place / "artifacts").absolute().as_uri() if local else None
            experiment = self._client.create_experiment(run.project, artifact_location=artifacts)
        else:
            experiment = found.experiment_id
        made = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(key, str(value)) for key, value in run.settings.items()]
        self._client.log_batch(made, params=params)
        return str(made)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        # MLflow keeps every value that a step ever had: a round that is repeated to the same bits,
        # as it is on a processor, is not said twice. As words, so that nan equals itself.
        results = [key for key in values if not key.startswith("time/")]
        if all(self._logged.get((key, step)) == str(values[key]) for key in results):
            return
        now = int(1000 * time.time())
        metrics = [Metric(key, value, now, step) for key, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, ending: Ending) -> None:
        status = {"finished": "FINISHED", "stopped": "KILLED"}[ending]
        self._client.set_terminated(self._id, status=status)
