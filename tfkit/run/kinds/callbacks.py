"""Callbacks and trackers: observers of a run.

Callbacks generate samples, report or skip steps with a jump in the loss, end the run at a goal, average the weights,
measure the components, or profile some steps. Trackers show the metrics of a run, in addition to `metrics.jsonl`.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.profiler import profile

import tfkit
from tfkit.component import PositiveFloat
from tfkit.errors import Invalid
from tfkit.nn import part
from tfkit.run.contract import (
    Callback,
    CallbackConfig,
    Name,
    NonNegative,
    PositiveCount,
    TrackedRun,
    Tracker,
    TrackerConfig,
    Training,
    label_of,
)


class SamplesConfig(CallbackConfig):
    """Generate texts during training, and write them to the record of the run."""

    kind: Literal["samples"] = "samples"

    every: PositiveCount
    """Steps between two samples."""
    prompt: str
    """The beginning of the text."""
    tokens: PositiveCount = 100
    """Maximum number of tokens to generate."""
    temperature: NonNegative = 0.8
    """Sampling temperature; with 0, each token is the most likely token."""

    def build(self) -> Callback:
        return Samples(self)


class Samples(Callback):
    """Generates a sample at every multiple of `every`; equal weights give equal samples."""

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
        end: int | None = getattr(training.data, "end", None)
        self._stop = () if end is None else (end,)
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
                stop=self._stop,
                seed=training.step,
            )
        except ValueError as error:
            raise Invalid("tokens", f"the model cannot generate samples: {error}") from error
        tokens = [token for token in generated.rows()[0] if token not in self._stop]  # the end has no text
        return self._config.prompt + self._decode(tokens)


class SpikesConfig(CallbackConfig):
    """Report every step whose loss is far above the losses of the steps before it."""

    kind: Literal["spikes"] = "spikes"

    window: PositiveCount = 128
    """The number of previous steps to compare to."""
    deviations: PositiveFloat = 6.0
    """The distance above their mean from which a loss is reported, in standard deviations."""
    skip: bool = False
    """If true, also skip the update of such a step."""

    def build(self) -> Callback:
        return Spikes(self)


class Spikes(Callback):
    """Compares each loss to the losses of the previous steps."""

    def __init__(self, config: SpikesConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.window)

    def reject(self, training: Training, numbers: Mapping[str, float]) -> str | None:
        return self._spike(numbers["loss"]) if self._config.skip else None

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        spike = self._spike(numbers["loss"])
        if spike and not self._config.skip:
            training.text("spike", spike)
        self._losses.append(numbers["loss"])

    def _spike(self, loss: float) -> str | None:
        """Describe a loss that is a spike. The stored losses do not change."""
        if len(self._losses) < self._config.window:
            return None
        score = (loss - fmean(self._losses)) / max(pstdev(self._losses), 1e-12)
        if score <= self._config.deviations:
            return None
        return f"the loss {loss:.4g} is {score:.1f} deviations above its mean"

    def state(self) -> dict[str, Any]:
        return {"losses": list(self._losses)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._losses.extend(state["losses"])


class StopAtConfig(CallbackConfig):
    """Stop the run when an evaluation metric reaches a goal."""

    kind: Literal["stop_at"] = "stop_at"

    metric: str = "val.loss"
    """The name of the metric: the split, a point, and the metric's kind."""
    below: float | None = None
    """The goal of a metric that is better if it is lower."""
    above: float | None = None
    """The goal of a metric that is better if it is higher."""

    def check(self) -> None:
        """Raise `Invalid` unless exactly one goal is set."""
        super().check()
        if (self.below is None) == (self.above is None):
            raise Invalid("", "`stop_at` must have exactly one of `below` and `above`")

    def build(self) -> Callback:
        return StopAt(self)


