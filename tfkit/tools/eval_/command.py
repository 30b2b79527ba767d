"""Evaluate trained models on the data of their runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfkit.commands import (
    Reader,
    allow_change_option,
    command,
    json_option,
    print_json,
    print_tables,
    print_warnings,
    stages,
    table,
    weights_option,
)
from tfkit.console import options

if TYPE_CHECKING:
    from rich.table import Table

    from tfkit.run.run_spec import TaskConfig
    from tfkit.tools.eval_.evaluation import Evaluation
    from tfkit.tools.eval_.questions import QuestionComparison


@command(
    "eval",
    section="Training",
    order=220,
    notes="""
    RUN is the folder of a run, whose latest checkpoint is evaluated, or a run with
    --weights. All of each split is read, every token once, in the same order: the
    result depends on nothing but the weights and the data. With --task, RUN may
    also be the folder of a model with a tokenizer. Of several models, each is
    compared to the first, question by question: `gained` counts the questions
    that only this model answers correctly, `lost` those that only the first does.
    """,
    examples="""
    tfkit eval out
    tfkit eval out other --split val --metric bits_per_byte
    tfkit eval minigpt_relu --weights model.safetensors --json
    tfkit eval out other --task agreement --task tasks/arithmetic.jsonl
    """,
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@weights_option()
@allow_change_option
@click.option("--split", multiple=True, metavar="NAME", help="A split of the data; repeatable.  [default: val]")
@click.option("--metric", multiple=True, metavar="KIND", help="A metric to compute; repeatable.  [default: the run's]")
@click.option(
    "--task", multiple=True, metavar="TASK", help="A task by its name or file; repeatable.  [default: the run's]"
)
@options.device_option("cpu, cuda or mps, for a model without a run.")
@json_option
def eval_(
    reader: Reader,
    runs: tuple[str, ...],
    weights: Path | None,
    allow_change: bool,
    split: tuple[str, ...],
    metric: tuple[str, ...],
    task: tuple[str, ...],
    device: str,
    json: bool,
) -> None:
    from tfkit.tools.eval_.evaluation import is_model, task_configs

    if weights is not None and len(runs) > 1:
        raise click.UsageError("--weights cannot be combined with several runs")
    models = [name for name in runs if task and is_model(name, reader.plugins)]
    if models and (split or metric):
        raise click.UsageError(f"--split and --metric must belong to runs; `{models[0]}` is a model")
    if device != "cpu" and len(models) < len(runs):
        raise click.UsageError("--device has no effect on a run: use --set machine.device=NAME")
    results: dict[str, Evaluation] = {}
    for name in runs:
        with_run = None if name in models else (split, metric)
        results[name] = _evaluation(
            reader, name, weights, task_configs(task), with_run, device, allow_change=allow_change
        )
    compared = _comparisons(results)
    if json:
        print_json(_json_data(results, compared))
        return
    names = list(dict.fromkeys(metric_name for evaluation in results.values() for metric_name in evaluation.numbers))
    rows = [(name, *(_number_text(evaluation, name) for evaluation in results.values())) for name in names]
    print_tables(table(["", *results], rows, right=results))
    if compared:
        click.echo(f"\ncompared to {runs[0]}, by the test of McNemar:\n")
        print_tables(*(_comparison_table(name, parts) for name, parts in compared.items()))


def _number_text(evaluation: Evaluation, name: str) -> str:
    """Return a metric with its standard error, `0.5450 ± 0.0353`; `-` if the evaluation lacks the metric."""
    if name not in evaluation.numbers:
        return "-"
    error = evaluation.errors.get(name)
    return f"{evaluation.numbers[name]:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _json_data(
    results: Mapping[str, Evaluation], compared: Mapping[str, Mapping[str, QuestionComparison]]
) -> dict[str, dict[str, object]]:
    """Return the numbers of each model, with standard errors and comparisons of its tasks."""
    data: dict[str, dict[str, object]] = {name: {**evaluation.numbers} for name, evaluation in results.items()}
    for name, evaluation in results.items():
        if evaluation.errors:
            data[name]["stderr"] = evaluation.errors
        if name in compared:
            data[name]["compared"] = {metric: vars(part) for metric, part in compared[name].items()}
    return data


def _evaluation(
    reader: Reader,
    name: str,
    weights: Path | None,
    tasks: tuple[TaskConfig, ...],
    of_run: tuple[tuple[str, ...], tuple[str, ...]] | None,
    device: str,
    *,
    allow_change: bool,
) -> Evaluation:
    """Evaluate a run on splits and metrics, `of_run`, and on tasks; or a model on tasks alone."""
    from tfkit.run.checked_run import load_run
    from tfkit.run.run_code import warnings_about
    from tfkit.tools.cost.of_run import flops_of_step
    from tfkit.tools.eval_.evaluation import evaluate_model, evaluate_run, weights_of

    if of_run is None:
        graph = reader.load(name)
        path = reader.weights(name, weights, allow_change=allow_change)
        with stages() as stage:
            stage(f"evaluating {name}")
            on = options.device_of(device)
            evaluation = evaluate_model(graph, path, reader.plugins, tasks, device=on, allow_change=allow_change)
    else:
        run = load_run(name, reader.plugins, sets=reader.sets, count=flops_of_step)
        path = weights_of(name, weights)
        print_warnings(warnings_about(path, run.graph.spec.model, run.config.data, run.config.eval))
        with stages() as stage:
            stage(f"evaluating {name}")
            evaluation = evaluate_run(run, path, reader.plugins, *of_run, tasks, allow_change=allow_change)
    for task in evaluation.tasks.values():
        if task.remark is not None:
            click.echo(f"warning: {task.name}: {task.remark}", err=True)
    return evaluation


def _comparisons(results: Mapping[str, Evaluation]) -> dict[str, dict[str, QuestionComparison]]:
    """Compare each model to the first model, in the accuracies on tasks with equal questions."""
    from tfkit.tools.eval_.questions import compare_questions

    first, *remaining = results.items()
    base = first[1]
    compared: dict[str, dict[str, QuestionComparison]] = {}
    for name, evaluation in remaining:
        for task, values in evaluation.answers.items():
            if task in base.tasks and base.tasks[task].file.digest == evaluation.tasks[task].file.digest:
                for metric in (name for name in values if name != "perplexity"):
                    part = compare_questions(values[metric], base.answers[task][metric])
                    compared.setdefault(name, {})[f"{task}.{metric}"] = part
    return compared


def _comparison_table(name: str, parts: Mapping[str, QuestionComparison]) -> Table:
    head = [name, "gained", "lost", "difference", "95% interval", "p"]
    rows = [
        [
            metric,
            f"{part.gained:,}",
            f"{part.lost:,}",
            f"{part.difference:+.3f}",
            f"{part.interval[0]:+.3f} .. {part.interval[1]:+.3f}",
            f"{part.p:.3f}",
        ]
        for metric, part in parts.items()
    ]
    return table(head, rows, right=head[1:])
