"""A checked run: its model as a graph, its data, the number of its steps, and the values that identify it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tfkit.component import AttentionConfig, Component, FieldPath, leaf_values, parts
from tfkit.errors import Diagnostic, Invalid, SpecError, listing, quoted, similar_name_help
from tfkit.graph.decode_split import predicted_input, reduce_to_output
from tfkit.graph.expand import Graph, announce_graph, expand
from tfkit.graph.input_shapes import max_len, rows_of
from tfkit.graph.wiring import crosses_documents, node_ignoring_pairs
from tfkit.plugin.manager import Plugins
from tfkit.run.contract import IGNORE_INDEX, Array, Batch, Data, LossConfig, MetricConfig, Tokenizer
from tfkit.run.guarded_data import guarded_call
from tfkit.run.read_run import LOSS, AnyRun, RunFile, read_run
from tfkit.run.run_meaning import RunSemantics, Value, content_paths, files_content
from tfkit.run.run_spec import RunSpec, TaskConfig, WeightsConfig
from tfkit.run.step_values import StepValues, step_values
from tfkit.run.task_files import read_task_file
from tfkit.run.tasks import Task, encoded_task
from tfkit.spec.adapter_files import base_help
from tfkit.spec.document import MODEL
from tfkit.spec.extending import short_path
from tfkit.spec.folder import (
    ADAPTER_WEIGHTS,
    OPTIMIZER,
    RUN,
    WEIGHTS,
    checkpoints_in,
    model_folder,
    step_of,
    tokenizer_in,
)
from tfkit.spec.load import Spec
from tfkit.spec.messages import diagnostic_of, fault_in
from tfkit.spec.provenance import Provenance
from tfkit.spec.read_document import of_model
from tfkit.spec.weight_files import content_of

if TYPE_CHECKING:
    from tfkit.decoding.masked_diffusion import MaskedDiffusion

CountFlops: TypeAlias = Callable[[Graph, int, int], int]
"""Returns the FLOPs of a forward and backward pass for a model, a number of sequences, and their length."""
OBJECTIVE = "evaluate the loss of the run instead, `eval: {metrics: [objective]}`"
CONTENT = "data_content"
"""Path of the digest of the data."""
WEIGHTS_CONTENT = "weights_content"
"""Path of the digest of the initial weights."""
SAMPLED = 32
"""The number of examples whose targets are compared with the outputs of the model."""
FITS_POSITIONS = (
    "end the model in a head of a sequence, such as `lm_head`, or use data with one target for each example: `labelled`"
)
FITS_EXAMPLES = (
    "end the model in a `classifier` of a `pooler`, or use data with a target for each position: `text`, `pairs`"
)
START = (WEIGHTS_CONTENT, "weights_tokens", "weights_states", "branch_step", "branch_content")
"""Paths of the values that describe what a run begins with."""
MAX_COMPILED = 4
"""Maximum number of different values by step with compiled code, of which torch keeps 8 versions, also for lengths."""
MAX_LENGTHS = 64
"""Maximum number of different lengths in a run: its FLOPs are counted, and its code compiled, for each."""
TASK_NAME = r"[a-z0-9_]{1,40}"
"""The form of the name of a task, as in the field `name`."""
SUFFIX = "_content"
"""Suffix of the paths of digests of content."""


@dataclass(frozen=True)
class Run:
    """A run that has been read and checked. It contains no tensors."""

    file: RunFile
    graph: Graph
    count: CountFlops | None = None
    """The FLOP counter; required if the length of the run is in FLOPs."""
    recorded: Mapping[str, Value] | None = None
    """The meaning in the folder of a run that continues from a checkpoint; None for a run that begins."""
    checkpoint: Path | None = None
    """The checkpoint from which the run continues; None for a run that begins."""

    @property
    def config(self) -> RunSpec:
        """The values of the run."""
        return self.file.config

    @property
    def data(self) -> Data:
        """The data of the run."""
        return self.file.data

    @property
    def written(self) -> Spec:
        """The model as the run's file describes it, without the factors of the parametrization."""
        return self.file.written or self.graph.spec

    @cached_property
    def base_graph(self) -> Graph | None:
        """The model at the base sizes of the parametrization, if the run sets any."""
        return None if self.file.base is None else expand(self.file.base)

    @cached_property
    def steps(self) -> int:
        """Total number of training steps."""
        config = self.config
        if config.steps is not None:
            return config.steps
        # The exact positions of the first steps depend on the seed, and runs with different seeds must have the same
        # number of steps to be comparable.
        if config.tokens is not None:
            return self._positions(0).steps_for(Fraction(config.tokens))
        if config.epochs is not None:
            examples = len(self.data.examples("train", "sequential"))
            return max(1, config.batch.sizes().steps_for(Fraction(config.epochs * examples)))
        assert config.flops is not None
        try:
            sizes, lengths = config.batch.sizes(), self._lengths(0)
            flops = {length: self._flops_of_example(length) for length in lengths.values}
            return sizes.combined(lengths, lambda n, length: n * flops[length]).steps_for(Fraction(config.flops))
        except SpecError as error:
            raise self.file.placed(error, "flops") from error

    def _flops_of_example(self, length: Fraction | int) -> Fraction:
        """Return the FLOPs of an example of a mean length, in proportion to an example of the rounded length."""
        assert self.count is not None, "a run whose length is in FLOPs needs `count`"
        size, further = self.config.batch.largest, self.config.loss.further_positions
        rounded = math.ceil(length) + further
        return Fraction(self.count(self.graph, size, rounded)) / size * (length + further) / rounded

    @cached_property
    def _mean_length(self) -> Fraction:
        return mean_length(self.data)

    def _lengths(self, steps: int) -> StepValues[Any]:
        """Return the mean number of positions of the examples of each step, without padding."""
        lengths = self.config.batch.lengths(steps)
        return StepValues((0,), (self._mean_length,)) if lengths is None else lengths

    def _positions(self, steps: int) -> StepValues[Fraction]:
        """Return the mean number of positions in the batch of each step, without padding."""
        return self.config.batch.sizes(steps).combined(self._lengths(steps), lambda n, length: n * Fraction(length))

    @property
    def tokens_of_step(self) -> float:
        """Mean number of positions in the batch of a training step, without padding."""
        return float(self.positions.before(self.steps + 1) / self.steps)

    @cached_property
    def sizes(self) -> StepValues[int]:
        """The number of examples in each step."""
        return self.config.batch.sizes(self.steps)

    @cached_property
    def positions(self) -> StepValues[Fraction]:
        """The mean number of positions in the batch of each step, without padding."""
        return self._positions(self.steps)

    def tokens_before(self, step: int) -> float:
        """Return the mean number of positions in all steps before a step, without padding."""
        return float(self.positions.before(step))

    @cached_property
    def examples_by_length(self) -> dict[int, float]:
        """The number of examples of all steps by the length at which FLOPs are counted; see `length` and `fill`."""
        if self.config.batch.lengths(self.steps) is None:
            return {self.length: self.sizes.before(self.steps + 1) * self.fill}
        lengths, totals = self._lengths(self.steps), dict[int, float]()
        for length in dict.fromkeys(lengths.values):
            counted = self.sizes.combined(lengths, lambda n, value: n if value == length else 0)  # noqa: B023
            totals[length + self.config.loss.further_positions] = counted.before(self.steps + 1)
        return totals

    def cut(self, batch: Batch, step: int) -> Batch:
        """Return the batch of a step with the length of the step."""
        return batch if self._step_lengths is None else batch.cut(self._step_lengths.value(step))

    @cached_property
    def _step_lengths(self) -> StepValues[int] | None:
        return self.config.batch.lengths(self.steps)

    @cached_property
    def by_step(self) -> dict[FieldPath, StepValues[Any]]:
        """The values of the fields of the model and of the loss that change by step."""
        return {path: self.values_of(path) for path in self.file.changing}

    def values_of(self, path: FieldPath) -> StepValues[Any]:
        """Return the values of a field that changes by step. Raise `Invalid` if two changes are at the same step."""
        root = self.config.loss if path[0] == LOSS else self.graph.spec.model
        real = isinstance(dict(leaf_values(root))[path[1:]], float)
        return step_values(self.config.by_step[".".join(path)], self.steps, real=real)

    def values_at(self, step: int) -> dict[FieldPath, Any]:
        """Return the values of the fields that change, in a step; before the first step, in the first step."""
        return {path: values.value(max(step, 1)) for path, values in self.by_step.items()}

    def with_changes(self, values: Mapping[FieldPath, Any]) -> Run:
        """Return the run with other values of its model and of its loss."""
        if not values:
            return self
        file = replace(self.file, model=self.graph.spec).changed(values)
        return replace(self, file=file, graph=replace(expand(file.model), hooks=self.graph.hooks))

    @cached_property
    def length(self) -> int:
        """The length at which FLOPs are counted: the rounded mean of the training examples, plus positions of the loss.

        The FLOPs of an example are `fill` times this count. The FLOPs of attention grow with the square of the length,
        so for examples of unequal lengths the count is slightly too low.
        """
        return math.ceil(self._mean_length) + self.config.loss.further_positions

    @property
    def longest(self) -> int:
        """The number of positions that the model takes for the longest example."""
        return self.data.length + self.config.loss.further_positions

    def parts(self, mean_length: Fraction) -> Fraction:
        """Return the positions of the model for an example of a mean length, divided by `length`."""
        return (mean_length + self.config.loss.further_positions) / self.length

    @cached_property
    def fill(self) -> float:
        """The positions of the model for a mean training example, divided by `length`; 1 for equal lengths."""
        return float(self.parts(self._mean_length))

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step. Raise SpecError if the schedule fails."""
        with self.guarded(self.config.schedule, "`factor`", "schedule"):
            return float(self.config.schedule.factor(step, self.steps))

    @cached_property
    def generation(self) -> MaskedDiffusion | None:
        """The way in which the trained model generates tokens; None if it generates one token after the other."""
        loss = self.config.loss
        with self.guarded(loss, "`generation`", "loss"):
            try:
                generation = loss.generation(self.graph)
                if generation is not None:
                    generation.input_of(self.graph)
            except ValueError as error:
                raise self.error(str(error), "loss") from error
        return generation

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of the evaluations. Raises SpecError for a task that cannot be read, or does not fit the model."""
        configs = self.config.eval.tasks if self.config.eval else ()
        tasks = [self.task_of(config, "eval", "tasks", str(number)) for number, config in enumerate(configs)]
        names: dict[str, int] = dict.fromkeys(self.config.eval.splits, -1) if self.config.eval else {}
        for number, task in enumerate(tasks):
            if task.name in names:
                message = f"the name of a task must be unique, also among splits; got {quoted(task.name)} twice"
                raise self.error(message, "eval", "tasks", str(number), help="set `name`: `{file: ..., name: ...}`")
            names[task.name] = number
        return tuple(tasks)

    def task_of(self, config: TaskConfig, *path: str) -> Task:
        """Read and encode a task. Raise SpecError if that is not possible, or if it does not fit the model."""
        try:
            return task_for(config, self.graph, self.data.tokenizer, self._first_token, self.config.loss)
        except Invalid as error:
            raise self.refused(error, *path) if path else SpecError(diagnostic_of(error, (), Provenance())) from error

    @property
    def _first_token(self) -> int | None:
        """The token before an empty prompt: the token that begins a text in the data, else the token that ends one."""
        start, end = (getattr(self.data, name, None) for name in ("start", "end"))
        return end if start is None else start

    @property
    def metric_names(self) -> list[str]:
        """The names of the metrics that evaluations report, such as `val.loss` and `agreement.acc`."""
        evaluations = self.config.eval
        if evaluations is None:
            return []
        return [*evaluations.names(self.config.loss.terms), *(name for task in self.tasks for name in task.names)]

    @cached_property
    def semantics(self) -> RunSemantics:
        """The values that determine the results: of the run, of its model, and digests of the files that it reads."""
        values: dict[str, Value] = {"steps": self.steps, CONTENT: self.data.fingerprint}
        values |= self._start[0]
        for path, value in (*content_paths((), self.config), *content_paths((MODEL,), self.graph.spec.model)):
            values[f"{'.'.join(path)}{SUFFIX}"] = self._content(path, value)
        values |= {f"eval.tasks.{number}.file{SUFFIX}": task.file.digest for number, task in enumerate(self.tasks)}
        return RunSemantics(self.config, self.graph.spec.model, values)

    @property
    def start_error(self) -> SpecError | None:
        """The reason why the weights or the branch that the run began with cannot be read any more."""
        return self._start[1]

    @cached_property
    def _start(self) -> tuple[dict[str, Value], SpecError | None]:
        """Digests of the weights or the branch that the run begins with.

        A run that continues does not need them any more, unless it has adapters: if they cannot be read, its folder has
        the digests.
        """
        recorded = {name: value for name, value in (self.recorded or {}).items() if name in START}
        try:
            return self._read_start(), None
        except SpecError as error:
            step = self._branch_step()
            if not recorded or step != recorded.get("branch_step", step) or self.config.adapters is not None:
                raise
            return recorded, error

    def _read_start(self) -> dict[str, Value]:
        values: dict[str, Value] = {}
        if self.config.weights is not None:
            values[WEIGHTS_CONTENT] = self._weights_content(self.config.weights)
            if self.config.weights.tokens and (file := tokenizer_in(model_folder(Path(self.config.weights.path)))):
                values["weights_tokens"] = self._content(("weights", "tokens"), str(file))
            if self.config.weights.states and os.path.isfile(model_folder(Path(self.config.weights.path)) / OPTIMIZER):
                values["weights_states"] = content_of(model_folder(Path(self.config.weights.path)) / OPTIMIZER)
        if self.branch is not None:
            tensors = [content_of(self.branch / name) for name in (WEIGHTS, OPTIMIZER)]
            values |= {"branch_step": step_of(self.branch), "branch_content": ":".join(tensors)}
        return values

    def _branch_step(self) -> Value:
        """Return the step of the branch: as written in the run, else as recorded, else the latest of its source."""
        written = ("branch", "step") in self.file.provenance.spans
        latest = None if self.config.branch is None else self.config.branch.step
        return latest if written or self.recorded is None else self.recorded.get("branch_step", latest)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits, equal for runs with the same meaning."""
        return self.semantics.digest

    @cached_property
    def branch(self) -> Path | None:
        """The checkpoint that the run branches from. Raises SpecError if that step has no checkpoint."""
        config = self.config.branch
        if config is None:
            return None
        folder = Path(config.run)
        if not os.path.isfile(folder / RUN):
            message = f"`branch` must be the folder of a run; got {quoted(str(short_path(folder)))}"
            raise self.error(message, "branch", help="train the run first, or name a different folder")
        checkpoints, step = {step_of(path): path for path in checkpoints_in(folder)}, self._branch_step()
        if not isinstance(step, int) or step not in checkpoints:
            which = f"of step {step}" if checkpoints else "yet"
            help = f"choose a step that has a checkpoint: {', '.join(map(str, checkpoints))}" if checkpoints else None
            raise self.error(
                f"the run in {quoted(str(short_path(folder)))} has no checkpoint {which}", "branch", help=help
            )
        if os.path.lexists(checkpoints[step] / ADAPTER_WEIGHTS):
            message = f"`branch` must be a run without adapters; got {quoted(str(short_path(folder)))}"
            raise self.error(message, "branch", help="start from its merged weights instead: `weights: DIR`")
        if step >= self.steps:
            message = f"a branch from step {step:,} must have a later last step; got {self.steps:,}"
            raise self.error(message, "branch", help="raise `steps`, which includes the steps before the branch")
        return checkpoints[step]

    def _weights_content(self, config: WeightsConfig) -> str:
        try:
            return content_of(Path(config.path))
        except SpecError as error:
            help = "train a model first, or name different weights: --set weights=DIR"
            if self.checkpoint is not None and self.config.adapters is not None:
                help = base_help(self.checkpoint)
            error = SpecError(*(replace(diagnostic, help=help) for diagnostic in error.diagnostics))
            raise self.file.placed(error, "weights") from error

    def _content(self, path: tuple[str, ...], value: str) -> str:
        try:
            return files_content(Path(value))
        except SpecError as error:
            raise self.file.placed(error, *path) from error

    def error(self, message: str, *path: str, help: str | None = None) -> SpecError:
        """Build an error about a value of the run."""
        return SpecError(Diagnostic(message, self.file.location(path), ".".join(path), help=help))

    def guarded(self, config: Component, method: str, *path: str) -> AbstractContextManager[None]:
        """Turn an exception of a kind's method into an error of that kind, located at `path`, or without a location."""
        return guarded_call(fault_in(type(config), path, self.file.provenance if path else Provenance()), method)

    def refused(self, error: Invalid, *path: str) -> SpecError:
        """Build the error of a kind at a location in the run."""
        return SpecError(diagnostic_of(error, path, self.file.provenance))


