"""List the tensors of a checkpoint."""

from __future__ import annotations

from math import prod
from pathlib import Path

import click

from tfkit.console.commands import Reader, command
from tfkit.console.options import json_option
from tfkit.console.output import print_json, print_tables, table


@command(
    "tensors",
    section="Published models",
    order=320,
    sets=False,
    notes="""
    PATH is a safetensors file, an index, or their folder. Tensors of equal layers
    are one line. The tensors of an adapter follow the tensors that it changes.
    Only the headers are read.
    """,
    examples="""
    tfkit tensors downloads/model
    tfkit tensors model.safetensors --json
    """,
)
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@json_option
def tensors(reader: Reader, path: Path, json: bool) -> None:
    from tfkit.arguments import name_of
    from tfkit.checkpoint.files import TensorFiles
    from tfkit.checkpoint.tensor_names import collapsed_layers

    with TensorFiles.open(path) as checkpoint:
        names = dict(checkpoint.names)
        for adapter in checkpoint.adapters:
            names |= adapter.names
    kinds = {name: (name_of(info.dtype), info.shape) for name, info in names.items()}
    if json:
        print_json({name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in kinds.items()})
        return
    rows = [(name, " x ".join(map(str, shape)), dtype) for name, (dtype, shape) in collapsed_layers(kinds)]
    values = sum(prod(info.shape) for info in names.values())
    print_tables(table(["tensor", "shape", "type"], rows), "", f"{len(names):,} tensors, {values:,} values")
