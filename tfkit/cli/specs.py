"""Commands about the text of specs: list, validate, show, diff."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.cli.options import Reader, command, json_option
from tfkit.errors import SpecError

if TYPE_CHECKING:
    from tfkit.graph.expand import Graph
    from tfkit.tools.gallery import Shipped
    from tfkit.tools.show import Value
    from tfkit.tools.steps import Program

ORIGIN = 36  # the widest column of origins; the file's name is longer at times


@command(
    "list",
    sets=False,
    notes="""
    Only specs with all WORDs in their name, kind, model family, plugins, or
    description are listed. Missing plugins of a spec are named; none is loaded.
    """,
    examples="""
    tfkit list
    tfkit list encoder bert
    """,
)
@click.argument("words", nargs=-1, metavar="[WORD]...")
@json_option
def list_(reader: Reader, words: tuple[str, ...], json: bool) -> None:
    """List the specs that come with tfkit."""
    from tfkit.cli.output import print_json, show, table
    from tfkit.tools.gallery import shipped
    from tfkit.tools.units import short

    specs = shipped(words, reader.available)
    if json:
        print_json(specs)
        return
    columns = ["name", "kind", "size", "description"]
    kinds = {"encoder-decoder": "enc-dec"}
    rows = [
        (one.name, kinds.get(one.kind, one.kind), short(one.parameters) if one.parameters else "", _special(one))
        for one in specs
    ]
    show(table(columns, rows, right=["size"]), "", f"{len(specs)} specs", *_missing(specs))


def _special(one: Shipped) -> str:
    needs = f"needs {', '.join(one.missing)}" if one.missing else ""
    return "; ".join(filter(None, (one.description, needs)))


def _missing(specs: Sequence[Shipped]) -> Iterator[str]:
    """The way to get the plugins that some of the specs need."""
    from tfkit.plugin.wanted import where_it_is
    from tfkit.spec.load import plugin_folders

    for name in sorted({name for one in specs for name in one.missing}):
        count = sum(name in one.missing for one in specs)
        yield f"\n{name}, needed by {count}, is not loaded: {where_it_is(name, plugin_folders())}"


@command(
    "validate",
    notes="With --json, the result lists the errors of each spec.",
    examples="""
    tfkit validate my_model.yaml
    tfkit validate specs/*.yaml
    """,
)
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
@json_option
def validate(reader: Reader, specs: tuple[str, ...], json: bool) -> None:
    """Check specs and list all their errors."""
    from tfkit.cli.output import print_json

    _ = reader.plugins  # an error of a plugin is not the fault of a spec
    results = []
    for spec in specs:
        wrong = _wrong(reader, spec)
        results.append({"spec": spec, "errors": [one.to_dict() for one in wrong.diagnostics] if wrong else []})
        if not json:
            click.echo(f"{wrong}\n" if wrong else f"{spec}: ok", err=wrong is not None)
    if json:
        print_json(results)
    if any(result["errors"] for result in results):
        raise click.exceptions.Exit(1)


def _wrong(reader: Reader, spec: str) -> SpecError | None:
    try:
        reader.load(spec)
    except SpecError as wrong:
        return wrong
    return None


@command(
    "show",
    notes="""
    Each value has the line where it was written, or `default`. `inherited` values
    are written in an enclosing mapping. Below are the steps of the layers.
    """,
    examples="""
    tfkit show gpt2
    tfkit show my_model.yaml --set decoder.placement=sandwich
    """,
)
@click.argument("spec")
@json_option
def show(reader: Reader, spec: str, json: bool) -> None:
    """Show every resolved value of a spec and its origin."""
    from tfkit.cli.output import print_json

    graph = reader.load(spec)
    from tfkit.tools.show import values_of
    from tfkit.tools.steps import programs_of

    values, programs = values_of(graph), programs_of(graph)
    if json:
        listed = [{**vars(value), "path": value.dotted} for value in values]
        print_json({"name": graph.name, "file": graph.spec.file, "values": listed, "programs": programs})
    else:
        _show_tree(graph, values, programs)


def _show_tree(graph: Graph, values: Sequence[Value], programs: Sequence[Program]) -> None:
    from rich.table import Table
    from rich.text import Text

    from tfkit.cli.output import WIDTH, show

    origins = min(ORIGIN, max(len(_origin(value)) for value in values))
    tree = Table.grid(padding=(0, 2))
    tree.add_column(overflow="fold", width=WIDTH - origins - 2)
    tree.add_column(style="dim", overflow="fold", width=origins)
    for value in values:
        text = Text("  " * (len(value.path) - 1)).append(f"{value.name}:", "bold" if value.how == "given" else "")
        tree.add_row(text.append(f" {value.value}" if value.value is not None else ""), _origin(value))
    show(f"{graph.name}, from {graph.spec.file}", "", tree, *_program_lines(programs))


def _origin(value: Value) -> str:
    if value.file is None:
        return value.how
    place = value.file if value.file.startswith("--") else f"{Path(value.file).name}:{value.line}"
    return place if value.how == "given" else f"{value.how} from {place}"


def _program_lines(programs: Sequence[Program]) -> Iterator[str]:
    """The steps of the layers, node by node."""
    node = ""
    for program in programs:
        if program.node != node:
            node = program.node
            yield f"\n{node}"
        yield f"  {program.title}"
        yield from (f"    {line}" for line in program.lines)


@command(
    "diff",
    notes="""
    A value that several components inherit is one line, and `name`, `source` and
    `description` are left out. The exit status is 0 whether they differ or not.
    """,
    examples="""
    tfkit diff gpt2 gpt2_medium
    tfkit diff llama2_70b llama3_70b --json
    """,
)
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@json_option
def diff(reader: Reader, before: str, after: str, json: bool) -> None:
    """Show the differences between two specs."""
    from tfkit.cli.output import print_json, retitled

    a, b = retitled([reader.load(before), reader.load(after)], (before, after))
    from tfkit.tools.diff import differences
    from tfkit.tools.params import count_params

    found, counts = differences(a, b), [count_params(graph).total for graph in (a, b)]
    if json:
        print_json({"a": a.name, "b": b.name, "differences": found, "parameters": counts})
    else:
        _show_differences(found, (a.name, b.name), counts)


def _show_differences(found: Sequence[Any], names: Sequence[str], counts: Sequence[int]) -> None:
    from tfkit.cli.output import show, table

    rows = [[_places(one), _or_dash(one.before), _or_dash(one.after)] for one in found]
    if not rows:
        show("no value differs", "")
    rows.append(["parameters", *(f"{count:,}" for count in counts)])
    show(table(["value", *names], rows, footer=1))


def _places(one: Any) -> str:
    return one.path if len(one.places) == 1 else f"{one.path} ({len(one.places)} places)"


def _or_dash(text: str | None) -> str:
    return "-" if text is None else text