def load_run(run: AnyRun, plugins: Plugins, *, sets: Iterable[str] = (), count: CountFlops | None = None) -> Run:
    """Read and check a run, which is a path, a run folder, the name of a shipped run, or a mapping; see `check_run`."""
    return check_run(read_run(run, plugins, sets=sets), plugins, count=count)


def check_run(file: RunFile, plugins: Plugins | None = None, *, count: CountFlops | None = None) -> Run:
    """Check that the parts of a run fit together, and return the run. Raise SpecError if they do not.

    `count` is required if the length of the run is in FLOPs. The hooks of `plugins` are called with the model.
    """
    with of_model():
        graph = expand(file.model) if plugins is None else announce_graph(expand(file.model), plugins)
    run = Run(file, graph, count)
    _check_model(run)
    _check_adapters(run)
    _check_machine(run)
    if run.config.eval is not None:
        check_metrics(run, run.config.eval.metrics if run.config.eval.splits else (), "eval", "metrics")
        run.tasks  # noqa: B018  raises for tasks that do not fit
    with run.guarded(run.config.schedule, "`check_steps`", "schedule"):
        run.config.schedule.check_steps(run.steps)
    _check_changes(run)
    return run


def _check_changes(run: Run) -> None:
    """Raise SpecError for a number that changes after the last step, and for too many lengths."""
    batch, steps = run.config.batch, run.steps
    changes: dict[tuple[str, ...], Callable[[], StepValues[Any] | None]] = {
        ("batch", "sequences"): lambda: batch.sizes(steps),
        ("batch", "length"): lambda: batch.lengths(steps),
        **{("by_step", name): partial(run.values_of, field) for field, name in run.file.changing.items()},
    }
    for path, values_of in changes.items():
        try:
            values = values_of() or StepValues((0,), (0,))
        except Invalid as error:
            raise run.refused(error, *path) from error
        ramp = isinstance(values.values[0], float) and values.starts == tuple(range(len(values.starts)))
        if values.starts[-1] >= steps + ramp:  # a change over all steps ends after the last
            message = f"the change after {values.starts[-1]:,} steps has no effect: the run has {steps:,} steps"
            raise run.error(message, *path, help="remove it, or train for more steps")
        if path == ("batch", "length") and (n := len(set(values.values))) > MAX_LENGTHS:
            message = f"`length` must have at most {MAX_LENGTHS} different values; got {n}"
            raise run.error(message, *path, help="write `length: {at: {0: 64, 1000: 128}}`")

    states = 1 + sum(len(set(changing.values)) - 1 for changing in {*run.by_step.values()})
    if run.config.machine.compile and states > MAX_COMPILED:
        message = f"`compile` must not be combined with more than {MAX_COMPILED} different values of `by_step`"
        help = "write `at` with fewer values, or remove `compile`: the code is compiled for each value"
        raise run.error(message, "machine", "compile", help=help)