class StopAt(Callback):
    """Stops a run at the goal of its config."""

    def __init__(self, config: StopAtConfig) -> None:
        self._config = config

    def on_eval(self, training: Training, numbers: Mapping[str, float]) -> None:
        name, value = self._config.metric, _reported_metric(numbers, self._config.metric)
        below, above = self._config.below, self._config.above
        if value < (-math.inf if below is None else below) or value > (math.inf if above is None else above):
            training.stop(f"{name} is {value:.4g}")


def _reported_metric(numbers: Mapping[str, float], metric: str) -> float:
    """Return a metric of an evaluation; raise `Invalid` if it is not reported."""
    if metric not in numbers:
        message = f"the evaluation does not report the metric `{metric}`"
        raise Invalid("metric", message, notes=(f"reported metrics: {', '.join(numbers)}",))
    return numbers[metric]


class PatienceConfig(CallbackConfig):
    """Stop the run when an evaluation metric has not improved for some evaluations."""

    kind: Literal["patience"] = "patience"

    metric: str = "val.loss"
    """The name of the metric: the split, a point, and the metric's kind."""
    evaluations: PositiveCount = 5
    """Number of consecutive evaluations without an improvement after which the run ends."""
    better: Literal["lower", "higher"] = "lower"
    """The direction of an improvement."""
    min_delta: NonNegative = 0.0
    """The smallest difference from the best value that counts as an improvement."""

    def build(self) -> Callback:
        return Patience(self)


