"""Evaluate trained models on the data of their runs."""

from __future__ import annotations

from pathlib import Path

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


@command(
    "eval",
    section="Training",
    order=220,
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
@weights_option()
@allow_change_option
@click.option("--split", multiple=True, metavar="NAME", help="A split of the data; repeatable.  [default: val]")
@click.option("--metric", multiple=True, metavar="KIND", help="A metric to compute; repeatable.  [default: the run's]")
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
    from tfkit.run.checked_run import load_run
    from tfkit.run.run_code import warnings_about
    from tfkit.tools.cost.of_run import flops_of_step
    from tfkit.tools.eval_.evaluation import evaluate_run, weights_of

    if weights is not None and len(runs) > 1:
        raise click.UsageError("--weights cannot be combined with several runs")
    results: dict[str, dict[str, float]] = {}
    for name in runs:
        run = load_run(name, reader.plugins, sets=reader.sets, count=flops_of_step)
        path = weights_of(name, weights)
        print_warnings(warnings_about(path, run.graph.spec.model, run.config.data, run.config.eval))
        with stages() as stage:
            stage(f"evaluating {name}")
            results[name] = evaluate_run(run, path, reader.plugins, split, metric, allow_change=allow_change)
    if json:
        print_json(results)
        return
    names = list(dict.fromkeys(metric_name for numbers in results.values() for metric_name in numbers))
    rows = [
        (
            metric_name,
            *(f"{numbers[metric_name]:.4f}" if metric_name in numbers else "-" for numbers in results.values()),
        )
        for metric_name in names
    ]
    print_tables(table(["", *results], rows, right=results))
