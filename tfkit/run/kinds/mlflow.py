"""MLflow as a tracker of runs."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any, Literal

from tfkit.run.contract import TrackedRun, Tracker, TrackerConfig

PARAMETERS, METRICS = 100, 1000
"""Maximum number of parameters, and of metrics, in a request to MLflow."""
LENGTH = 500
"""Maximum length of a parameter, in characters, that all stores of MLflow accept."""
PAUSE = 5.0
"""Seconds between two requests with metrics."""


class MlflowConfig(TrackerConfig):
    """MLflow (`pip install "tfkit[mlflow]"`)."""

    kind: Literal["mlflow"] = "mlflow"
    extra = "mlflow"
    uri: str | None = None
    """The server or store, such as `http://localhost:5000` or `sqlite:///runs.db`; by default MLFLOW_TRACKING_URI."""
    experiment: str = "tfkit"
    """The experiment, which is created if it is missing."""

    def build(self, run: TrackedRun) -> Tracker:
        return Mlflow(importlib.import_module("mlflow"), self, run)


class Mlflow:
    """A run of MLflow. A resumed run has the same id, and the points of repeated steps appear twice."""

    def __init__(self, mlflow: Any, config: MlflowConfig, run: TrackedRun) -> None:
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient(tracking_uri=config.uri)
        self._waiting: list[Any] = []
        self._sent = time.monotonic()
        path = run.folder / "mlflow.id"
        if path.exists():
            self._id = path.read_text(encoding="utf-8")
            self._client.set_terminated(self._id, "RUNNING")
            return
        experiment = self._client.get_experiment_by_name(config.experiment)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(config.experiment)
        self._id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        path.write_text(self._id, encoding="utf-8")
        values = {"model": run.graph.name, **run.values}
        parameters = [mlflow.entities.Param(name, str(value)[:LENGTH]) for name, value in values.items()]
        for start in range(0, len(parameters), PARAMETERS):
            self._client.log_batch(self._id, params=parameters[start : start + PARAMETERS])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._waiting += [self._metric(name, float(number), now, step) for name, number in numbers.items()]
        if time.monotonic() > self._sent + PAUSE:
            self._send()

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{name}/{step}.txt")

    def close(self) -> None:
        self._send()
        self._client.set_terminated(self._id)

    def _send(self) -> None:
        for start in range(0, len(self._waiting), METRICS):
            self._client.log_batch(self._id, metrics=self._waiting[start : start + METRICS])
        self._waiting, self._sent = [], time.monotonic()
