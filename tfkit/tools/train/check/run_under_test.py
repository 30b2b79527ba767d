"""A run that is checked: its reduced run, the first examples of its data, and its training steps."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, fx, nn

from tfkit.building.builder import build
from tfkit.checkpoint.adapters import Matrices, Matrix
from tfkit.checkpoint.selection import is_match, matches_any
from tfkit.component import Component, FieldPath, leaf_values, with_values
from tfkit.errors import Diagnostic, Invalid, SpecError
from tfkit.graph.expand import Graph
from tfkit.plugin.manager import Plugins
from tfkit.reference import Kinds
from tfkit.reference.training import OF_RUNS
from tfkit.run.checked_run import Run, check_run, positions_of
from tfkit.run.contract import Batch, Callback, CallbackConfig, Data, Examples, Ids, LossSum, Order, Training
from tfkit.run.guarded_data import GuardedData
from tfkit.run.run_spec import ENDS, AdaptersConfig, EvalConfig, RunSpec, SavingConfig, SplitConfig
from tfkit.run.step_values import listed_values
from tfkit.run.training.adapters import checkpoint_tensors, chosen_matrices, insert_adapters
from tfkit.run.training.checkpoint import Checkpoint, Restored
from tfkit.run.training.loop import Trainer
from tfkit.run.training.processes import Processes
from tfkit.run.training.start import freeze_parameters
from tfkit.spec.messages import fault_in
from tfkit.spec.provenance import Provenance
from tfkit.tools.check.components import required_values
from tfkit.tools.check.model_under_test import ModelUnderTest, redraw_parameters, reference_functions
from tfkit.tools.check.reduced import reduced_model

STEPS, SEQUENCES, LENGTH, EXAMPLES = 6, 4, 12, 10
"""Sizes of a reduced run: steps, sequences per step, positions of a sequence if a run sets them, examples per split."""
Tensors = Mapping[str, Tensor]
Change = Callable[[Batch, Ids], Batch]
"""Changes a batch, which it gets with the indices of its examples."""


@dataclass(frozen=True)
class RunUnderTest:
    """A run that is checked.

    Attributes:
        full: the run as it was read; its schedule and the number of its steps are checked.
        run: its reduced run, which is trained.
        plugins: the plugins with which it was read.
        words: a summary of the reduced run.
        seed: of random gradients.
        kinds: reference functions of kinds, in addition to the functions of `tfkit.reference`.
    """

    full: Run
    run: Run
    plugins: Plugins
    words: str = ""
    seed: int = 0
    kinds: Kinds | None = None
    of: ClassVar[Literal["run"]] = "run"
    loaded: dict[str, Data] = field(default_factory=dict, repr=False)
    """Data by its config."""

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.full.config.name

    @property
    def graph(self) -> Graph:
        """The model of the full run."""
        return self.full.graph

    @property
    def notes(self) -> Sequence[Diagnostic]:
        """Warnings about the run."""
        return self.full.file.notes

    @cached_property
    def functions(self) -> Kinds:
        """The reference functions of the slots of a run, by slot and kind."""
        further = reference_functions(self.plugins, self.kinds or {})
        return {slot: {**functions, **further.get(slot, {})} for slot, functions in OF_RUNS.items()}

    @cached_property
    def of_model(self) -> ModelUnderTest:
        """The model of the reduced run."""
        return ModelUnderTest(self.run.graph, self.plugins, self.seed)

    def small_configs(self, slot: str) -> Iterator[Component]:
        """Yield a config of each kind of a slot whose required fields are only small numbers."""
        for registered in self.plugins.registry.kinds(slot).values():
            with suppress(ValueError, Invalid):
                yield registered.config.model_validate(required_values(registered.config))

    @cached_property
    def callbacks(self) -> tuple[CallbackConfig, ...]:
        """The callbacks of the run, and a callback of each other kind that has no required fields and can start."""
        configs = [*self.run.config.callbacks]
        kinds = {config.kind_name() for config in configs}
        for config in self.small_configs("callback"):
            if config.kind_name() not in kinds and isinstance(config, CallbackConfig):
                with suppress(SpecError):
                    train_reduced_run(self.changed({("callbacks",): (config,)}), until=2)
                    configs.append(config)
        return tuple(configs)

    def changed(
        self,
        values: Mapping[FieldPath, Any],
        *,
        graph: Graph | None = None,
        examples: int = EXAMPLES,
        change: Change | None = None,
    ) -> Run:
        """Return the reduced run with some values replaced; raise ValueError or SpecError if they are invalid.

        Args:
            values: the values by their paths.
            graph: a different model.
            examples: the number of examples of each split.
            change: a function that changes every batch.
        """
        config = with_values(self.run.config, values)
        data = FirstExamples(self._data(config), examples, change)
        graph = graph or self.run.graph
        # A property that sets a number tests this number in all steps.
        old, new = _numbers_of(self.run.config, self.run.graph), _numbers_of(config, graph)
        changing = {path: name for path, name in self.run.file.changing.items() if new.get(path) == old[path]}
        changes = {".".join(path): config.by_step[".".join(path)] for path in changing}
        config = config.model_copy(update={"by_step": changes})
        return replace(self.run, file=replace(self.run.file, config=config, data=data, changing=changing), graph=graph)

    def _data(self, config: RunSpec) -> Data:
        key = f"{config.data!r} {config.batch.longest}"
        if key not in self.loaded:
            self.loaded[key] = read_data(config)
        return self.loaded[key]

    def new_model(self) -> fx.GraphModule:
        """Return the model in float64 with random weights. Weights that the run freezes stay frozen."""
        return copy.deepcopy(self._model)

    @cached_property
    def _model(self) -> fx.GraphModule:
        model = build(self.run.graph, seed=self.seed)
        insert_adapters(model, self.run)
        model = redraw_parameters(model, self.seed).double()
        if self.run.config.freeze:
            freeze_parameters(model, self.run.config.freeze)
        return model


def read_data(config: RunSpec) -> Data:
    """Read the data of a run whose paths are absolute."""
    fault = fault_in(type(config.data), ("data",), Provenance())
    return GuardedData(config.data.build(config.batch.longest), fault)


@dataclass(frozen=True)
class FirstExamples:
    """Data with only the first examples of each split."""

    data: Data
    count: int
    change: Change | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)

    def examples(self, split: str, order: Order) -> Examples:
        """Return the first examples of a split."""
        return _FirstExamples(self.data.examples(split, order), self.count, self.change)


@dataclass(frozen=True)
class _FirstExamples:
    all: Examples
    count: int
    change: Change | None

    def __len__(self) -> int:
        return min(self.count, len(self.all))

    def batch(self, indices: Ids) -> Batch:
        batch = self.all.batch(indices)
        return batch if self.change is None else self.change(batch, indices)


# ---- the reduced run ----


def reduced_run(full: Run, plugins: Plugins, seed: int = 0, kinds: Kinds | None = None) -> RunUnderTest:
    """Reduce a run: its model, the sequences of a step, their length, and the number of steps.

    Initial weights are random. Rules and patterns without a match in the reduced model are omitted. The factors of a
    parametrization are values of its model, and its settings are the settings at the base sizes.
    """
    config = full.config
    length, data = _small_data(full)
    changes: dict[str, Any] = dict.fromkeys((*ENDS, "weights", "branch")) | {"steps": STEPS}
    # Properties of a step are measured in the first.
    batch = {"sequences": _small_change(config.batch.sequences, SEQUENCES, SEQUENCES // 2), "length": length}
    if length is not None:
        batch["length"] = _small_change(config.batch.length, length, max(length // 2, 1))
    changes["batch"] = config.batch.model_copy(update=batch)
    changes["machine"] = type(config.machine)()
    changes["checkpoint"] = SavingConfig(every=1)
    changes["parametrization"] = plugins.registry.kinds("parametrization")["standard"].config()
    changes["eval"] = _small_evaluation(config, plugins)
    small = config.model_copy(update=changes)
    graph, words = _reduced_graph(full, data, plugins)
    outline = build(graph, device="meta")
    small = small.model_copy(update={"adapters": _small_adapters(config, outline)})
    file = replace(full.file, config=small, data=FirstExamples(data, EXAMPLES), written=None, base=None, changing={})
    insert_adapters(outline, replace(full, file=file, graph=graph))
    small = small.model_copy(update=_matching_patterns(small, outline))
    small = small.model_copy(update={"by_step": _small_numbers(full, _numbers_of(small, graph))})
    changing = {path: name for path, name in full.file.changing.items() if ".".join(path) in small.by_step}
    run = replace(full, file=replace(file, config=small, changing=changing), graph=graph)
    run = run.with_changes({path: max(values.values) for path, values in run.by_step.items()})
    sizes = f"{SEQUENCES} of {config.batch.largest} sequences"
    words = ", ".join([sizes, *([f"{length} of {config.batch.longest} positions"] if length else []), words])
    subject = RunUnderTest(full, run, plugins, words.rstrip(", "), seed, kinds)
    subject.loaded[f"{small.data!r} {small.batch.longest}"] = data
    return subject


def _small_change(value: Any, first: Any, second: Any) -> Any:
    """Return a number of a reduced run, which changes in the middle if the number of the run changes."""
    return {"at": {"0": first, str(STEPS // 2): second}} if isinstance(value, Mapping) else first


def _small_numbers(full: Run, values: Mapping[FieldPath, Any]) -> dict[str, Any]:
    """Return the changes by step of a reduced run with these values. They begin with the largest value."""
    changes = {}
    for path in full.file.changing:
        value, change = values.get(path), full.config.by_step[".".join(path)]
        if value is not None:
            listed = listed_values(change)
            ends = (value + 1, value) if isinstance(value, int) else (max(listed), min(listed))
            changes[".".join(path)] = _small_change(change, *ends)
    return changes


def _numbers_of(config: RunSpec, graph: Graph) -> dict[FieldPath, Any]:
    """Return the values of a loss and of a model by their paths."""
    return {**dict(leaf_values(config.loss, ("loss",))), **dict(leaf_values(graph.spec.model, ("model",)))}


def _small_data(full: Run) -> tuple[int | None, Data]:
    """Return the length of sequences in a reduced run, enough for all evaluated rows, and data of that length.

    The length is None if a run does not set it.
    """
    config, length = full.config, full.config.batch.longest
    if length is None or length <= LENGTH:
        return length, full.data

    def data_of(length: int) -> Data:
        return read_data(config.model_copy(update={"batch": config.batch.model_copy(update={"length": length})}))

    try:
        data = data_of(LENGTH)
        longest = min(length, max(positions_of(data, split) for split in data.splits))
        return (LENGTH, data) if longest <= LENGTH else (longest, data_of(longest))
    except Invalid:  # data of rows that are longer, which the run reports as errors
        return length, full.data


def _small_evaluation(config: RunSpec, plugins: Plugins) -> EvalConfig:
    """Return an evaluation of a split, with the metrics of the run if it has an evaluation."""
    names = [*config.eval.splits] if config.eval is not None else [*config.data.split_names]
    split = {next((name for name in names if name != "train"), "train"): SplitConfig(batches=1)}
    if config.eval is not None:  # the property `metrics` evaluates the tasks of the full run
        return config.eval.model_copy(update={"every": 2, "splits": split, "tasks": ()})
    kind = "loss" if config.loss.predicts_targets else "objective"
    metric = plugins.registry.kinds("metric")[kind].config
    return EvalConfig.model_validate({"every": 2, "splits": split, "metrics": (metric(),)})


def _reduced_graph(full: Run, data: Data, plugins: Plugins) -> tuple[Graph, str]:
    """Return the reduced model of a run, or its model if the reduced model cannot be trained on the data."""
    classes = getattr(data, "n_classes", None)
    numbers = classes.values() if isinstance(classes, Mapping) else [classes or 0]
    try:
        tokens = max(data.vocab_size, *numbers)
        reduced = reduced_model(full.graph, plugins, tokens=tokens, length=data.length)
        check_run(replace(full.file, model=reduced.graph.spec, data=data))
    except (SpecError, ValueError):
        return replace(full.graph, hooks=None), ""
    return reduced.graph, reduced.words


def _small_adapters(config: RunSpec, model: fx.GraphModule) -> AdaptersConfig | None:
    """Return the adapters of a run with the targets that match a layer of a model, and at most a rank that fits all.

    Properties switch dropout off in the model of a run; adapters have none.
    """
    if config.adapters is None:
        return None
    targets, matrices = dict[str, list[Matrix]](), Matrices.of(model)
    for target in config.adapters.targets:
        with suppress(Invalid):
            changes = {"targets": (target,), "rank": 1}
            targets[target] = [*chosen_matrices(matrices, config.adapters.model_copy(update=changes), model)]
    smallest = min(min(matrix.shape) for chosen in targets.values() for matrix in chosen)
    changes = {"targets": tuple(targets), "rank": min(config.adapters.rank, smallest), "start": None, "dropout": 0.0}
    return config.adapters.model_copy(update=changes)


def _matching_patterns(config: RunSpec, model: fx.GraphModule) -> dict[str, Any]:
    """Return the patterns of a run that match a parameter of a model."""
    names = [name for name, _ in model.named_parameters()]
    frozen = tuple(pattern for pattern in config.freeze if any(matches_any(name, [pattern]) for name in names))
    rules = tuple(rule for rule in config.optimizer.groups if any(is_match(name, rule.match) for name in names))
    return {"freeze": frozen, "optimizer": config.optimizer.model_copy(update={"groups": rules})}


# ---- steps ----


@dataclass
class Notes:
    """A run record in memory, which starts from a checkpoint if there is one."""

    start: Restored | None = None
    lines: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    """The step, and its numbers and texts."""
    checkpoints: list[Restored] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """The number of lines before each checkpoint."""

    def restored(self, model: fx.GraphModule) -> Restored | None:
        return self.start

    def resume(self) -> None: ...

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.lines.append((step, dict(numbers)))

    def text(self, step: int, name: str, text: str) -> None:
        self.lines.append((step, {name: text}))

    def save(self, checkpoint: Checkpoint) -> None:
        weights, optimizer, tensors = map(
            copied_tensors, (checkpoint_tensors(checkpoint.model), checkpoint.optimizer, checkpoint.tensors)
        )
        rest = checkpoint.callbacks, checkpoint.ended, checkpoint.skipped, tensors
        self.checkpoints.append(Restored(checkpoint.step, weights, optimizer, *rest))
        self.positions.append(len(self.lines))

    def saving(self) -> Callable[[Checkpoint], None]:
        return self.save

    def shards(self) -> AbstractContextManager[Path]:
        raise AssertionError("a single process saves no shards")

    def save_model(self, name: str, model: fx.GraphModule) -> None: ...

    def close(self) -> None: ...


def copied_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """Return copies of tensors."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@dataclass
class TrainedSteps:
    """The observed steps of a run.

    Attributes:
        notes: its record.
        gradients: the gradients of each step, as the optimizer gets them.
        rates: the learning rates of the optimizer's groups at each step.
        parts: the losses of each step, a tensor for each micro-batch.
        arguments: the inputs and targets of each micro-batch of all steps.
        weights: after each step.
        first_rates: the learning rates of the groups before the first step.
        hidden: tensors of the loss after the last step that no module lists.
        counts_itself: True if the loss returns its count.
    """

    notes: Notes
    first_rates: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    parts: list[list[Tensor]] = field(default_factory=lambda: [[]])
    arguments: list[tuple[Tensors, Any]] = field(default_factory=list)
    weights: list[Tensors] = field(default_factory=list)
    hidden: Tensors = field(default_factory=dict)
    counts_itself: bool = False

    def numbers(self, name: str) -> list[float]:
        """Return the values of a logged number at all steps."""
        return [line[name] for _, line in self.notes.lines if name in line]