def mean_length(data: Data, split: str = "train") -> Fraction:
    """Return the mean number of positions of the examples of a split, without padding."""
    examples = data.examples(split, "sequential")
    positions: int | None = getattr(examples, "positions", None)
    return Fraction(data.length) if positions is None else Fraction(positions, len(examples))


def inputs_for(graph: Graph, names: Iterable[str], loss: LossConfig) -> dict[str, str]:
    """Return the input of the model for each input of the data. Raise `Invalid` if they do not fit.

    The data does not have the inputs that the loss fills.
    """
    filled = (*loss.inputs_ahead, *loss.fills)
    required = [name for name, signal in graph.inputs.items() if not signal.optional and name not in filled]
    data_inputs = list(names)
    if len(data_inputs) == len(required) == 1:
        return {data_inputs[0]: required[0]}
    if not set(required) <= set(data_inputs) <= set(graph.inputs):
        fills = f", and the loss `{loss.kind_name()}` fills {', '.join(filled)}" if filled else ""
        message = f"the data has the inputs {', '.join(data_inputs)}{fills}"
        raise Invalid("", f"{message}, but the model takes {', '.join(graph.inputs)}")
    return {name: name for name in data_inputs}


def mask_of(graph: Graph, names: Iterable[str]) -> str:
    """Return the pairwise mask that separates the documents in a row. Raise `Invalid` without such a mask."""
    node, (name, *more) = node_ignoring_pairs(graph), names
    mask = graph.inputs[name].mask
    if more or mask is None:
        raise Invalid("", "the documents of a row can be separated only for a model with a single input, of any length")
    if node is not None:
        message = f"the model cannot separate the documents of a row: `{node}` ignores the pairwise mask"
        help = "use encoders, decoders and heads over single positions, which can separate documents"
        if crosses_documents(graph.node(node)):
            message = f"the model cannot separate the documents of a row: `{node}` carries a state across them"
            help = "train on rows of a single document"
        raise Invalid("", message, help=help)
    return mask


