"""A profile of some steps of a run, by torch's profiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch.profiler import profile

from tfkit.component import Callback, CallbackConfig, PositiveCount, Training


class ProfileConfig(CallbackConfig):
    """The operations that took most time in some steps, as a table in the record of the run."""

    kind: Literal["profile"] = "profile"

    after: PositiveCount = 10
    """Steps before the first one that is measured: the first ones are slower than others."""
    steps: PositiveCount = 3
    """Steps that are measured."""
    rows: PositiveCount = 20
    """Operations in the table."""

    def build(self) -> Callback:
        return Profile(self)


class Profile(Callback):
    """Measures from the end of one step to the end of another."""

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config
        self._profile: profile | None = None

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        if training.step == self._config.after:
            self._profile = profile()
            self._profile.start()
        elif training.step == self._config.after + self._config.steps:
            self._finish(training)

    def on_end(self, training: Training) -> None:
        self._finish(training)

    def _finish(self, training: Training) -> None:
        if self._profile is None:
            return
        self._profile.stop()
        device = next(training.model.parameters()).device.type
        by = f"self_{'cpu' if device == 'cpu' else 'device'}_time_total"
        training.text("profile", self._profile.key_averages().table(sort_by=by, row_limit=self._config.rows))
        self._profile = None
