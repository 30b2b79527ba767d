"""Write a model to a file that runs without tfkit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfkit.console.commands import Reader, command, print_warnings
from tfkit.console.completion import complete_spec, reader_of
from tfkit.console.options import allow_change_option, dtype_option, json_option, output_option, weights_option
from tfkit.console.output import print_json, print_tables, stages, table
from tfkit.errors import SpecError, printable_text
from tfkit.tools.common.units import bytes_text

if TYPE_CHECKING:
    from tfkit.tools.export.export import Exported
    from tfkit.tools.export.formats import Formats

DEPRECATED = "note: torch no longer develops TorchScript; if C++ can load it, --format pt2 is its successor"


def _complete_format(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from tfkit.tools.export.formats import formats_of

    try:
        names = formats_of(reader_of(context).loaded).named
    except SpecError:  # the command reports the error
        return []
    return [name for name in names if name.startswith(incomplete)]


@command(
    "export",
    section="Tools",
    order=480,
    notes="""
    Batch and lengths are free, padding masks are inputs. FILE is read again and
    compared with the model at shapes that differ from the shapes of the trace. If
    the outputs differ, the error names the first component that differs, and
    nothing is written.
    """,
    examples="""
    tfkit export --formats
    tfkit export gpt2 --weights model.safetensors -o gpt2.pt2
    tfkit export gpt2 --weights model.safetensors --format aoti -o gpt2.pt2
    tfkit export t5_small --weights downloads/t5 --format torchscript -o t5.pt
    """,
)
@click.argument("spec", required=False, shell_complete=complete_spec)
@output_option("FILE", "The file to write.")
@click.option(
    "--format",
    metavar="NAME",
    shell_complete=_complete_format,
    help="The format.  [default: by the suffix of FILE]",
)
@click.option("--formats", is_flag=True, help="List the formats, also of plugins, and exit.")
@weights_option(otherwise="random")
@allow_change_option
@dtype_option("float32, bfloat16 ...  [default: the type of the weights]")
@json_option
def export(
    reader: Reader,
    spec: str | None,
    output: Path | None,
    format: str | None,
    formats: bool,
    weights: Path | None,
    allow_change: bool,
    dtype: str | None,
    json: bool,
) -> None:
    from tfkit.tools.common.atomic_files import check_file
    from tfkit.tools.export.formats import formats_of

    available = formats_of(reader.plugins)
    print_warnings(available.faults)
    if formats:
        _show_formats(available, json=json)
        return
    if spec is None or output is None:
        raise click.UsageError("a SPEC or `--output FILE` is missing")
    chosen = available.choose(output, format)
    check_file(output, device=False)
    graph = reader.load(spec)
    weights = reader.weights(spec, weights, allow_change=allow_change)
    from tfkit.building.placement import dtype_of
    from tfkit.tools.common.loading_weights import build_with_weights
    from tfkit.tools.export.export import check_format
    from tfkit.tools.export.export import export as write

    with stages() as stage:
        stage(f"checking that {chosen.name} supports it")
        check_format(graph, chosen)
        stage("building")
        kind = None if dtype is None else dtype_of(dtype)
        model = build_with_weights(graph, weights, dtype=kind, allow_change=allow_change)
        exported = write(model, output, format=chosen.name, stage=stage, plugins=reader.plugins)
    if chosen.name == "torchscript":
        click.echo(DEPRECATED, err=True)
    print_json(exported) if json else _print_exported(exported)


def _show_formats(available: Formats, *, json: bool) -> None:
    rows = [
        (format.name, " ".join(format.suffixes), available.plugins[name], format.description)
        for name, format in available.named.items()
    ]
    columns = ["format", "suffixes", "from", "description"]
    if json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_tables(table(columns, rows))


def _print_exported(exported: Exported) -> None:
    rows = [(check.case, f"{check.difference:.1e}") for check in exported.checks]
    head = (
        f"wrote {printable_text(exported.files[0])}: {exported.name} as {exported.format}, {bytes_text(exported.bytes)}"
    )
    further = [f"wrote {printable_text(file)}" for file in exported.files[1:]]
    print_tables(
        head, *further, "", table(["read again and run: batch x length", "difference"], rows, right=["difference"])
    )