def padding_mask_of(graph: Graph, name: str) -> str:
    """Return the padding mask of an input. Raise `Invalid` for an input without a mask."""
    mask = graph.inputs[name].mask
    if mask is None:
        message = f"the data has padding in `{name}`, but that input of the model always has the same length"
        raise Invalid("", message, help="remove `length` of the input from the spec")
    return mask


def _feature_shape(values: Array) -> tuple[int, ...] | None:
    """Return the shape of features without batch and positions; None for ids."""
    return values.shape[2 if values.ndim == 3 else 1 :] if values.dtype == np.float32 else None


def _check_model(run: Run) -> None:
    """Raise SpecError if the model does not fit the data."""
    data, graph = run.data, run.graph
    first = data.examples("train", run.config.data.order).batch(np.zeros(1, np.int64))
    try:
        _check_loss(run, first)
    except Invalid as error:
        raise run.refused(error, "loss") from error
    try:
        inputs = inputs_for(graph, first.inputs, run.config.loss)
        if first.documents is not None:
            mask_of(graph, inputs.values())
        for name in first.masks:
            padding_mask_of(graph, inputs[name])
    except Invalid as error:
        raise run.refused(error, "data") from error
    _check_inputs(run, first, inputs)
    n_classes = getattr(data, "n_classes", None)
    for name, classes in (n_classes if isinstance(n_classes, Mapping) else {"": n_classes}).items():
        output = graph.node(name or graph.outputs[0]).output
        width = output.width if output.type == "logits" else None
        if classes is not None and width is not None and width < classes:
            of, key = (f" of `{name}`", f".{name}") if name else ("", "")
            message = f"the data has {classes:,} classes{of}, but the model returns {width:,} logits"
            raise run.error(message, "data", help=f"write `n_classes: data.n_classes{key}` in the run's `model`")
    _check_targets(run)
    limit, further = max_len(graph), run.config.loss.further_positions
    if limit is not None and data.length + further > limit:
        added = f", and {further} of the loss" if further else ""
        message = f"the examples have {data.length:,} positions{added}, but the model has max_len {limit:,}"
        path = ("batch", "length") if run.config.data.takes_length else ("data",)
        raise run.error(message, *path, help="set `max_len` of the model, or make the examples shorter")
    for split in run.config.eval.splits if run.config.eval else ():
        check_length(run, split, "eval", "splits", split)