class _Watcher(Callback):
    def __init__(self, steps: TrainedSteps) -> None:
        self._steps = steps

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        self._steps.weights.append(copied_tensors(dict(training.model.named_parameters())))
        self._steps.parts.append([])


def train_reduced_run(
    run: Run, *, until: int | None = None, start: Restored | None = None, processes: Processes | None = None
) -> TrainedSteps:
    """Train a reduced run from its first step or from a checkpoint, and return the observed steps."""
    steps = TrainedSteps(Notes(start))
    trainer = Trainer(run, steps.notes, watchers=[_Watcher(steps)], until=until, processes=processes)
    steps.first_rates = [group["lr"] for group in trainer.optimizer.param_groups]

    def before(optimizer: torch.optim.Optimizer, *_args: Any) -> None:
        gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
        steps.gradients.append(copied_tensors(gradients))
        steps.rates.append([group["lr"] for group in optimizer.param_groups])

    trainer.optimizer.register_step_pre_hook(before)
    loss: nn.Module = trainer.loss  # type: ignore[assignment]  # compiled, it would be a function

    def after(_module: nn.Module, _args: object, result: Any) -> None:
        total = result.total if isinstance(result, LossSum) else result
        steps.counts_itself = isinstance(result, LossSum) and result.count is not None
        steps.parts[-1].append(total.detach().clone())

    loss.register_forward_hook(after)
    loss.register_forward_pre_hook(lambda _module, args: steps.arguments.append(args))
    trainer.train()
    listed = (*trainer.model.modules(), *trainer.model.parameters(), *loss.state_dict(keep_vars=True).values())
    steps.hidden = dict(_tensors_in(loss, {id(value) for value in listed}))
    return steps


