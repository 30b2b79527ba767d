"""Compare runs by their folders, as a sweep does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from tfkit.commands import Reader, command, forms_option, json_option, output_option
from tfkit.tools.sweep.command import comparison_of, metric_options

if TYPE_CHECKING:
    from tfkit.plugin.manager import Plugins
    from tfkit.tools.show.differences import Difference

FOLDER = click.Path(file_okay=False, path_type=Path)


@command(
    "runs",
    section="Training",
    order=240,
    sets=False,
    notes="""
    Runs with equal settings except the seed are one variant, named after the
    values that distinguish it. Each variant is compared to the variant of the
    first DIR, in pairs with equal seeds, as by `tfkit sweep`. Runs that are
    evaluated on different data are an error; different numbers of tokens are
    reported. `tfkit compare` compares the weights of two runs. --list prints
    the runs in any DIR, also several levels below it, without a comparison.
    --fit fits one scaling law to all runs, L = E + A / N^a + B / D^b, for N
    parameters and D tokens.

    Exit status: 0; 1 if the runs cannot be compared.
    """,
    examples="""
    tfkit runs sweeps --list
    tfkit runs sweeps/sizes/runs/* --fit
    tfkit runs runs/relu-1 runs/relu-2 runs/swiglu-1 runs/swiglu-2
    tfkit runs runs/* --baseline runs/relu-1 -o page.html
    tfkit runs out/runs/* other/runs/* --on val.accuracy --better higher
    """,
)
@click.argument("folders", nargs=-1, required=True, metavar="DIR...", type=FOLDER)
@metric_options("The metric to compare.", default="val.loss")
@click.option("--baseline", type=FOLDER, metavar="DIR", help="A run of the baseline variant.  [default: the first DIR]")
@click.option("--so-far", is_flag=True, help="Include unfinished runs; compare all runs at the same step.")
@click.option("--list", "list_", is_flag=True, help="List the runs with their latest metrics; compare nothing.")
@click.option("--fit", is_flag=True, help="Fit a scaling law in parameters and tokens; compare nothing.")
@output_option("FILE", "Write a page: curves, models, costs.", dir_okay=False)
@forms_option
@json_option
def runs(
    reader: Reader,
    folders: tuple[Path, ...],
    on: str,
    better: Literal["lower", "higher"] | None,
    margin: float | None,
    baseline: Path | None,
    so_far: bool,
    list_: bool,
    fit: bool,
    output: Path | None,
    form: str | None,
    json: bool,
) -> None:
    from tfkit.commands import print_json, write_file
    from tfkit.tools.runs.variants import compare_runs
    from tfkit.tools.sweep.result_tables import show_results

    if form is not None and json:
        raise click.UsageError("only one of --markdown, --latex and --json can be used")
    if list_ or fit:
        excluded: dict[str, object] = {"--baseline": baseline, "--so-far": so_far, "--output": output}
        excluded |= {f"--{form}": form, "--better": better, "--margin": margin, "--fit": list_ and fit}
        if idle := next((name for name, value in excluded.items() if value), None):
            raise click.UsageError(f"{'--list' if list_ else '--fit'} cannot be combined with {idle}")
        _print_runs(folders, on, json=json) if list_ else _print_law(folders, reader.plugins, on, json=json)
        return
    comparison = comparison_of(on, better, margin)
    compared = compare_runs(folders, reader.plugins, comparison=comparison, baseline=baseline, so_far=so_far)
    if output is not None:
        write_file(output, compared.page())
    if json:
        page = None if output is None else str(output)
        print_json({**vars(compared.results), "differing": compared.differing, "page": page})
        return
    if form is None:
        _show_differing(compared.differing)
    show_results(compared.results, form)
    if output is not None and form is None:
        click.echo(f"{output}")


def _print_runs(folders: tuple[Path, ...], on: str, *, json: bool) -> None:
    """Print the runs in folders, each with its latest value of a metric."""
    from tfkit.commands import print_json, print_tables, table
    from tfkit.tools.runs.listing import listed_runs

    listed = listed_runs(folders)
    if json:
        print_json(listed)
        return
    rows = [
        [
            run.folder,
            run.name,
            "-" if run.step is None else f"{run.step:,} of {run.steps or 0:,}",
            run.ended or "-",
            f"{run.latest['loss']:.4g}" if "loss" in run.latest else "-",
            f"{run.latest[on]:.4g}" if on in run.latest else "-",
        ]
        for run in listed
    ]
    print_tables(table(["run", "name", "step", "ended", "loss", on], rows, right=["step", "loss", on]))


def _print_law(folders: tuple[Path, ...], plugins: Plugins, on: str, *, json: bool) -> None:
    """Print the scaling law of runs."""
    from tfkit.commands import print_json, print_tables, table
    from tfkit.tools.runs.law import law_of_runs

    law = law_of_runs(folders, plugins, on)
    if json:
        print_json({**vars(law), "growth": law.growth})
        return
    values = (law.floor, *law.scales, *law.exponents)
    rows = [
        [name, f"{value:.4g}", f"{low:.4g} .. {high:.4g}"]
        for name, value, (low, high) in zip("EABab", values, law.intervals, strict=True)
    ]
    print_tables(table([f"{on} of {law.runs} runs", "", "95% interval"], rows, right=["", "95% interval"]), "")
    click.echo(f"the best number of parameters grows with compute^{law.growth:.3f}")
    click.echo(f"the run with the most compute differs by {law.missed:+.4f} from the law of the remaining runs")


def _show_differing(differing: dict[str, list[Difference]]) -> None:
    """Print the values in which variants differ from the baseline."""
    from tfkit.commands import print_tables, table

    rows = [
        [name if index == 0 else "", difference.path, difference.before or "-", difference.after or "-"]
        for name, differences in differing.items()
        for index, difference in enumerate(differences)
    ]
    if rows:
        print_tables(table(["", "value", "baseline", "variant"], rows), "")