def _check_inputs(run: Run, batch: Batch, inputs: Mapping[str, str]) -> None:
    """Raise SpecError if an input of the model does not fit the sizes or the vocabulary of the data."""
    for name, values in batch.inputs.items():
        signal, sizes = run.graph.inputs[inputs[name]], _feature_shape(values)
        of_image = signal.type in ("image", "images")
        taken = (signal.channels, signal.rows, signal.width) if of_image else (signal.width,)
        if of_image and sizes is not None:
            sizes = sizes[-3:]
        if sizes != (taken if signal.type in ("sequence", "vector", "image", "images") else None):
            words = "features of width" if values.ndim < 4 else "images of"
            got = "ids" if sizes is None else f"{words} {' x '.join(map(str, sizes))}"
            raise run.error(f"the data has {got}, but `{inputs[name]}` of the model takes {signal.in_words()}", "data")
        if signal.length is not None and values.shape[1] != signal.length:
            message = f"the data has {values.shape[1]:,} positions, but `{inputs[name]}` of the model takes"
            raise run.error(f"{message} {signal.in_words()}", "data")
    for name in inputs.values():
        rows = rows_of(run.graph, name)
        if rows is not None and rows < run.data.vocab_size:  # published tables often have more rows than tokens
            message = f"the data has {run.data.vocab_size:,} tokens, but the model has `vocab_size` {rows:,}"
            raise run.error(message, "data", help="write `vocab_size: data.vocab_size` in the run's `model`")
    if run.generation is not None and run.generation.mask_token < run.data.vocab_size:
        message = f"the mask token of the model must not be one of the {run.data.vocab_size:,} tokens of the data"
        help = "write `vocab_size: data.vocab_size + 1` in the run's `model`"
        raise run.error(f"{message}; got {run.generation.mask_token:,}", "loss", help=help)


