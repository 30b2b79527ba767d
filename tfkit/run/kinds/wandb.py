"""Weights & Biases as a tracker of runs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Literal

from tfkit.run.contract import TrackedRun, Tracker, TrackerConfig


class WandbConfig(TrackerConfig):
    """Weights & Biases (`pip install "tfkit[wandb]"`)."""

    kind: Literal["wandb"] = "wandb"
    extra = "wandb"
    project: str | None = None
    """The project; by default the value of WANDB_PROJECT."""
    entity: str | None = None
    """The user or team; by default the value of WANDB_ENTITY."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes to the folder of the run, for `wandb sync`; by default the value of WANDB_MODE, or `online`."""

    def build(self, run: TrackedRun) -> Tracker:
        return Wandb(importlib.import_module("wandb"), self, run)


class Wandb:
    """A run of Weights & Biases. A resumed run has the same id, and the points of repeated steps appear twice."""

    def __init__(self, wandb: Any, config: WandbConfig, run: TrackedRun) -> None:
        path = run.folder / "wandb.id"
        identity = path.read_text(encoding="utf-8") if path.exists() else None
        self._session = wandb.init(
            project=config.project,
            entity=config.entity,
            mode=config.mode,
            name=run.name,
            id=identity,
            resume=None if identity is None else "allow",
            dir=str(run.folder),
            config={"model": run.graph.name, **run.values},
        )
        path.write_text(self._session.id, encoding="utf-8")
        # A resumed run continues at an earlier step, which W&B accepts only for an axis that the run defines.
        self._session.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._session.log({"step": step, **numbers})

    def text(self, step: int, name: str, text: str) -> None:
        self._session.log({"step": step, name: text})

    def close(self) -> None:
        self._session.finish()
