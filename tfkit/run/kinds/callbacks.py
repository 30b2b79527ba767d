"""Callbacks and trackers: observers of a run.

Callbacks write samples of its text, note jumps of its loss, end it at a goal, or profile some of its steps. Trackers
show its numbers, in addition to `metrics.jsonl`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal

from torch.profiler import profile

import tfkit
from tfkit.component import PositiveFloat
from tfkit.errors import Invalid
from tfkit.run.contract import Callback, CallbackConfig, NonNegative, PositiveCount, Tracker, TrackerConfig, Training


class SamplesConfig(CallbackConfig):
    """Texts that the model writes as it learns, in the record of the run."""

    kind: Literal["samples"] = "samples"

    every: PositiveCount
    """Steps between two samples."""
    prompt: str
    """The beginning of the text."""
    tokens: PositiveCount = 100
    """Most tokens to write."""
    temperature: NonNegative = 0.8
    """Randomness; 0 takes the likeliest token."""

    def build(self) -> Callback:
        return Samples(self)


class Samples(Callback):
    """Writes a sample at every multiple of a step, always the same for the same weights."""

    def __init__(self, config: SamplesConfig) -> None:
        self._config = config

    def on_start(self, training: Training) -> None:
        tokenizer = training.data.tokenizer
        if tokenizer is None:
            raise Invalid("", "`samples` needs text: the data has no tokenizer")
        try:
            self._prompt = list(tokenizer.encode(self._config.prompt))
        except ValueError as error:
            raise Invalid("prompt", f"`prompt` cannot be encoded by the tokenizer of the data: {error}") from error
        self._decode = tokenizer.decode
        self._written(training)  # what cannot be written is an error now, not later

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        if training.step % self._config.every == 0:
            training.text("sample", self._written(training))

    def _written(self, training: Training) -> str:
        try:
            generated = tfkit.generate(
                training.model,
                [self._prompt],
                max_new_tokens=self._config.tokens,
                temperature=self._config.temperature,
                seed=training.step,
            )
        except ValueError as error:
            raise Invalid("tokens", f"the model cannot generate samples: {error}") from error
        return self._config.prompt + self._decode(generated.rows()[0])


class SpikesConfig(CallbackConfig):
    """A note at every step whose loss is far above those before it."""

    kind: Literal["spikes"] = "spikes"

    window: PositiveCount = 128
    """The number of earlier steps."""
    deviations: PositiveFloat = 6.0
    """The distance from their mean, in standard deviations."""

    def build(self) -> Callback:
        return Spikes(self)


class Spikes(Callback):
    """Remembers the last losses."""

    def __init__(self, config: SpikesConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.window)

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        loss = numbers["loss"]
        if len(self._losses) == self._config.window:
            score = (loss - fmean(self._losses)) / max(pstdev(self._losses), 1e-12)
            if score > self._config.deviations:
                training.text("spike", f"the loss {loss:.4g} is {score:.1f} deviations above its mean")
        self._losses.append(loss)

    def state(self) -> dict[str, Any]:
        return {"losses": list(self._losses)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._losses.extend(state["losses"])


class StopAtConfig(CallbackConfig):
    """The end of a run as soon as an evaluation reaches a goal."""

    kind: Literal["stop_at"] = "stop_at"

    metric: str = "val.loss"
    """A number of the evaluation: the split, a point, the metric."""
    below: float | None = None
    """The goal of a number that should be small."""
    above: float | None = None
    """The goal of a number that should be large."""

    def check(self) -> None:
        """Refuse no goal, and two."""
        super().check()
        if (self.below is None) == (self.above is None):
            raise Invalid("", "`stop_at` must have exactly one of `below` and `above`")

    def build(self) -> Callback:
        return StopAt(self)


class StopAt(Callback):
    """Stops a run at its goal."""

    def __init__(self, config: StopAtConfig) -> None:
        self._config = config

    def on_eval(self, training: Training, numbers: Mapping[str, float]) -> None:
        name = self._config.metric
        if name not in numbers:
            raise Invalid(
                "metric",
                f"the evaluation does not report the metric `{name}`",
                notes=(f"reported metrics: {', '.join(numbers)}",),
            )
        below, above = self._config.below, self._config.above
        if numbers[name] < (-math.inf if below is None else below) or numbers[name] > (
            math.inf if above is None else above
        ):
            training.stop(f"{name} is {numbers[name]:.4g}")


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


class TensorBoardConfig(TrackerConfig):
    """TensorBoard, in the folder `tb` of the run."""

    kind: Literal["tensorboard"] = "tensorboard"

    def build(self, folder: Path, step: int) -> Tracker:
        try:
            return TensorBoard(folder / "tb", step)
        except ModuleNotFoundError as error:
            message = f"`tensorboard` needs the package {error.name}"
            raise Invalid("", message, help='pip install "tfkit[profile]", or remove it from `track`') from error


class TensorBoard:
    """Event files. Events of steps that are run again are hidden."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name.replace(".", "/"), number, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, f"    {text.replace(chr(10), chr(10) + '    ')}", step)  # indented: not Markdown

    def close(self) -> None:
        self._writer.close()