def _check_adapters(run: Run) -> None:
    """Raise SpecError for adapters without weights that they change."""
    if run.config.adapters is not None and run.config.weights is None:
        help = "name the weights that the adapters change: `weights: DIR`"
        raise run.error("`adapters` must be combined with `weights`", "adapters", help=help)


def _check_machine(run: Run) -> None:
    """Raise SpecError if a key of `machine` has no effect on the model."""
    machine, stacks = run.config.machine, [node.stack for node in run.graph.nodes if node.stack is not None]
    attention = any(isinstance(part, AttentionConfig) for _, part in parts((), run.graph.spec.model))
    for name, has_effect, lack in (
        ("recompute", machine.recompute == "none" or stacks, "layers"),
        ("compile", machine.compile != "layers" or stacks, "layers"),
        ("attention", machine.attention == "sdpa" or attention, "attention"),
        ("float8", machine.float8 is None or stacks, "layers"),
    ):
        if not has_effect:
            raise run.error(f"`{name}` has no effect: the model has no {lack}", "machine", name, help="remove it")
    n, depth = machine.recompute, max((len(stack.layers) for stack in stacks), default=0)
    if isinstance(n, int) and n > depth:
        message = f"`recompute` must be at most {depth}, the number of layers; got {n}"
        raise run.error(message, "machine", "recompute")


