"""Train variants of a run on the same seeds, and compare them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from tfkit.commands import Decorator, FiniteRange, Reader, command, count_option, forms_option, json_option
from tfkit.console.completion import complete_document

if TYPE_CHECKING:
    from tfkit.run.sweep_spec import CompareConfig
    from tfkit.tools.sweep.result import Results
    from tfkit.tools.sweep.sweep import Outline, Sweep


def metric_options(help: str, *, default: str | None = None) -> Decorator:
    """Declare the options `--on`, `--better` and `--margin`: a metric, its direction, and the relevant difference."""
    on = click.option("--on", default=default, show_default=True, metavar="METRIC", help=help)
    words = "lower or higher.  [default: lower, for a loss]"
    better = click.option("--better", type=click.Choice(["lower", "higher"]), metavar="WORD", help=words)
    words = "The difference that begins to matter."
    margin = click.option("--margin", type=FiniteRange(0, min_open=True), metavar="X", help=words)
    return lambda function: on(better(margin(function)))


def comparison_of(on: str, better: Literal["lower", "higher"] | None, margin: float | None) -> CompareConfig:
    """Return the comparison that the options describe; a metric without a known direction is a usage error."""
    from tfkit.run.sweep_spec import LOWER_IS_BETTER, CompareConfig

    if better is None and on.rpartition(".")[2] not in LOWER_IS_BETTER:
        raise click.UsageError(f"`{on}` has no known direction: add --better lower or --better higher")
    return CompareConfig(on=on, better=better, margin=margin)


@command(
    "sweep",
    section="Training",
    order=230,
    notes="""
    SWEEP is a YAML file, or the name of a sweep that comes with tfkit. Each run
    is in DIR/runs, named after the digest of its settings. The same command
    trains only the missing runs: after an interruption, or for a new variant.
    Several sweeps may share a DIR. --set changes the base run of all variants;
    --on compares a different metric of the same runs, and does not repeat tuning.
    --commands prints the commands that train the missing runs, each on a line,
    for a job array or `xargs -P`: in any order, on machines that share DIR.
    DIR/report.html shows curves, differences, pictures and costs. If the code
    of a kind has changed, runs with its previous code are an error;
    --allow-change accepts them.

    Exit status: 0; 1 if the sweep is invalid, or one of its runs failed. A run
    that diverged is a result.
    """,
    examples="""
    tfkit sweep swiglu --plan
    tfkit sweep swiglu -o out --jobs 2
    tfkit sweep swiglu -o out --commands | xargs -P 2 -I{} sh -c {}
    tfkit sweep my_sweep.yaml --set steps=200 --markdown
    tfkit sweep my_sweep.yaml --so-far --on val.accuracy --better higher
    """,
)
@click.argument("sweep", shell_complete=complete_document("sweep"))
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="The sweep's folder.  [default: sweeps/NAME]",
)
@count_option("--jobs", "Parallel runs, each on its own GPU.", default=1)
@click.option("--plan", is_flag=True, help="Print the runs and their costs; train nothing.")
@click.option("--commands", is_flag=True, help="Print the commands that train the missing runs; train nothing.")
@click.option("--so-far", is_flag=True, help="Compare the finished runs; train nothing.")
@click.option("--allow-change", is_flag=True, help="Accept runs although the code of their kinds has changed.")
@metric_options("The metric to compare.  [default: the metric of SWEEP]")
@forms_option
@json_option
def sweep(
    reader: Reader,
    sweep: str,
    output: Path | None,
    jobs: int,
    plan: bool,
    commands: bool,
    so_far: bool,
    allow_change: bool,
    on: str | None,
    better: Literal["lower", "higher"] | None,
    margin: float | None,
    form: str | None,
    json: bool,
) -> None:
    from tfkit.commands import print_json
    from tfkit.tools.sweep.sweep import Sweep

    if (form is not None) + plan + json > 1 and not (plan and json):
        raise click.UsageError("only one of --plan, --markdown, --latex and --json can be used, or --plan with --json")
    excluded = {"plan": plan, "so-far": so_far, "on": on, "json": json, form or "": form, "jobs": jobs > 1}
    if commands:
        _reject_options("commands", excluded)
    if plan:
        _reject_options("plan", {"so-far": so_far, "on": on})
    if on is None and (better is not None or margin is not None):
        text = "--margin is a difference" if better is None else "--better is the direction"
        raise click.UsageError(f"{text} of a metric: add --on")
    comparison = None if on is None else comparison_of(on, better, margin)
    loaded = Sweep(sweep, reader.plugins, output, sets=reader.sets, comparison=comparison, allow_change=allow_change)
    if plan:
        outline = loaded.outline()
        print_json(outline) if json else _show_outline(outline)
        return
    options = _train_options(reader, allow_change=allow_change)
    if commands:
        _show_commands(*loaded.commands(options))
        return
    results = loaded.so_far() if so_far else _run_sweep(loaded, jobs, options)
    page = loaded.write(results)
    if json:
        print_json({**vars(results), "page": str(page)})
    else:
        _show_results(results, form, page)
    if results.errors:
        raise click.exceptions.Exit(1)


def _reject_options(option: str, excluded: Mapping[str, object]) -> None:
    if used := next((name for name, value in excluded.items() if value), None):
        raise click.UsageError(f"--{option} cannot be combined with --{used}")


def _run_sweep(sweep: Sweep, jobs: int, options: list[str]) -> Results:
    """Train the missing runs, and compare all runs."""
    from tfkit.commands import progress_bar
    from tfkit.tools.sweep.comparison import seeds_text

    outline = sweep.outline()
    if outline.missing and outline.needed is not None and outline.seeds < outline.needed:
        click.echo(seeds_text(outline.seeds), err=True)
    with progress_bar() as show_progress:
        return sweep.run(
            jobs=jobs,
            options=options,
            on_progress=lambda what, runs, steps: show_progress(*steps, f"{what}, {runs[0]} of {runs[1]} runs"),
            on_failure=lambda folder, text: click.echo(f"error: the run in {folder} failed\n{text}\n", err=True),
        )


def _train_options(reader: Reader, *, allow_change: bool) -> list[str]:
    """Return the options of `tfkit train` for the plugins and `--allow-change` of this process."""
    folders = [word for folder in reader.plugin_dir for word in ("--plugin-dir", str(folder))]
    flags = [("--no-plugins", reader.no_plugins), ("--allow-change", allow_change)]
    return [*folders, *(flag for flag, is_set in flags if is_set)]


def _show_commands(commands: list[str], more: bool) -> None:
    """Print commands, each on a line, and the next step on stderr."""
    for text in commands:
        click.echo(text)
    after = "print the commands of the next runs with --commands" if more else "compare the runs without --commands"
    click.echo(f"{len(commands)} {'run is' if len(commands) == 1 else 'runs are'} missing; then {after}", err=True)


def _show_results(results: Results, form: str | None, page: Path) -> None:
    from tfkit.tools.sweep.result_tables import show_results

    show_results(results, form)
    if form is None:
        click.echo(f"{page}")


def _show_outline(outline: Outline) -> None:
    from tfkit.commands import bytes_text, count_text, flops_text, print_tables, table, time_text
    from tfkit.tools.sweep.comparison import seeds_text

    head = ["", "parameters", "runs", "done", "steps", "FLOPs", "memory", "time"]
    rows = [
        [
            row.name,
            count_text(row.parameters),
            str(row.runs),
            str(row.done),
            f"{row.steps:,}",
            flops_text(row.flops),
            bytes_text(row.memory),
            time_text(row.seconds),
        ]
        for row in outline.rows
    ]
    all_rows = outline.rows
    runs, done, steps, flops = (
        sum(getattr(row, name) for row in all_rows) for name in ("runs", "done", "steps", "flops")
    )
    times = [row.seconds for row in all_rows if row.seconds is not None]
    time = time_text(sum(times) if len(times) == len(all_rows) else None)
    total = ["all", "", str(runs), str(done), f"{steps:,}", flops_text(flops), "", time]
    print_tables(table(head, [*rows, total], right=head[1:], footer=1))
    click.echo(f"\n{outline.different} different runs, {outline.missing} to train; memory of a step is predicted")
    if outline.needed is not None and outline.seeds < outline.needed:
        click.echo(seeds_text(outline.seeds))
