"""The numbers of trained weights on the data of their run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeAlias

from torch import fx, nn

from tfkit.arguments import AnyPath, Sets, checked
from tfkit.building.instrument import instrument_model
from tfkit.commands import build_with_weights
from tfkit.errors import Diagnostic, SpecError, similar_name_help
from tfkit.plugin.manager import Plugins, load_plugins
from tfkit.run.checked_run import Run, check_length, check_metrics, load_run
from tfkit.run.contract import MetricConfig
from tfkit.run.run_spec import SplitConfig
from tfkit.run.training.checkpoint import LossState, loss_tensors
from tfkit.run.training.evaluate import evaluate_splits as numbers_of
from tfkit.run.training.guarded import guarded_component_call
from tfkit.spec.folder import STATE, has_weights, model_folder
from tfkit.spec.header import read_object
from tfkit.spec.merge import as_changes
from tfkit.tools.common.loading_weights import check_weights
from tfkit.tools.cost.of_run import flops_of_step

Names: TypeAlias = Annotated[Iterable[str], "a list of names"]


@checked
def evaluate(
    run: AnyPath,
    *,
    splits: Names = (),
    metrics: Names = (),
    weights: AnyPath | None = None,
    allow_change: bool = False,
    sets: Sets = (),
) -> dict[str, float]:
    """Compute the metrics of trained weights on each split in full: every token once, in the same order.

    Args:
        run: the folder of a run, whose latest checkpoint is evaluated; or a run, with `weights`.
        splits: names of splits; all but `train` unless given.
        metrics: kinds of metrics, such as `bits_per_byte`; by default the metrics of the run.
        weights: safetensors, a file or a folder.
        allow_change: accept weights whose file states that they belong to a model with other values, or that were
            changed after a run wrote them.
        sets: changes of the run, as `tfkit.load` takes them.

    Returns:
        Numbers by name, as `val.loss`.

    Raises:
        SpecError: the run or its weights cannot be read or do not fit, or a split or a metric is unknown.
    """
    plugins = load_plugins()
    file = None if weights is None else Path(weights)
    loaded = load_run(run, plugins, sets=as_changes(sets), count=flops_of_step)
    path = weights_of(run, file)
    return evaluate_run(loaded, path, plugins, tuple(splits), tuple(metrics), allow_change=allow_change)


def weights_of(name: AnyPath, weights: Path | None) -> Path:
    """Return `weights`, or the latest checkpoint in the folder of a run; raise SpecError if there are no weights."""
    if weights is not None:
        return weights
    if not has_weights(Path(name)):
        raise SpecError(Diagnostic(f"`{name}` has no weights to evaluate", help="pass the weights with --weights"))
    return model_folder(Path(name))


def evaluate_run(
    run: Run, weights: Path, plugins: Plugins, splits: tuple[str, ...], metrics: tuple[str, ...], *, allow_change: bool
) -> dict[str, float]:
    """Compute the metrics of a loaded run; see `evaluate`."""
    available = list(run.data.splits)
    for name in splits:
        if name not in available:
            raise SpecError(Diagnostic(f"there is no split `{name}`", notes=(f"splits: {', '.join(available)}",)))
    chosen = splits or tuple(name for name in available if name != "train") or ("train",)
    for name in chosen:
        check_length(run, name)
    configs = _metric_configs(plugins, run, metrics)
    check_metrics(run, configs)
    if not allow_change:
        check_weights(weights)
    run = run.with_changes(run.values_at(_step_of_weights(weights, run)))
    model = build_with_weights(run.graph, weights, device=run.config.machine.device, allow_change=allow_change)
    instrument_model(model)
    full = {name: SplitConfig(batches="all") for name in chosen}
    loss = _trained_loss(run, model, weights) if any(config.objective for config in configs) else None
    return numbers_of(model, run, full, configs, loss=loss)


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
