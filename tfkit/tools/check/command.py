"""Measure the guarantees of a model, a run or a component."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.console.commands import Reader, command, print_warnings
from tfkit.console.completion import complete_spec
from tfkit.console.options import json_option, seed_option, weights_option
from tfkit.errors import quoted

if TYPE_CHECKING:
    from tfkit.graph.expand import Graph
    from tfkit.tools.check.check import AnySubject, Checked, Work
    from tfkit.tools.check.measure import Outcome
    from tfkit.tools.check.mutants import Bug, PlantedBugs, Result


RESULTS = {"failed": "FAILED", "does not apply": "-"}
"""Words of the table that differ from the words of an outcome."""
N_BUGS = 60
"""Number of bugs that are planted by default."""
CHANGE_WIDTH = 40
"""Columns of the change in a table of bugs."""
UNCOUNTED: tuple[Result, ...] = ("raises an error", "no effect", "not run")
"""Results of bugs that no property needs to see."""


@command(
    "check",
    section="Tools",
    order=410,
    notes="""
    SPEC of any size is checked as a reduced model: a few narrow layers that
    keep every variant, the ratio of heads, windows shorter than what is read,
    patterns of up to four layers, and ties. Its weights are random, biases and
    norms too. --full-size checks SPEC itself; so do --weights and a folder with
    weights, without the properties of new models. --kind and --plugin check
    components, each in an encoder, a decoder and a decoder with a memory, for
    every pair of options; kinds of a run in a small run.

    A RUN has two tables: of its model, and of its training step, measured in a
    reduced run: the reduced model, six steps of four short sequences.

    A property is ok, failed, or does not apply, for a reason that the spec gives.
    What follows from a broken property is not run.

    --mutate plants bugs in the code of the components, one at a time and only
    in memory: a sign, an axis, off by one, a step that is left out. It prints
    the first property that sees each bug. SPEC with --kind or --plugin plants
    them in these components only. Bugs that survive are a result, not an error.

    --shrink removes and reduces values of the model as long as its first broken
    property stays broken in the same component, and writes the rest as a spec.

    Exit status: 0 if no property is broken, else 1.
    """,
    examples="""
    tfkit check my_model.yaml
    tfkit check llama3_405b --level full
    tfkit check gpt2 --only padding --only cached --seed 1
    tfkit check out
    tfkit check minigpt_swiglu --only optimizer --only schedule
    tfkit check --kind additive
    tfkit check --plugin tfkit-moe
    tfkit check --mutate --kind swiglu
    tfkit check my_model.yaml --shrink small.yaml
    """,
)
@click.argument("spec", metavar="[SPEC | RUN]", required=False, shell_complete=complete_spec)
@click.option("--kind", metavar="NAME", help="Check a component: a kind, or slot.kind.")
@click.option("--plugin", metavar="NAME", help="Check every component of a plugin.")
@click.option("--full-size", is_flag=True, help="Check the spec itself, not its reduced model.")
@weights_option("Trained weights, safetensors")
@click.option(
    "--level",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    metavar="LEVEL",
    help="quick, or full: torch.compile and exports too.",
)
@click.option("--only", multiple=True, metavar="NAME", help="Measure this property; repeatable.")
@click.option("--mutate", is_flag=True, help="Plant bugs in the components; see which properties see them.")
@click.option(
    "--mutants",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Plant at most N bugs, drawn by the seed. [default: {N_BUGS}]",
)
@click.option(
    "--shrink",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the smallest model with the first broken property.",
)
@seed_option("Seed of weights, inputs and bugs.")
@json_option
def check(
    reader: Reader,
    spec: str | None,
    kind: str | None,
    plugin: str | None,
    full_size: bool,
    weights: Path | None,
    level: Any,
    only: tuple[str, ...],
    mutate: bool,
    mutants: int | None,
    shrink: Path | None,
    seed: int,
    json: bool,
) -> None:
    from tfkit.console.output import print_json, progress_bar

    _check_choices(spec, kind, plugin, model=full_size or weights is not None, mutate=mutate)
    _check_combination(spec, level, mutate=mutate, mutants=mutants, shrink=shrink)
    from tfkit.tools.check.check import Work
    from tfkit.tools.common.atomic_files import check_file

    work = Work(reader.plugins, level=level, only=only, seed=seed)
    if spec is None:
        document, graph, subjects_of = None, None, partial(work.of_components, kind, plugin)
    else:
        document = work.of_document(reader.sort_of(spec), spec, reader.sets)
        print_warnings([] if document is None else document.notes)
        graph = reader.load(spec) if document is None else document.graph
        weights = reader.weights(spec, weights)
        if shrink is not None and weights is not None:
            raise click.UsageError("--shrink cannot be combined with trained weights: smaller models do not fit them")
        subjects_of = partial(work.of_model, graph, full_size=full_size, weights=weights)
    if mutate:
        _plant_bugs(work, subjects_of, kind, plugin, graph, mutants or N_BUGS, json=json)
        return
    if shrink is not None:
        check_file(shrink)
    subjects = [*subjects_of(), *([] if document is None else [(document, document.words)])]
    print_warnings(work.faults)
    done, total = count(1), work.total(subjects)
    with progress_bar() as on_progress:
        checked = [work.check(item, lambda name: on_progress(next(done), total, f"{name:25}")) for item in subjects]
    if json:
        print_json([{**vars(result), "ok": result.ok} for result in checked])
    else:
        brought = spec is not None and os.path.isdir(spec)  # the folder of a model has its weights
        options: dict[str, Any] = {"kind": kind, "plugin": plugin, "weights": None if brought else weights}
        options |= {"level": level if level != "quick" else None, "seed": seed or None}
        arguments = [spec] if spec else []
        arguments += [f"--{name}={value}" for name, value in options.items() if value is not None]
        arguments += [*(["--full-size"] if full_size else []), *reader.options]
        _show_by_type(checked, work, arguments)
    if shrink is not None:
        _write_shrunk_model(shrink, work, subjects, checked, reader.plugin_options, json=json)
    if not all(result.ok for result in checked):
        raise click.exceptions.Exit(1)


def _check_choices(spec: str | None, kind: str | None, plugin: str | None, *, model: bool, mutate: bool) -> None:
    """Raise UsageError if the options do not choose what is checked."""
    n_choices = sum(choice is not None for choice in (spec, kind, plugin))
    if n_choices != 1 and not (mutate and spec is not None and n_choices == 2):
        raise click.UsageError("a SPEC, `--kind NAME` or `--plugin NAME` is missing")
    if spec is None and model:
        raise click.UsageError("--full-size and --weights have no effect without a SPEC")


def _check_combination(spec: str | None, level: str, *, mutate: bool, mutants: int | None, shrink: Path | None) -> None:
    """Raise UsageError if options contradict each other."""
    if mutants is not None and not mutate:
        raise click.UsageError("--mutants has no effect without --mutate")
    if shrink is not None and mutate:
        raise click.UsageError("--shrink cannot be combined with --mutate")
    if shrink is not None and spec is not None and shrink.exists() and os.path.exists(spec) and shrink.samefile(spec):
        raise click.UsageError(f"--shrink must not replace SPEC; got {quoted(str(shrink))}")
    if mutate and level == "full":
        raise click.UsageError(
            "--mutate cannot be combined with --level full: compiled programs contain no planted bug"
        )


def _plant_bugs(
    work: Work, subjects_of: Any, kind: str | None, plugin: str | None, graph: Graph | None, limit: int, *, json: bool
) -> None:
    from tfkit.console.output import print_json, progress_bar
    from tfkit.tools.check.mutants import kinds_of, plant_bugs

    components = kinds_of(graph) if graph and not (kind or plugin) else work.components(kind, plugin)
    with progress_bar() as on_progress:
        planted = plant_bugs(work, subjects_of, components, limit=limit, on_progress=on_progress)
    print_warnings([*dict.fromkeys(work.faults)])
    if json:
        print_json({**vars(planted), "counts": planted.counts})
    else:
        _show_bugs(planted)


def _show_bugs(planted: PlantedBugs) -> None:
    from tfkit.console.output import print_tables, table
    from tfkit.errors import listing

    models = f"{planted.n_models} model{'s' * (planted.n_models > 1)}"
    names = planted.components
    title = listing(names) if len(names) < 4 else f"{len(names)} components"
    drawn = f"{len(planted.bugs)} of {planted.n_possible} possible bugs"
    rows = [
        (f"{os.path.basename(bug.file)}:{bug.line}", _change(bug), bug.property or bug.result) for bug in planted.bugs
    ]
    print_tables(f"{title}, in {models}: {drawn}", "", table(["line", "bug", "seen by"], rows), "")
    counts = planted.counts
    n_effective = counts["seen"] + counts["survives"]
    rest = [f"{result}: {counts[result]}" for result in UNCOUNTED if counts[result]]
    click.echo(f"{counts['seen']} of {n_effective} bugs are seen; {counts['survives']} survive")
    if rest:
        click.echo(f"not counted: {'; '.join(rest)}")


def _change(bug: Bug) -> str:
    """Return a change on one line, or on two lines if it is long, without the text before the difference."""
    if len(bug.before) + len(bug.after) + 4 <= CHANGE_WIDTH:
        return f"{bug.before} -> {bug.after}"
    equal = len(os.path.commonprefix([bug.before, bug.after]))  # noqa: RUF071  characters, not folders
    start = max(0, equal - 8) if max(len(bug.before), len(bug.after)) > CHANGE_WIDTH - 3 else 0
    lines = (f"{'...' * (start > 0)}{text[start:]}" for text in (bug.before, bug.after))
    return "\n-> ".join(line if len(line) <= CHANGE_WIDTH - 3 else f"{line[: CHANGE_WIDTH - 6]}..." for line in lines)


def _write_shrunk_model(
    file: Path,
    work: Work,
    subjects: Sequence[tuple[AnySubject, str]],
    checked: Sequence[Checked],
    options: Sequence[str],
    *,
    json: bool,
) -> None:
    """Write the smallest model in which the first broken property of a model is broken."""
    from tfkit.console.output import print_tables, progress_bar
    from tfkit.tools.check.model_under_test import ModelUnderTest
    from tfkit.tools.check.shrink import shrink
    from tfkit.tools.common.atomic_files import write_file

    results = [
        (subject, outcome) for (subject, _), model in zip(subjects, checked, strict=True) for outcome in model.failed
    ]
    broken = [(subject, outcome) for subject, outcome in results if isinstance(subject, ModelUnderTest)]
    if not broken:
        reason = f"only properties of a {results[0][0].of} are broken" if results else "no property is broken"
        click.echo(f"{file} is not written: {reason}", err=True)
        return
    subject, outcome = broken[0]
    (prop,) = [prop for prop in work.chosen if prop.name == outcome.name]
    with progress_bar() as on_progress:
        shrunk = shrink(
            subject, prop, outcome, on_progress=lambda left, n: on_progress(n - left, n, f"shrinking to {left} values")
        )
    write_file(file, shrunk.text)
    if not json:
        number = f"{shrunk.n_values} of {shrunk.n_values_before} values"
        again = ["tfkit", "check", str(file), "--full-size", f"--only={outcome.name}"]
        again += [f"--seed={work.seed}"] * (work.seed != 0)
        print_tables("", f"{outcome.name}, in {file} with {number}: {shrunk.outcome.fault}")
        print_tables(f"again: {shlex.join([*again, *options])}")


def _show_by_type(checked: Sequence[Checked], work: Work, arguments: list[str]) -> None:
    by_type = [[result for result in checked if result.of == of and result.outcomes] for of in work.types]
    for number, results in enumerate(filter(None, by_type)):
        if number:
            click.echo()
        _show_outcomes(results, work, arguments)


def _show_outcomes(checked: Sequence[Checked], work: Work, arguments: list[str]) -> None:
    from tfkit.console.output import print_tables, table
    from tfkit.tools.check.check import worst_of

    outcomes = worst_of(checked)
    rows = [
        (
            outcome.name,
            RESULTS.get(outcome.status, outcome.status),
            "" if outcome.worst is None else f"{outcome.worst:.1e}",
            _outcome_note(outcome, checked[0].of),
        )
        for outcome in outcomes
    ]
    print_tables(
        _table_title(checked),
        "",
        table(["property", "result", "worst", f"the {checked[0].of}"], rows, right=["worst"]),
        "",
    )
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        print_tables(f"{outcome.name}{_worst_model(outcome, checked)}: {outcome.fault}")
    if failed:
        only = [f"--only {outcome.name}" for outcome in failed]
        print_tables("", f"again: {' '.join(['tfkit check', *map(shlex.quote, arguments), *only])}")
    number = work.left(checked[0].of)
    left = f"; {number} more with --level full" if number else ""
    summary, broken = checked[0].summary, sum(not result.ok for result in checked)
    if len(checked) > 1:
        summary = f"{len(checked)} {checked[0].of}s, " + (
            f"{broken} of them with a broken property" if broken else "all ok"
        )
    click.echo(f"{summary}{left}: {sum(outcome.seconds for model in checked for outcome in model.outcomes):.1f} s")
    for line in dict.fromkeys(line for result in checked for line in result.uncompared):
        print_tables(line)


def _table_title(checked: Sequence[Checked]) -> str:
    first = checked[0]
    if len(checked) > 1:
        return f"{len(checked)} {first.of}s, the worst of each property"
    return f"{first.name}, as a reduced {first.of}: {first.words}" if first.words else first.name


def _worst_model(failed: Outcome, checked: Sequence[Checked]) -> str:
    """Name the model in which a property is broken, if there are several."""
    if len(checked) == 1:
        return ""
    broken = [model for model in checked if failed.name in [outcome.name for outcome in model.failed]]
    (worst,) = [model.words for model in broken if any(outcome is failed for outcome in model.outcomes)]
    more = len(broken) - 1
    return f", in {worst}" + (f" and {more} more {checked[0].of}{'s' * (more > 1)}" if more else "")


def _outcome_note(outcome: Outcome, of: str) -> str:
    """Return the claim of a property that holds, the component of a broken property, or the reason."""
    if outcome.status == "ok":
        return outcome.claim
    if outcome.status == "failed":
        return f"{outcome.component or f'the {of}'}: see below"
    return f"does not apply: {outcome.detail}" if outcome.status == "does not apply" else outcome.detail
