"""Show every resolved value of a spec and its origin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_spec
from tfkit.console.options import json_option
from tfkit.console.output import TABLE_WIDTH, print_json
from tfkit.errors import number_ranges

if TYPE_CHECKING:
    from tfkit.graph.expand import Graph
    from tfkit.tools.show.layer_programs import LayerProgram
    from tfkit.tools.show.prose import DescribedValue
    from tfkit.tools.show.resolved_values import ResolvedValue

ORIGIN = 36  # maximum width of the column of origins; longer file names are wrapped


@command(
    "show",
    section="Specs",
    order=530,
    notes="""
    Each value has the line where it was written, or `default`. `inherited` values
    are written in an enclosing mapping. Below are the steps of the layers.

    With --prose: the purpose of each component and of each value that the spec
    sets, in the words of their authors, with the papers.

    With --points: the names and shapes of the values that `tfkit.trace` in Python
    reads and writes. The number of a layer replaces `*`.
    """,
    examples="""
    tfkit show gpt2
    tfkit show gpt2 --prose
    tfkit show gpt2 --points
    tfkit show my_model.yaml --set decoder.placement=sandwich
    """,
)
@click.argument("spec", shell_complete=complete_spec)
@click.option("--prose", is_flag=True, help="Describe each component, with its papers.")
@click.option("--points", is_flag=True, help="List the values that `tfkit.trace` reads and writes.")
@json_option
def show(reader: Reader, spec: str, prose: bool, points: bool, json: bool) -> None:
    if prose and points:
        raise click.UsageError("--prose cannot be combined with --points")
    graph = reader.load(spec)
    if points:
        _show_points(graph, json=json)
        return
    from tfkit.tools.show.layer_programs import programs_of
    from tfkit.tools.show.prose import prose_of
    from tfkit.tools.show.resolved_values import values_of

    programs = programs_of(graph)
    if json:
        values = prose_of(graph) if prose else values_of(graph)
        listed = [{**vars(value), "path": value.dotted} for value in values]
        print_json({"name": graph.name, "file": graph.spec.file, "values": listed, "programs": programs})
    elif prose:
        _show_prose(graph, prose_of(graph), programs)
    else:
        _show_tree(graph, values_of(graph), programs)


def _show_tree(graph: Graph, values: Sequence[ResolvedValue], programs: Sequence[LayerProgram]) -> None:
    from rich.table import Table
    from rich.text import Text

    from tfkit.console.output import print_tables

    origins = min(ORIGIN, max(len(_origin_text(value)) for value in values))
    tree = Table.grid(padding=(0, 2))
    tree.add_column(overflow="fold", width=TABLE_WIDTH - origins - 2)
    tree.add_column(style="dim", overflow="fold", width=origins)
    for value in values:
        text = Text("  " * (len(value.path) - 1)).append(f"{value.name}:", "bold" if value.how == "given" else "")
        tree.add_row(text.append(f" {value.value}" if value.value is not None else ""), _origin_text(value))
    print_tables(f"{graph.name}, from {graph.spec.file}", "", tree, *_program_lines(programs))


def _show_prose(graph: Graph, values: Sequence[DescribedValue], programs: Sequence[LayerProgram]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from tfkit.console.output import print_tables

    model = graph.spec.model
    head = [f"{graph.name}, from {graph.spec.file}", *([model.description] if model.description else [])]
    parts: list[Padding | str] = [*head, *([f"Source: {model.source}"] if model.source else [])]
    for value in values:
        depth = len(value.path) - (2 if value.path[0] == "graph" else 1)
        parts += [] if depth else [""]
        title = Text.assemble((f"{value.name}:", "bold"), f" {value.value or ''}")
        parts.append(Padding(title, (0, 0, 0, 2 * depth)))
        parts += [Padding(text, (0, 0, 0, 2 * depth + 4)) for text in (value.text, *value.papers) if text]
    print_tables(*parts, *_program_lines(programs))


def _show_points(graph: Graph, *, json: bool) -> None:
    from tfkit.console.output import print_tables, table
    from tfkit.tools.show.points import points_of

    if json:
        points = [{"name": point.name, "shape": point.shape} for point in points_of(graph)]
        print_json({"name": graph.name, "points": points})
        return
    layers: dict[tuple[str, str], list[int]] = {}
    for point in points_of(graph):
        numbers = layers.setdefault((point.pattern, point.shape), [])
        numbers += [] if point.layer is None else [point.layer]
    rows = [(pattern, number_ranges(numbers), shape) for (pattern, shape), numbers in layers.items()]
    print_tables(table(["value", "layers", "shape"], rows))


def _origin_text(value: ResolvedValue) -> str:
    if value.file is None:
        return value.how
    location = value.file if value.file.startswith("--") else f"{Path(value.file).name}:{value.line}"
    return location if value.how == "given" else f"{value.how} from {location}"


def _program_lines(programs: Sequence[LayerProgram]) -> Iterator[str]:
    """Format the sublayers of the layers, node by node."""
    node = ""
    for program in programs:
        if program.node != node:
            node = program.node
            yield f"\n{node}"
        yield f"  {program.title}"
        yield from (f"    {line}" for line in program.lines)