def check_metrics(run: Run, metrics: Iterable[MetricConfig], *path: str) -> None:
    """Raise SpecError for a metric of targets that the data lacks, or that the loss does not predict."""
    first, loss = run.data.examples("train", "sequential").batch(np.zeros(1, np.int64)), run.config.loss
    for number, metric in enumerate(metrics):
        if metric.objective:
            continue
        name, kind, help = metric.kind_name(), loss.kind_name(), OBJECTIVE
        if loss.fills:
            message = f"the metric `{name}` cannot be combined with the loss `{kind}`, which alone computes the input"
            message = f"{message} `{next(iter(loss.fills))}` of the model"
        elif first.targets is None:
            message = f"the metric `{name}` needs targets, which the data does not have"
        elif metric.of_numbers == first.has_ids:
            targets, needed = ("ids", "real numbers") if first.has_ids else ("real numbers", "ids")
            message = f"the metric `{name}` needs targets that are {needed}; the data has {targets}"
            suitable = "[loss, accuracy]" if first.has_ids else "[mse, mae, r2]"
            help = f"choose metrics of the targets of the data, `eval: {{metrics: {suitable}}}`"
        elif metric.cross_entropy and not loss.predicts_targets:
            message = f"the metric `{name}` is the cross-entropy of the data's targets, which `{kind}` does not predict"
        else:
            continue
        raise run.error(message, *((*path, str(number)) if path else ()), help=help)


def task_for(
    config: TaskConfig, graph: Graph, tokenizer: Tokenizer | None, first: int | None, loss: LossConfig
) -> Task:
    """Read a task, and encode it for a model.

    Raises `Invalid` for a file that is not a task, without a tokenizer, and if the model does not predict next tokens.
    """
    output = next(iter(loss.terms), graph.outputs[0])
    name = predicted_input(reduce_to_output(graph, output))
    message = f"a task must have a model that predicts the next tokens of its only input; got {quoted(graph.name)}"
    if name is None or loss.fills or graph.inputs[name].length is not None:
        raise Invalid("", message, help="evaluate a decoder on the task")
    try:
        inputs_for(graph, [name], loss)
    except Invalid as error:
        raise Invalid("", message, notes=(error.message,), help="evaluate a decoder on the task") from error
    if tokenizer is None:
        raise Invalid("", "a task must have a tokenizer; the data has none", help="use data with texts")
    rows = rows_of(graph, name)
    if rows is not None and rows < tokenizer.vocab_size:
        message = f"the tokenizer has {tokenizer.vocab_size:,} tokens, but the model has `vocab_size` {rows:,}"
        raise Invalid("", message, help="use the tokenizer that the model was trained with")
    file = read_task_file(config.file)
    label = config.name or file.name
    if not re.fullmatch(TASK_NAME, label):
        message = f"the name of a task must have letters from a to z, digits and `_` only; got {quoted(label)}"
        raise Invalid("name", message, help="set `name` in the run: `tasks: [{file: ..., name: ...}]`")
    return encoded_task(file, label, tokenizer, first, max_len(graph))  # type: ignore[arg-type]  # objects are hashable


def check_length(run: Run, split: str, *path: str) -> None:
    """Raise SpecError if the examples of an evaluated split have more positions than the model takes.

    `Data.length` does not limit the rows of a split that is only evaluated.
    """
    limit, longest = max_len(run.graph), positions_of(run.data, split) + run.config.loss.further_positions
    if limit is not None and longest > limit:
        message = f"the examples of `{split}` have {longest:,} positions, but the model has max_len {limit:,}"
        raise run.error(message, *path, help=f"set `max_len` of the model, or evaluate splits without `{split}`")


def positions_of(data: Data, split: str) -> int:
    """Return the number of targets in the first example of a split; 1 for an example with a single target or none."""
    batch = data.examples(split, "sequential").batch(np.zeros(1, np.int64))
    return int(batch.ids[0].size) if batch.has_ids else 1