class Patience(Callback):
    """Counts the evaluations since the best value."""

    def __init__(self, config: PatienceConfig) -> None:
        self._config = config
        self._best: float | None = None
        self._waited = 0

    def on_eval(self, training: Training, numbers: Mapping[str, float]) -> None:
        value = _reported_metric(numbers, self._config.metric)
        gain = math.inf if self._best is None else self._best - value
        if self._config.better == "higher" and self._best is not None:
            gain = -gain
        if math.isfinite(value) and gain > self._config.min_delta:  # a value that is not finite is never the best
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self._config.evaluations:
            best = "no finite value" if self._best is None else f"{self._best:.4g}"
            training.stop(f"{self._config.metric} has not improved on {best} in {self._waited} evaluations")

    def state(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._best, self._waited = state["best"], state["waited"]


class EmaConfig(CallbackConfig):
    """Average the weights over the steps, exponentially; evaluate and save the averages.

    At step n, min(decay, (1 + n) / (10 + n)) is the weight of the previous average, so the initial weights soon have no
    effect. Evaluations report the metrics of the averages as `ema.val.loss`. When the process ends, it writes the
    averages to the folder `ema` in the run folder, which every command accepts as a model.
    """

    named = True
    kind: Literal["ema"] = "ema"

    name: Name | None = None
    """The end of the names of its metrics and its folder, `ema_NAME`, which a run with several averages needs."""
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """The weight of the previous average in each step, at most."""

    def build(self) -> Callback:
        return Ema(self)


class Ema(Callback):
    """The averages of the parameters that are trained."""

    def __init__(self, config: EmaConfig) -> None:
        self._config = config
        self._averages: dict[str, Tensor] = {}

    def on_start(self, training: Training) -> None:
        restored, self._averages = self._averages, {}
        for name, parameter in _trained_parameters(training).items():
            value = part(restored[name].to(parameter.device), parameter) if name in restored else parameter.detach()
            self._averages[name] = value.clone()

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        decay = min(self._config.decay, (1 + training.step) / (10 + training.step))
        averages, parameters = [*self._averages.values()], [*_trained_parameters(training).values()]
        get_ema_multi_avg_fn(decay)(averages, parameters, None)

    def on_eval(self, training: Training, numbers: Mapping[str, float]) -> None:
        with self._as_weights(training):
            averaged = training.evaluate()
        for name, number in averaged.items():
            training.log(f"{label_of(self._config)}.{name}", number)

    def on_end(self, training: Training) -> None:
        with self._as_weights(training):
            training.save_model(label_of(self._config))

    @contextmanager
    def _as_weights(self, training: Training) -> Iterator[None]:
        """Replace the model's weights by the averages inside the block."""
        parameters = _trained_parameters(training)
        weights = [parameter.detach().clone() for parameter in parameters.values()]
        try:
            _copy_values(self._averages.values(), parameters.values())
            yield
        finally:
            _copy_values(weights, parameters.values())

    def tensors(self) -> Mapping[str, Tensor]:
        return self._averages

    def restore_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._averages = dict(tensors)


def _trained_parameters(training: Training) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in training.model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def _copy_values(values: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
    for value, parameter in zip(values, parameters, strict=True):
        parameter.copy_(value)


class ComponentsConfig(CallbackConfig):
    """Log how active each component is, by its name in the spec, and draw the numbers over layers and steps.

    The callback logs the numbers of `tfkit.activity` on the first examples of the training split, without dropout. It
    also logs the norms of each component's weights, of their gradients after `clip`, and of their update, such as
    `update/decoder.layers.0.ffn`. The report of the run shows these numbers as heat maps.
    """

    named = True
    kind: Literal["components"] = "components"

    every: PositiveCount = 50
    """Steps between two measurements."""
    sequences: PositiveCount = 4
    """The number of examples. The attention weights of one layer, [sequences, heads, t, t], must fit into memory."""

    def build(self) -> Callback:
        return ComponentActivity(self)


class ComponentActivity(Callback):
    """Measures after some steps. Before such a step, the weights are copied, to compute the norm of the update."""

    def __init__(self, config: ComponentsConfig) -> None:
        self._config = config
        self._before: dict[str, Tensor] = {}

    def on_start(self, training: Training) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise Invalid("", "`components` cannot be used with several processes: each has a shard of the weights")
        examples = training.data.examples("train", "sequential")
        batch = examples.batch(np.arange(min(self._config.sequences, len(examples))))
        self._inputs: dict[str, Any] = dict(training.inputs(batch))

    def reject(self, training: Training, numbers: Mapping[str, float]) -> str | None:
        if (training.step + 1) % self._config.every == 0:
            self._before = {
                name: parameter.detach().clone() for name, parameter in _trained_parameters(training).items()
            }
        return None

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        if training.step % self._config.every:
            return
        trained, before, self._before = _trained_parameters(training), self._before, {}
        gradients = {name: parameter.grad for name, parameter in trained.items() if parameter.grad is not None}
        updates = {name: parameter.detach() - before.pop(name) for name, parameter in trained.items()}
        measured = tfkit.activity(training.model, **self._inputs)
        for quantity, tensors in (("weight", trained), ("gradient", gradients), ("update", updates)):
            measured |= {f"{quantity}/{name}": norm for name, norm in _component_norms(tensors).items()}
        for name, number in measured.items():
            training.log(name, number)


_COMPONENT = re.compile(r"(.+?\.layers\.\d+\.[^.]+|[^.]+)\.")
"""Prefix of a parameter's name: a module of a layer, such as `decoder.layers.0.ffn.`, or a node."""


@torch.no_grad()
def _component_norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norm of each component's tensors together."""
    components: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        match = _COMPONENT.match(name)
        components.setdefault(match[1] if match else name, []).append(tensor)
    norms = [get_total_norm(group).float() for group in components.values()]
    return dict(zip(components, torch.stack(norms).tolist() if norms else [], strict=True))


class ProfileConfig(CallbackConfig):
    """Profile some steps, and write a table of the slowest operations to the record of the run."""

    kind: Literal["profile"] = "profile"

    after: PositiveCount = 10
    """Number of steps before the first measured step: the first steps of a run are slower."""
    steps: PositiveCount = 3
    """Number of measured steps."""
    rows: PositiveCount = 20
    """Number of operations in the table."""

    def build(self) -> Callback:
        return ProfiledSteps(self)


class ProfiledSteps(Callback):
    """Profiles from the end of step `after` to the end of the last measured step."""

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
    extra = "profile"

    def build(self, run: TrackedRun) -> Tracker:
        return TensorBoard(run.folder / "tb", run.step)


class TensorBoard:
    """Writes event files. When a resumed run repeats steps, their earlier events are hidden."""

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