_MODULE = frozenset(vars(nn.Module()))
"""Attributes of every module, which hold its parameters, buffers and submodules, and its hooks."""


def _tensors_in(loss: nn.Module, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a loss refers to, by the path of attributes and keys. `seen` has ids to skip."""
    values: list[tuple[str, object]] = [("", loss)]
    while values:
        path, value = values.pop()
        if id(value) in seen or isinstance(value, type | FunctionType | ModuleType | Component | Graph | fx.Graph):
            continue
        seen.add(id(value))
        inside: Mapping[Any, object] = {}
        if isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, nn.Module):
            registered = {**dict(value.named_parameters(recurse=False)), **dict(value.named_buffers(recurse=False))}
            further = {name: entry for name, entry in vars(value).items() if name not in _MODULE}
            inside = {**registered, **dict(value.named_children()), **further}
        elif isinstance(value, Mapping):
            inside = value
        elif isinstance(value, list | tuple | set | deque):
            inside = dict(enumerate(value))
        else:
            inside = vars(value) if type(value).__dictoffset__ else {}
        values += [(f"{path}.{name}".lstrip("."), entry) for name, entry in reversed(list(inside.items()))]


class Half(Processes):
    """The first or the second of two simulated processes, each with half of the sequences.

    The sum of a count over both processes is known in advance. A loss is returned without the other process's part.

    Attributes:
        share: the count of a loss that counts for itself; None if it does not.
    """

    count = 2

    def __init__(self, rank: int, counts: Collection[int] = ()) -> None:
        self.rank, self._counts = rank, tuple(counts)
        self.share: float | None = None

    def rows(self, indices: Ids) -> Ids:
        size = math.ceil(len(indices) / self.count)
        return indices[self.rank * size : (self.rank + 1) * size]

    def sum(self, value: Tensor) -> Tensor:
        if value.dtype == torch.float64 and value.dim() == 0:
            self.share = float(value)
        return value if value.is_floating_point() or not self._counts else torch.tensor(self._counts)
