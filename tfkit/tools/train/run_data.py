"""The data of a run for a training loop outside of tfkit: the batches of each step and of each evaluation, as tensors.

The loop may also use the model, the loss, the optimizer and the learning rates of the run. A loop that uses all of them
computes the same bits as `tfkit train`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, TypeAlias

import torch
from torch import Tensor, fx, nn

from tfkit.arguments import Positive, Sets, checked
from tfkit.building.instrument import instrument_model
from tfkit.building.placement import device_of
from tfkit.errors import SpecWarning
from tfkit.graph.expand import Graph
from tfkit.plugin.manager import load_plugins
from tfkit.run.checked_run import Run, load_run
from tfkit.run.contract import Batch, Data
from tfkit.run.run_spec import RunSpec, SplitConfig
from tfkit.run.training.evaluate import evaluation_batches, tensors_for
from tfkit.run.training.guarded import guarded_component_call
from tfkit.run.training.noise import Noise
from tfkit.run.training.optimizer import Rules, groups_of
from tfkit.run.training.order import indices_of, stream_seed
from tfkit.run.training.parametrize import parameter_rules
from tfkit.run.training.processes import Processes
from tfkit.run.training.start import set_initial_weights
from tfkit.spec.merge import as_changes
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.train.train import RunArgument

BuiltModel: TypeAlias = Annotated[fx.GraphModule, "a model that `build_model` returned"]


@dataclass(frozen=True)
class TensorBatch:
    """A batch as tensors on the device of the run.

    Attributes:
        inputs: the arguments of the model, including masks: `model(**batch.inputs)`.
        targets: the targets of the loss: a tensor, `tfkit.Batch.targets`; a tensor for each output, if the loss has
            several; or None.
        arrays: the same examples as arrays, as the data kind returned them.
    """

    inputs: Mapping[str, Tensor]
    targets: Tensor | Mapping[str, Tensor] | None
    arrays: Batch

    @property
    def size(self) -> int:
        """The number of examples."""
        return self.arrays.size

    @property
    def count(self) -> int:
        """The number of positions that count, by which the training loop divides the sum that a loss returns."""
        return self.arrays.count


class TrainingBatches:
    """The batches of a run by step. The first step is 1, the last step is `len(batches)`.

    A batch depends only on the run and the step, so a loop can begin at any step. All methods raise ValueError for a
    step that the run does not have.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        self._run, self._device = run, device
        self._examples = run.data.examples("train", run.config.data.order)

    def __len__(self) -> int:
        return self._run.steps

    @checked
    def batch(self, step: Positive) -> TensorBatch:
        """Return the batch of a step."""
        self._check(step)
        config, examples = self._run.config, self._examples
        indices = indices_of(config.data.order, config.seed, step, self._run.sizes, examples=len(examples))
        return _as_tensors(self._run, self._run.cut(examples.batch(indices), step), self._device)

    @checked
    def batches(self, start: Positive = 1) -> Iterator[tuple[int, TensorBatch]]:
        """Return an iterator over the steps from `start` to the last, each as its number and its batch.

        A `start` one after the last step is the state of a loop that is done, and yields nothing.
        """
        if start > len(self) + 1:
            self._check(start)
        return ((step, self.batch(step)) for step in range(start, len(self) + 1))

    @checked
    def factor(self, step: Positive) -> float:
        """Return the factor by which the run's schedule multiplies all learning rates at a step."""
        self._check(step)
        return self._run.factor(step)

    @checked
    def seed(self, step: Positive) -> int:
        """Return the seed of the random numbers that the model draws at a step, as for dropout."""
        self._check(step)
        return stream_seed(self._run.config.seed, "noise", step, 0)

    @checked
    def noise(self, step: Positive) -> Noise:
        """Return the random numbers of the examples of a step, for losses that take them as their third argument."""
        self._check(step)
        return Noise.of(self._device, self._run.config.seed, "loss", step, range(self._run.sizes.value(step)))

    def _check(self, step: int) -> None:
        if step > len(self):
            raise ValueError(f"the step must be at most {len(self):,}, the last step of the run; got {step:,}")


