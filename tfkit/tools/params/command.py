"""Count the parameters, by component, node, layer or module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import click

from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_spec
from tfkit.console.options import json_option
from tfkit.console.output import group_layers, merge_rows, percent, print_json, print_tables, table, with_titles
from tfkit.tools.common.units import bytes_text, count_text

if TYPE_CHECKING:
    from tfkit.tools.common.memory_needs import CacheSize
    from tfkit.tools.params.count import By, Params

SIDE_BY_SIDE = 2


@command(
    "params",
    section="Models",
    order=120,
    notes="""
    Nothing is allocated, so the model may have any size. Embedding tables are
    the tables of tokens, positions and types. Weights used twice are counted once.
    The adapters of a run are counted, with the trained and frozen part of each row.
    """,
    examples="""
    tfkit params gpt2
    tfkit params gpt2 gpt2_medium gpt2_large
    tfkit params my_model.yaml --by layer --set decoder.ffn.d_ff=4096
    """,
)
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...", shell_complete=complete_spec)
@click.option(
    "--by",
    default="component",
    show_default=True,
    type=click.Choice(["component", "node", "layer", "module"]),
    metavar="PART",
    help="Rows: component, node, layer or module.",
)
@json_option
def params(reader: Reader, specs: tuple[str, ...], by: By, json: bool) -> None:
    models = [reader.load_trained(spec) for spec in specs]
    from tfkit.tools.params.count import count_params

    graphs = with_titles([model.graph for model in models], specs)
    counts = [replace(count_params(m, by), name=graph.name) for m, graph in zip(models, graphs, strict=True)]
    if json:
        print_json(counts)
    elif len(counts) == 1:
        _show_count(counts[0])
    else:
        _show_side_by_side(counts)


def _show_count(count: Params) -> None:
    rows = [_row_cells(printed, count) for printed in printed_rows(count)]
    rows.append(
        [*_total_cells(count), "" if count.by == "layer" else percent(count.non_embedding, count.non_embedding)]
    )
    columns = [count.by, "parameters", "share", "each" if count.by == "layer" else "non-embedding"]
    if count.by == "module" or _is_mostly_frozen(count):  # the names of modules need the width of this column
        columns, rows = columns[:3], [row[:3] for row in rows]
    if count.by != "module" and _is_mostly_frozen(count):
        columns += ["trained", "frozen"]
        sizes = [(printed.parameters, printed.trainable) for printed in printed_rows(count)]
        for row, (parameters, trained) in zip(rows, [*sizes, (count.total, count.trainable)], strict=True):
            row += [f"{trained:,}", f"{parameters - trained:,}"]
    lines = table(columns, rows, right=columns[1:], footer=1)
    print_tables(f"{count.name}: {_count_summary(count)}", "", lines, "", *_count_notes(count))


def _is_mostly_frozen(count: Params) -> bool:
    """Return True for a model such as the base of adapters; the few frozen values of others are below the table."""
    return 0 < count.trainable < count.total / 2


def _total_cells(count: Params) -> list[str]:
    return ["total", f"{count.total:,}", percent(count.total, count.total)]


def _row_cells(row: PrintedRow, count: Params) -> list[str]:
    each = f"{row.times} x {row.parameters // row.times:,}" if row.times > 1 else ""
    apart = row.parameters and not row.non_embedding
    other = "-" if apart else percent(row.non_embedding, count.non_embedding)
    last = each if count.by == "layer" else other
    return [row.label, f"{row.parameters:,}", percent(row.parameters, count.total), last]


def _count_summary(count: Params) -> str:
    return f"{count_text(count.total)} parameters, {count_text(count.non_embedding)} without embedding tables"


def _count_notes(count: Params) -> Iterator[str]:
    """Yield the notes below the table: trainable parameters and buffers, tied and shared weights, the KV cache."""
    frozen = count.total - count.trainable
    yield f"trainable {count.trainable:,}, frozen {frozen:,}, buffers {count.buffers:,}"
    if count.active != count.total:
        yield f"experts: one token uses {count.active:,} parameters"
    yield from count.notes
    if count.cache is not None:
        yield _cache_note(count.cache)


def _cache_note(size: CacheSize) -> str:
    if not size.per_token and not size.per_memory_token:
        return f"states in {size.dtype}: {bytes_text(size.states)} for a sequence of any length"
    each = f"{bytes_text(size.per_token)} per token"
    if size.per_memory_token:
        each += f", {bytes_text(size.per_memory_token)} per token of the memory"
    if size.states:
        each += f", {bytes_text(size.states)} of states"
    limit = "" if size.at_max_len is None else f", {bytes_text(size.at_max_len)} at {size.max_len:,} tokens"
    return f"KV cache in {size.dtype}: {each}{limit}"


def _show_side_by_side(counts: Sequence[Params]) -> None:
    """Print specs as columns, in groups that fit into 80 columns."""
    from rich.padding import Padding

    for start in range(0, len(counts), SIDE_BY_SIDE):
        group = counts[start : start + SIDE_BY_SIDE]
        parts = [{row.name: _row_cells(row, count) for row in printed_rows(count)} for count in group]
        rows = []
        for name in merge_rows([list(part) for part in parts]):
            labels = {part[name][0] for part in parts if name in part}
            cells = [part.get(name, ["", "-", "-"])[1:3] for part in parts]
            rows.append([labels.pop() if len(labels) == 1 else name, *(text for pair in cells for text in pair)])
        rows.append(["total", *(text for count in group for text in _total_cells(count)[1:])])
        columns = [group[0].by, *(text for count in group for text in (count.name, "share"))]
        print_tables(*[""] * (start > 0), table(columns, rows, right=columns[1:], footer=1))
    for count in counts:
        print_tables(
            "", f"{count.name}: {_count_summary(count)}", *(Padding(note, (0, 0, 0, 2)) for note in _count_notes(count))
        )


class PrintedRow(NamedTuple):
    """A printed row: a row of the count, or several rows of equal layers."""

    name: str
    label: str
    parameters: int
    non_embedding: int
    trainable: int
    times: int


def printed_rows(count: Params) -> list[PrintedRow]:
    """Return the rows of a count, with equal layers merged: `decoder.layers.0-11`."""
    printed = []
    for label, rows in group_layers((row.label, row.parameters, row) for row in count.rows):
        name = rows[0].name if count.by == "component" else label
        parameters, non_embedding = sum(row.parameters for row in rows), sum(row.non_embedding for row in rows)
        trainable = sum(row.trainable for row in rows)
        printed.append(PrintedRow(name, label, parameters, non_embedding, trainable, len(rows)))
    return printed
