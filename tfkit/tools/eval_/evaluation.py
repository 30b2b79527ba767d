"""The numbers of trained weights on the data of their run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import torch
from torch import fx, nn

from tfkit.arguments import AnyPath, Sets, checked
from tfkit.building.instrument import instrument_model
from tfkit.commands import build_with_weights
from tfkit.decoding.text import load_tokenizer
from tfkit.errors import Diagnostic, Invalid, SpecError, quoted, similar_name_help
from tfkit.graph.expand import Graph, load
from tfkit.plugin.manager import Plugins, load_plugins
from tfkit.run.checked_run import Run, check_length, check_metrics, load_run, task_for
from tfkit.run.contract import LossConfig, MetricConfig, Tokenizer
from tfkit.run.run_spec import RunSpec, SplitConfig, TaskConfig
from tfkit.run.tasks import ContinuationScores, Task
from tfkit.run.training.checkpoint import LossState, loss_tensors
from tfkit.run.training.evaluate import evaluate_splits as numbers_of
from tfkit.run.training.guarded import guarded_component_call
from tfkit.run.training.memory import MicroBatch
from tfkit.run.training.task_scores import TaskScorer, evaluate_tasks, task_numbers
from tfkit.spec.folder import RUN, STATE, has_weights, model_folder
from tfkit.spec.header import read_object
from tfkit.spec.merge import as_changes
from tfkit.spec.messages import diagnostic_of
from tfkit.spec.provenance import Provenance
from tfkit.spec.read_document import is_document
from tfkit.tools.common.companions import END, Companions
from tfkit.tools.common.loading_weights import check_weights, tokenizer_beside
from tfkit.tools.cost.of_run import flops_of_step

if TYPE_CHECKING:
    from tfkit.run.tasks import Values

Names: TypeAlias = Annotated[Iterable[str], "a list of names"]


@dataclass(frozen=True)
class Evaluation:
    """The results of trained weights.

    Attributes:
        numbers: metrics by name, as `val.loss`.
        tasks: the tasks by name.
        answers: the values of the metrics of each task for each question, by the name of the task.
    """

    numbers: dict[str, float]
    tasks: dict[str, Task] = field(default_factory=dict)
    answers: dict[str, dict[str, Values]] = field(default_factory=dict)

    @property
    def errors(self) -> dict[str, float]:
        """The standard errors of accuracies by name, for tasks of several questions."""
        return {
            f"{task}.{metric}": float(part.std(ddof=1) / math.sqrt(len(part)))
            for task, values in self.answers.items()
            for metric, part in values.items()
            if metric != "perplexity" and len(part) > 1
        }

    @classmethod
    def of_tasks(
        cls, numbers: dict[str, float], tasks: Sequence[Task], scores: Mapping[str, ContinuationScores]
    ) -> Evaluation:
        """Return the numbers with the results of tasks, from the scores of each task by name."""
        by_name = {task.name: task for task in tasks}
        answers = {name: task.values(scores[name]) for name, task in by_name.items()}
        return cls(numbers | task_numbers(tasks, scores), by_name, answers)


@checked
def evaluate(
    run: AnyPath,
    *,
    splits: Names = (),
    metrics: Names = (),
    tasks: Names = (),
    weights: AnyPath | None = None,
    allow_change: bool = False,
    sets: Sets = (),
) -> dict[str, float]:
    """Compute the metrics of trained weights on each split in full: every token once, in the same order.

    Args:
        run: the folder of a run, whose latest checkpoint is evaluated; or a run, with `weights`. With `tasks`, also
            the folder of a model with a tokenizer.
        splits: names of splits; all but `train` unless given.
        metrics: kinds of metrics, such as `bits_per_byte`; by default the metrics of the run.
        tasks: names or files of tasks, such as `agreement`. Without `splits` and `metrics`, only they are evaluated.
        weights: safetensors, a file or a folder.
        allow_change: accept weights whose file states that they belong to a model with other values, or that were
            changed after a run wrote them.
        sets: changes of the run, as `tfkit.load` takes them.

    Returns:
        Numbers by name, as `val.loss` and `agreement.acc`.

    Raises:
        SpecError: the run or its weights cannot be read or do not fit, or a split, a metric or a task is unknown.
    """
    plugins = load_plugins()
    file, configs = None if weights is None else Path(weights), task_configs(tasks)
    if configs and is_model(run, plugins):
        if splits or metrics:
            raise ValueError("splits and metrics must belong to a run; got a model")
        graph = load(run, sets=sets, plugins=plugins)
        return evaluate_model(graph, file or graph.weights, plugins, configs, allow_change=allow_change).numbers
    loaded = load_run(run, plugins, sets=as_changes(sets), count=flops_of_step)
    path = weights_of(run, file)
    evaluation = evaluate_run(loaded, path, plugins, tuple(splits), tuple(metrics), configs, allow_change=allow_change)
    return evaluation.numbers


def task_configs(names: Iterable[str]) -> tuple[TaskConfig, ...]:
    """Return the tasks with these names or paths. Relative paths start at the current folder."""
    return tuple(TaskConfig(file=name).located(Path()) for name in names)


def is_model(name: AnyPath, plugins: Plugins) -> bool:
    """Return True for a model, its folder or its spec, and False for a run and its folder."""
    if os.path.isdir(name):
        return not os.path.isfile(Path(name) / RUN)
    return not is_document(str(name), RunSpec, plugins.specs)


def weights_of(name: AnyPath, weights: Path | None) -> Path:
    """Return `weights`, or the latest checkpoint in the folder of a run; raise SpecError if there are no weights."""
    if weights is not None:
        return weights
    if not has_weights(Path(name)):
        raise SpecError(Diagnostic(f"`{name}` has no weights to evaluate", help="pass the weights with --weights"))
    return model_folder(Path(name))


def evaluate_run(
    run: Run,
    weights: Path,
    plugins: Plugins,
    splits: tuple[str, ...],
    metrics: tuple[str, ...],
    tasks: tuple[TaskConfig, ...] = (),
    *,
    allow_change: bool,
) -> Evaluation:
    """Compute the metrics of a loaded run; see `evaluate`. Without any choice, its tasks are evaluated as well."""
    available = list(run.data.splits)
    for name in splits:
        if name not in available:
            raise SpecError(Diagnostic(f"there is no split `{name}`", notes=(f"splits: {', '.join(available)}",)))
    chosen = splits or tuple(name for name in available if name != "train") or ("train",)
    if only_tasks := bool(tasks and not splits and not metrics):
        chosen = ()
    for name in chosen:
        check_length(run, name)
    configs = () if only_tasks else _metric_configs(plugins, run, metrics)
    check_metrics(run, configs)
    of_run = () if tasks or splits or metrics else run.tasks
    all_tasks = of_run or _distinct_tasks([run.task_of(config) for config in tasks])
    _check_unchanged(weights, allow_change=allow_change)
    run = run.with_changes(run.values_at(_step_of_weights(weights, run)))
    model = build_with_weights(run.graph, weights, device=run.config.machine.device, allow_change=allow_change)
    instrument_model(model)
    full = {name: SplitConfig(batches="all") for name in chosen}
    loss = _trained_loss(run, model, weights) if any(config.objective for config in configs) else None
    numbers = numbers_of(model, run, full, configs, loss=loss)
    scores = evaluate_tasks(model, run, all_tasks, micro_batch=MicroBatch(run))
    return Evaluation.of_tasks(numbers, all_tasks, scores)


POSITIONS = 4096
"""Number of positions in one forward pass of a model without a run."""


def evaluate_model(
    graph: Graph,
    weights: Path | None,
    plugins: Plugins,
    tasks: tuple[TaskConfig, ...],
    *,
    device: torch.device | str = "cpu",
    allow_change: bool = False,
) -> Evaluation:
    """Evaluate the weights of a model on tasks, with the tokenizer in the folder of the weights."""
    if weights is None:
        raise SpecError(
            Diagnostic(f"{quoted(graph.name)} has no weights to evaluate", help="pass the weights with --weights")
        )
    weights = model_folder(weights)
    file = tokenizer_beside(weights)
    companions = Companions.read(weights, graph.spec.family)
    first = next(iter((*companions.ids("bos_token_id"), *companions.ids(END))), None)
    loss = plugins.registry.kinds("loss")["cross_entropy"].config()
    assert isinstance(loss, LossConfig)
    tokenizer: Tokenizer | None = None if file is None else load_tokenizer(file)  # type: ignore[assignment]
    try:
        all_tasks = _distinct_tasks([task_for(config, graph, tokenizer, first, loss) for config in tasks])
    except Invalid as error:
        raise SpecError(diagnostic_of(error, (), Provenance())) from error
    _check_unchanged(weights, allow_change=allow_change)
    model = build_with_weights(graph, weights, device=device, allow_change=allow_change)
    instrument_model(model)
    scorer = TaskScorer(model, loss)
    scores = {task.name: scorer.scores(task, lambda compute: compute(POSITIONS)) for task in all_tasks}
    return Evaluation.of_tasks({}, all_tasks, scores)


def _check_unchanged(weights: Path, *, allow_change: bool) -> None:
    """Raise SpecError if weights have changed since a run wrote them."""
    if not allow_change:
        check_weights(weights)


def _distinct_tasks(tasks: list[Task]) -> tuple[Task, ...]:
    """Return the tasks; raise SpecError if two have the same name."""
    names = [task.name for task in tasks]
    if twice := next((name for index, name in enumerate(names) if name in names[:index]), None):
        raise SpecError(Diagnostic(f"the tasks must have different names; got {quoted(twice)} twice"))
    return tuple(tasks)


def _step_of_weights(weights: Path, run: Run) -> int:
    """Return the step of a checkpoint, whose numbers may change by step; for other weights, the last step."""
    step = read_object(weights / STATE).get("step") if (weights / STATE).is_file() else None
    return min(step, run.steps) if isinstance(step, int) else run.steps


def _trained_loss(run: Run, model: fx.GraphModule, weights: Path) -> nn.Module:
    """Build the loss of a run, with its state from the checkpoint; raise SpecError if only a checkpoint has it."""
    config = run.config.loss
    with guarded_component_call(run, model, config, "`build`", "loss"):
        loss = config.build(model)
    tensors = loss_tensors(weights)
    try:
        LossState(loss, model, config).restore(tensors, branch=False)
    except ValueError as error:
        message = f"the loss `{config.kind_name()}` has a state, which must come from a checkpoint of the run: {error}"
        raise SpecError(Diagnostic(message, help="evaluate the folder of the run, without --weights")) from error
    return loss


def _metric_configs(plugins: Plugins, run: Run, names: tuple[str, ...]) -> tuple[MetricConfig, ...]:
    """Return the metrics of these kinds; by default the metrics of the run, else the loss."""
    if not names and run.config.eval is not None:
        return run.config.eval.metrics
    kinds = plugins.registry.kinds("metric")
    for name in names:
        if name not in kinds:
            help, notes = similar_name_help("a metric", name, kinds), (f"metrics: {', '.join(kinds)}",)
            raise SpecError(Diagnostic(f"there is no metric `{name}`", notes=notes, help=help))
    return tuple(kinds[name].config() for name in names or ("loss",))  # type: ignore[misc]