class EvaluationBatches:
    """The batches with which a run evaluates a split; all examples in stored order if the run does not evaluate it."""

    def __init__(self, run: Run, split: str, device: torch.device) -> None:
        config = run.config.eval and run.config.eval.splits.get(split)
        self._run, self._split, self._device = run, split, device
        self._part = config or SplitConfig(batches="all")

    def __len__(self) -> int:
        if self._part.batches != "all":
            return self._part.batches
        return -(-len(self._run.data.examples(self._split, "sequential")) // self._run.config.batch.largest)

    def __iter__(self) -> Iterator[TensorBatch]:
        for batch in evaluation_batches(self._run, self._split, self._part):
            yield _as_tensors(self._run, batch, self._device)


class RunData:
    """The data of a run, and what the run trains on it; see `tfkit.data`.

    Attributes:
        config: the values of the run, such as `config.clip` and `config.optimizer.lr`.
        graph: the model of the run, before any tensor exists.
        source: the data, as its kind read it.
        device: the device of all tensors, `machine.device` of the run.
        train: the batches of each step.
        splits: the batches of an evaluation of each split, by the name of the split.
    """

    def __init__(self, run: Run) -> None:
        try:
            self.device = device_of(run.config.machine.device)
        except ValueError as error:
            raise run.error(str(error), "machine", "device") from None
        self._run = run
        self.config: RunSpec = run.config
        self.graph: Graph = run.graph
        self.source: Data = run.data
        self.train = TrainingBatches(run, self.device)
        self.splits: Mapping[str, EvaluationBatches] = {
            name: EvaluationBatches(run, name, self.device) for name in run.data.splits
        }

    @cached_property
    def _rules(self) -> Rules | None:
        return parameter_rules(self._run)

    def build_model(self) -> fx.GraphModule:
        """Build the model as a run begins: its initial weights, and its frozen parameters.

        The settings of `machine` for layers, such as `recompute` and `compile`, are left to the loop, because they do
        not change results by more than rounding.

        Raises:
            SpecError: the weights of the run cannot be read or do not fit; or the run begins with a step of a different
                run, or has layers in float8, which only `tfkit train` can do.
        """
        config = self.config
        for value, *path in (
            (config.branch, "branch"),
            (config.machine.float8, "machine", "float8"),
            (config.by_step or None, "by_step"),
        ):
            if value is not None:
                message = f"`{path[-1]}` has no effect in a training loop outside of tfkit"
                raise self._run.error(message, *path, help="remove it, or train the run with `tfkit train`")
        model = Processes().build(self._run, self.device)
        set_initial_weights(model, self._run, self._rules)
        instrument_model(model, in_run=True)
        return model

    @checked
    def build_loss(self, model: BuiltModel) -> nn.Module:
        """Build the loss of the run, which takes `inputs` and `targets` of a batch.

        It returns the sum over all positions that count, or a `tfkit.LossSum`; see `tfkit.LossConfig.build`.
        """
        with guarded_component_call(self._run, model, self.config.loss, "`build`", "loss"):
            return self.config.loss.build(model)

    @checked
    def build_optimizer(self, model: BuiltModel) -> torch.optim.Optimizer:
        """Build the optimizer of the run, with its groups of parameters.

        Raises:
            SpecError: a group of the run matches no trained parameter, or the optimizer cannot be built.
        """
        with self._run.guarded(self.config.optimizer, "`build`", "optimizer"):
            return self.config.optimizer.build(groups_of(model, self.config.optimizer, self._rules))


@checked
def data(run: RunArgument, *, sets: Sets = ()) -> RunData:
    """Read and check a run, and return its data for a training loop of yours: the batches by step, as tensors.

    Args:
        run: a run, as `tfkit.train` takes it.
        sets: changes, as `tfkit.train` takes them.

    Raises:
        SpecError: the run is invalid, as for `tfkit.train`.
    """
    loaded = load_run(run, load_plugins(), sets=as_changes(sets), count=flops_of_step)
    for note in loaded.file.notes:
        warnings.warn(note.render("warning"), SpecWarning, stacklevel=3)
    return RunData(loaded)


def _as_tensors(run: Run, batch: Batch, device: torch.device) -> TensorBatch:
    inputs, targets = tensors_for(run.graph, batch, device, run.config.loss)
    return TensorBatch(inputs, targets, batch)
