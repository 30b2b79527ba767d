"""Write a model to a file that runs without tfkit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfkit.console.commands import command
from tfkit.console.options import Reader, allow_change_option, dtype_option, json_option, weights_option
from tfkit.errors import printable

if TYPE_CHECKING:
    from tfkit.tools.export.export import Exported
    from tfkit.tools.export.formats import FormatName

FORMAT_NAMES = ("torchscript", "pt2", "aoti", "onnx", "safetensors")
DEPRECATED = "note: torch no longer develops TorchScript; if C++ can load it, --format pt2 is its successor"


@command(
    "export",
    notes="""
    torchscript  loaded by C++ without Python, see tools/cpp; with cached decoding
    pt2          torch.export: programs of tensor operations, loaded by torch
    aoti         pt2 compiled for this machine by AOTInductor
    onnx         for onnxruntime
    safetensors  the weights by the model's own names, and the spec

    Batch and lengths are free, padding masks are inputs. FILE is read again and
    compared with the model at shapes that it was not made with; if it differs,
    the first component that does is named, and nothing is written.
    """,
    examples="""
    tfkit export gpt2 --weights model.safetensors -o gpt2.pt2
    tfkit export gpt2 --weights model.safetensors --format aoti -o gpt2.pt2
    tfkit export t5_small --weights downloads/t5 --format torchscript -o t5.pt
    """,
)
@click.argument("spec")
@click.option(
    "-o", "--output", required=True, metavar="FILE", type=click.Path(path_type=Path), help="The file to write."
)
@click.option(
    "--format",
    type=click.Choice(FORMAT_NAMES),
    metavar="NAME",
    help="See below.  [default: .ts, .pt2, .onnx, .safetensors]",
)
@weights_option("Safetensors, a file or folder; random unless given.")
@allow_change_option
@dtype_option("float32, bfloat16 ...  [default: that of the weights]")
@json_option
def export(
    reader: Reader,
    spec: str,
    output: Path,
    format: FormatName | None,
    weights: Path | None,
    allow_change: bool,
    dtype: str | None,
    json: bool,
) -> None:
    from tfkit.console import output as out
    from tfkit.tools.common.atomic_files import check_file
    from tfkit.tools.export.formats import name_by_suffix

    format = format or name_by_suffix(output)
    check_file(output, device=False)
    graph = reader.load(spec)
    weights = reader.weights(spec, weights, allow_change=allow_change)
    import torch

    from tfkit.builder import build
    from tfkit.tools.common.weights import build_with_weights
    from tfkit.tools.export.export import check_format
    from tfkit.tools.export.export import export as write

    with out.stages() as stage:
        stage(f"checking that {format} supports it")
        check_format(graph, format)
        stage("building")
        kind = None if dtype is None else getattr(torch, dtype)
        if weights is None:
            model = build(graph, dtype=kind)
        else:
            model = build_with_weights(graph, weights, dtype=kind, allow_change=allow_change)
        exported = write(model, output, format=format, stage=stage)
    if format == "torchscript":
        click.echo(DEPRECATED, err=True)
    if json:
        out.print_json(exported)
    else:
        _show(exported)


def _show(exported: Exported) -> None:
    from tfkit.console.output import show, table
    from tfkit.tools.common.units import bytes_text

    rows = [(check.case, f"{check.difference:.1e}") for check in exported.checks]
    head = f"wrote {printable(exported.files[0])}: {exported.name} as {exported.format}, {bytes_text(exported.bytes)}"
    others = [f"wrote {printable(file)}" for file in exported.files[1:]]
    show(head, *others, "", table(["read again and run: batch x length", "difference"], rows, right=["difference"]))
