"""Evaluate trained models on the data of their runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.console.commands import command
from tfkit.console.options import allow_change_option, json_option
from tfkit.console.reader import Reader
from tfkit.errors import Diagnostic, SpecError, closest

if TYPE_CHECKING:
    from tfkit.component import MetricConfig
    from tfkit.graph.run import Run


@command(
    "eval",
    notes="""
    RUN is the folder of a run, whose latest checkpoint is evaluated, or a run with
    --weights. All of each split is read, every token once, in the same order: the
    result depends on nothing but the weights and the data.
    """,
    examples="""
    tfkit eval out
    tfkit eval out other --split val --metric bits_per_byte
    tfkit eval minigpt_relu --weights model.safetensors --json
    """,
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--weights", type=click.Path(path_type=Path), metavar="PATH", help="Safetensors, a file or folder.")
@allow_change_option
@click.option("--split", multiple=True, metavar="NAME", help="A split of the data; repeatable.  [default: val]")
@click.option("--metric", multiple=True, metavar="KIND", help="A number to compute; repeatable.  [default: the run's]")
@json_option
def eval_(
    reader: Reader,
    runs: tuple[str, ...],
    weights: Path | None,
    allow_change: bool,
    split: tuple[str, ...],
    metric: tuple[str, ...],
    json: bool,
) -> None:
    from tfkit.console import output as out
    from tfkit.graph.run import load_run
    from tfkit.spec.folder import WEIGHTS, has_weights, model_folder
    from tfkit.tools.cost.of_run import flops_of_step

    if weights is not None and len(runs) > 1:
        raise click.UsageError("--weights are those of one run")
    found: dict[str, dict[str, float]] = {}
    for name in runs:
        own = model_folder(Path(name)) if has_weights(Path(name)) else None
        if weights is None and own is None:
            raise SpecError(Diagnostic(f"`{name}` has no weights to evaluate", help="give them with --weights"))
        run = load_run(name, reader.plugins, sets=reader.sets, count=flops_of_step)
        path = weights if weights is not None else (own or Path()) / WEIGHTS
        with out.stages() as stage:
            stage(f"evaluating {name}")
            found[name] = _evaluate(reader, run, path, split, metric, allow_change=allow_change)
    if json:
        out.print_json(found)
        return
    names = list(dict.fromkeys(one for numbers in found.values() for one in numbers))
    rows = [(one, *(f"{numbers[one]:.4f}" if one in numbers else "-" for numbers in found.values())) for one in names]
    out.show(out.table(["", *found], rows, right=found))


def _evaluate(
    reader: Reader, run: Run, weights: Path, splits: tuple[str, ...], metrics: tuple[str, ...], *, allow_change: bool
) -> dict[str, float]:
    from tfkit.spec.run import SplitConfig
    from tfkit.tools.common.weights import build_with_weights
    from tfkit.training.evaluate import evaluate

    known = list(run.data.splits)
    for one in splits:
        if one not in known:
            raise SpecError(Diagnostic(f"there is no split `{one}`", notes=(f"splits: {', '.join(known)}",)))
    chosen = splits or tuple(one for one in known if one != "train") or ("train",)
    model = build_with_weights(run.graph, weights, device=run.config.machine.device, allow_change=allow_change)
    whole: dict[str, Any] = {one: SplitConfig(batches="all") for one in chosen}
    numbers = _metrics(reader, run, metrics)
    return evaluate(model, run.data, whole, numbers, sequences=run.config.batch.sequences)


def _metrics(reader: Reader, run: Run, names: tuple[str, ...]) -> tuple[MetricConfig, ...]:
    """The metrics of these kinds; those of the run, or the loss, unless given."""
    if not names and run.config.eval is not None:
        return run.config.eval.metrics
    kinds = reader.plugins.registry.kinds("metric")
    for name in names:
        if name not in kinds:
            near = closest(name, kinds)
            help = f"a metric with a similar name exists: `{near}`" if near else None
            raise SpecError(
                Diagnostic(f"there is no metric `{name}`", notes=(f"metrics: {', '.join(kinds)}",), help=help)
            )
    return tuple(kinds[name].config() for name in names or ("loss",))  # type: ignore[misc]
