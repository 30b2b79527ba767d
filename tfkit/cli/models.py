"""Commands that build a model: build, params."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tfkit.cli.options import Reader, allow_change_option, command, json_option
from tfkit.errors import printable, ranges

if TYPE_CHECKING:
    import torch

    from tfkit.tools.cache import CacheSize
    from tfkit.tools.first_run import FirstRun
    from tfkit.tools.params import By, Params, Row

DTYPES = ("float32", "bfloat16", "float16", "float64")
SIDE_BY_SIDE = 2


@command(
    "build",
    notes="""
    The forward runs on random inputs: 2 sequences of 16 tokens, or of `max_len` if
    that is less. With -o, DIR gets the resolved spec as spec.yaml, the weights as
    model.safetensors and the tokenizer beside --weights, all or nothing. Every
    command takes such a folder as SPEC, and reads its weights.
    """,
    examples="""
    tfkit build gpt2
    tfkit build my_model.yaml -o out --dtype bfloat16 --seed 1
    tfkit build out
    tfkit build llama3_405b --device meta
    """,
)
@click.argument("spec")
@click.option("-o", "--output", metavar="DIR", type=click.Path(path_type=Path), help="Write the model to this folder.")
@click.option("--force", is_flag=True, help="Replace an existing model in DIR.")
@click.option(
    "--weights",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Fill it from safetensors: a file, an index or their folder.",
)
@allow_change_option
@click.option(
    "--device", default="cpu", show_default=True, metavar="NAME", help="cpu, cuda, or meta: shapes, no values."
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    metavar="TYPE",
    help="float32, bfloat16, float16 or float64.  [default: float32, or that of the weights]",
)
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0), metavar="N", help="Seed of the random numbers."
)
@json_option
def build(
    reader: Reader,
    spec: str,
    output: Path | None,
    force: bool,
    weights: Path | None,
    allow_change: bool,
    device: str,
    dtype: str | None,
    seed: int,
    json: bool,
) -> None:
    """Build a model, run it once, and show its components."""
    from tfkit.cli import output as out
    from tfkit.errors import FirstLossWarning

    if force and output is None:
        raise click.UsageError("--force has no effect without -o")
    if weights is not None and device == "meta":
        raise click.UsageError("on the meta device there are no weights: omit --weights or --device meta")
    if output is not None and device == "meta":
        raise click.UsageError("on the meta device there are no weights to write: omit -o or --device meta")
    graph = reader.load(spec)
    if device != "meta":
        weights = reader.weights(spec, weights, allow_change=allow_change)
    import torch

    from tfkit.tools.first_run import first_run
    from tfkit.tools.save import check_folder, save

    if output is not None:
        check_folder(output, force=force, beside=weights)
    with out.said(FirstLossWarning), out.stages() as stage:
        kind = None if dtype is None else getattr(torch, dtype)
        options: dict[str, Any] = {"dtype": kind, "seed": seed, "weights": weights, "allow_change": allow_change}
        model, run = first_run(graph, device=device_of(device), stage=stage, **options)
        files: list[str] = []
        if output is not None:
            stage(f"writing {output}")
            files = [str(path) for path in save(model, output, force=force, beside=weights)]
    if json:
        out.print_json({**vars(run), "files": files})
    else:
        _show_run(run, files)


def device_of(name: str) -> torch.device:
    """The device of that name; wrong usage if it is not available."""
    from tfkit import placement

    try:
        return placement.device_of(name)
    except ValueError as wrong:
        raise click.BadParameter(str(wrong), param_hint="--device") from None


def _show_run(run: FirstRun, files: Sequence[str]) -> None:
    from tfkit.cli.output import show, table
    from tfkit.tools.units import bytes_text, short

    rows = [
        (
            node.name,
            node.block or "(input)",
            ", ".join(node.reads),
            " x ".join(map(str, node.shape)),
            f"{node.parameters:,}" if node.block else "",
        )
        for node in run.nodes
    ]
    total = f"{run.parameters:,} parameters ({short(run.parameters)}), {bytes_text(run.bytes)} in {run.dtype}"
    times = f"built on {run.device} in {run.build_time:.2f} s, one forward in {run.forward_time:.2f} s"
    show(
        table(["node", "block", "reads", "output", "parameters"], rows, right=["parameters"]),
        *("", run.code, "", total, times),
        *(f"wrote {printable(file)}" for file in files),
    )


@command(
    "params",
    notes="""
    Nothing is allocated, so the model may have any size. Embedding tables are
    those of tokens, positions and types. Weights used twice are counted once.
    """,
    examples="""
    tfkit params gpt2
    tfkit params gpt2 gpt2_medium gpt2_large
    tfkit params my_model.yaml --by layer --set decoder.ffn.d_ff=4096
    """,
)
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
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
    """Count the parameters, by component, node, layer or module."""
    from tfkit.cli import output as out

    graphs = [reader.load(spec) for spec in specs]
    from tfkit.tools.params import count_params

    counts = [count_params(graph, by) for graph in out.retitled(graphs, specs)]
    if json:
        out.print_json(counts)
    elif len(counts) == 1:
        _show_count(counts[0])
    else:
        _show_side_by_side(counts)


def _show_count(count: Params) -> None:
    from tfkit.cli.output import percent, show, table

    rows = [_cells(shown, count) for shown in collapsed(count)]
    rows.append([*_total(count), "" if count.by == "layer" else percent(count.non_embedding, count.non_embedding)])
    columns = [count.by, "parameters", "share", "each" if count.by == "layer" else "non-embedding"]
    if count.by == "module":  # their names need the room
        columns, rows = columns[:3], [row[:3] for row in rows]
    lines = table(columns, rows, right=columns[1:], footer=1)
    show(f"{count.name}: {_summary(count)}", "", lines, "", *_notes(count))


def _total(count: Params) -> list[str]:
    from tfkit.cli.output import percent

    return ["total", f"{count.total:,}", percent(count.total, count.total)]


def _cells(shown: Shown, count: Params) -> list[str]:
    from tfkit.cli.output import percent

    each = f"{shown.times} x {shown.parameters // shown.times:,}" if shown.times > 1 else ""
    apart = shown.parameters and not shown.non_embedding
    other = "-" if apart else percent(shown.non_embedding, count.non_embedding)
    last = each if count.by == "layer" else other
    return [shown.label, f"{shown.parameters:,}", percent(shown.parameters, count.total), last]


def _summary(count: Params) -> str:
    from tfkit.tools.units import short

    return f"{short(count.total)} parameters, {short(count.non_embedding)} without embedding tables"


def _notes(count: Params) -> Iterator[str]:
    """The notes below the table: trainable and buffers, tied and shared weights, the KV cache."""
    frozen = count.total - count.trainable
    yield f"trainable {count.trainable:,}, frozen {frozen:,}, buffers {count.buffers:,}"
    if count.active != count.total:
        yield f"experts: one token uses {count.active:,} parameters"
    yield from count.notes
    if count.cache is not None:
        yield _cache_note(count.cache)


def _cache_note(size: CacheSize) -> str:
    from tfkit.tools.units import bytes_text

    each = f"{bytes_text(size.per_token)} per token"
    if size.per_memory_token:
        each += f", {bytes_text(size.per_memory_token)} per token of the memory"
    whole = "" if size.at_max_len is None else f", {bytes_text(size.at_max_len)} at {size.max_len:,} tokens"
    return f"KV cache in {size.dtype}: {each}{whole}"


def _show_side_by_side(counts: Sequence[Params]) -> None:
    """Specs as columns, as many as fit into 80 columns, then the next ones."""
    from rich.padding import Padding

    from tfkit.cli.output import show, table

    for start in range(0, len(counts), SIDE_BY_SIDE):
        some = counts[start : start + SIDE_BY_SIDE]
        parts = [{shown.name: _cells(shown, count) for shown in collapsed(count)} for count in some]
        rows = []
        for name in merged([list(part) for part in parts]):
            labels = {part[name][0] for part in parts if name in part}
            cells = [part.get(name, ["", "-", "-"])[1:3] for part in parts]
            rows.append([labels.pop() if len(labels) == 1 else name, *(text for pair in cells for text in pair)])
        rows.append(["total", *(text for count in some for text in _total(count)[1:])])
        columns = [some[0].by, *(text for count in some for text in (count.name, "share"))]
        show(*[""] * (start > 0), table(columns, rows, right=columns[1:], footer=1))
    for count in counts:
        show("", f"{count.name}: {_summary(count)}", *(Padding(note, (0, 0, 0, 2)) for note in _notes(count)))


def merged(lists: Sequence[Sequence[str]]) -> list[str]:
    """All names of several tables, each after its predecessor in its own table."""
    merged: list[str] = []
    for labels in lists:
        for index, label in enumerate(labels):
            if label not in merged:
                merged.insert(merged.index(labels[index - 1]) + 1 if index else 0, label)
    return merged


_INDEX = re.compile(r"\blayers\.(\d+)")


class Shown(NamedTuple):
    """A row as it is printed: one of the count's, or several of equal layers."""

    name: str
    label: str
    parameters: int
    non_embedding: int
    times: int


def collapsed(count: Params) -> list[Shown]:
    """The rows of a count, equal layers in one: `decoder.layers.0-11`."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in count.rows:
        groups.setdefault((_INDEX.sub("layers.*", row.label), row.parameters), []).append(row)
    shown = []
    for (label, parameters), rows in groups.items():
        numbers = [int(match[1]) for row in rows if (match := _INDEX.search(row.label))]
        label = label.replace("*", ranges(numbers).replace(" ", "")) if numbers else rows[0].label
        name = rows[0].name if count.by == "component" else label
        shown.append(Shown(name, label, parameters * len(rows), sum(row.non_embedding for row in rows), len(rows)))
    return shown