def _check_targets(run: Run) -> None:
    """Raise SpecError if the targets of some examples do not fit the logits of an output in the loss."""
    loss, graph, examples = run.config.loss, run.graph, run.data.examples("train", run.config.data.order)
    batch = examples.batch(np.arange(min(len(examples), run.config.batch.largest, SAMPLED)))
    if loss.predicts_targets and batch.targets is not None and not batch.has_ids:
        message = f"the loss `{loss.kind_name()}` needs targets that are ids; the data has real numbers"
        raise run.error(message, "loss", help="use a loss of real numbers, such as `loss: regression`")
    if loss.of_numbers and (batch.targets is None or batch.has_ids):
        message = f"the loss `{loss.kind_name()}` needs targets that are real numbers; the data has"
        help = "use data with real targets, such as `measured`"
        raise run.error(f"{message} {'ids' if batch.has_ids else 'no targets'}", "loss", help=help)
    for output, targets in batch.targets_of(loss.terms).items() if loss.predicts_targets and batch.has_ids else ():
        node = graph.node(output or graph.outputs[0])
        wires = [wire if isinstance(wire, list) else [wire] for wire in node.signals.values()]
        types = {signal.type for signals in wires for signal in signals}
        name, width, length = f"`{node.name}` of the model", node.output.width, node.output.length
        of_positions, largest = "sequence" in types, int(targets.max(initial=IGNORE_INDEX))
        if node.output.type != "logits" or not types & {"sequence", "vector"}:  # the loss reports it
            continue
        if of_positions != (targets.ndim == 2):
            has, returns = ("each position", "each example") if targets.ndim == 2 else ("each example", "each position")
            message = f"the data has a target for {has}, but {name} returns logits for {returns}"
            raise run.error(message, "data", help=FITS_POSITIONS if targets.ndim == 2 else FITS_EXAMPLES)
        if of_positions and length is not None and length != targets.shape[1]:
            message = f"the data has {targets.shape[1]:,} targets in each example, but {name} returns logits for"
            help = "use data with as many targets as the output has positions"
            raise run.error(f"{message} {length:,} positions", "data", help=help)
        if width is not None and largest >= width:
            size = "vocab_size" if getattr(run.data, "n_classes", None) is None else "n_classes"
            message = f"the data has the target {largest:,}, but {name} returns {width:,} logits"
            help = f"use a head of at least `data.{size}` logits in the run's `model`"
            raise run.error(message, "data", help=help)


def _check_loss(run: Run, batch: Batch) -> None:
    """Raise `Invalid` if the loss names unknown outputs or inputs, or if its targets do not fit the data."""
    loss, inputs, length = run.config.loss, run.graph.inputs, run.data.length
    tokens = [name for name, signal in inputs.items() if signal.type == "tokens" and name not in batch.inputs]
    for field, names, allowed in (("outputs", loss.terms, run.graph.outputs), ("ahead", loss.inputs_ahead, tokens)):
        if unknown := [name for name in names if name not in allowed]:
            role = "an output of the model" if field == "outputs" else "an input of tokens that the data lacks"
            message, near = f"`{unknown[0]}` is not {role}", similar_name_help("a name", unknown[0], allowed)
            raise Invalid(f"{field}.{unknown[0]}", message, notes=[f"names: {listing(allowed) or 'none'}"], help=near)
    lacking = {name: config.type for name, config in run.graph.spec.model.inputs.items() if name not in batch.inputs}
    for name, type_name in loss.fills.items():
        if lacking.get(name) != type_name:
            field = next((field for field in type(loss).model_fields if getattr(loss, field) == name), "")
            message = f"`{name}` must be an input of the model of type `{type_name}` that the data lacks"
            notes = [
                f"inputs that the data lacks: {listing([f'{key}: {of}' for key, of in lacking.items()]) or 'none'}"
            ]
            raise Invalid(field, message, notes=notes, help=similar_name_help("a name", name, lacking))
    for name, term in loss.terms.items():
        longest = 1 if batch.further_targets.get(name, batch.ids).ndim == 1 else length
        if term.shift > longest:
            message = f"`shift` must be at most {longest:,} for these targets; got {term.shift:,}"
            raise Invalid(f"outputs.{name}.shift", message)
    classes = getattr(run.data, "n_classes", None)
    if missing := [name for name in loss.terms if isinstance(classes, Mapping) and name not in classes]:
        raise Invalid(f"outputs.{missing[0]}", f"the data has no targets of `{missing[0]}`", help="add them to `data`")
    if unused := [name for name in batch.further_targets if name not in loss.terms]:
        raise Invalid(
            "", f"the data has targets of `{unused[0]}`, which is not in the loss", help="add it to `outputs`"
        )
