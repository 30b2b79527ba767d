"""Commands about published models: import, tensors, save, compare."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfkit.cli.models import DTYPES, device_of
from tfkit.cli.options import Reader, allow_change_option, command, json_option
from tfkit.errors import printable

if TYPE_CHECKING:
    from tfkit.graph.expand import Graph
    from tfkit.tools.compare import Comparison

ROWS = 12
"""Components that a comparison lists around the place where two models diverge."""


@command(
    "import",
    sets=False,
    notes="""
    CONFIG is a config.json of transformers, or the folder that holds it. The spec
    has the model's graph and the names of its tensors, so that the weights in that
    folder can be loaded: tfkit build SPEC --weights FOLDER. A field whose value no
    spec of the family can have is an error.
    """,
    examples="""
    tfkit import downloads/Llama-3.2-1B -o llama.yaml
    tfkit import config.json --family my_family.yaml
    """,
)
@click.argument("config", metavar="CONFIG", type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Write the spec to this file.")
@click.option("--family", metavar="SPEC", help="The spec that defines the fields.  [default: by model_type]")
@click.option("--name", metavar="NAME", help="The name of the model.  [default: its folder]")
@json_option
def import_(
    reader: Reader, config: Path, output: Path | None, family: str | None, name: str | None, json: bool
) -> None:
    """Make a spec from a config.json."""
    from tfkit.cli.output import print_json
    from tfkit.tools.atomic_files import check_file, write_file
    from tfkit.tools.importing import import_config

    if output is not None:
        check_file(output)
    imported = import_config(config, family=family, name=name, plugins=reader.plugins)
    if output is not None:
        from tfkit.spec.render import schema_line

        write_file(output, schema_line(output.parent) + imported.text)
    if json:
        print_json({"name": imported.graph.name, "family": imported.family, "spec": imported.text})
    elif output is None:
        click.echo(imported.text, nl=False)
    else:
        click.echo(f"wrote {printable(str(output))}: {imported.graph.name}, with the names of {imported.family}")


@command(
    "save",
    notes="""
    The layout `huggingface` is a config.json and the tensors under the names in
    the spec's `checkpoint`: transformers opens DIR with from_pretrained. The
    layout `tfkit` has the tensors under the model's names. Both have the resolved
    spec, and the files of the tokenizer beside the weights.
    """,
    examples="""
    tfkit save gpt2 --weights model.safetensors --layout huggingface -o out
    tfkit save my.yaml --weights downloads/model --layout tfkit -o out
    tfkit save out --layout huggingface -o published
    """,
)
@click.argument("spec")
@click.option(
    "--weights",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="A file or a folder; those of SPEC if it is a folder.",
)
@allow_change_option
@click.option(
    "--layout", required=True, type=click.Choice(["tfkit", "huggingface"]), metavar="NAME", help="tfkit or huggingface."
)
@click.option(
    "-o", "--output", required=True, metavar="DIR", type=click.Path(path_type=Path), help="The folder to write."
)
@click.option(
    "--dtype", type=click.Choice(DTYPES), metavar="TYPE", help="float32, bfloat16 ...  [default: as they are]"
)
@click.option("--force", is_flag=True, help="Replace an existing model in DIR.")
@json_option
def save(
    reader: Reader,
    spec: str,
    weights: Path | None,
    allow_change: bool,
    layout: str,
    output: Path,
    dtype: str | None,
    force: bool,
    json: bool,
) -> None:
    """Write a model's weights in its own layout or a published one."""
    from tfkit.cli import output as out

    graph = reader.load(spec)
    weights = reader.weights(spec, weights, allow_change=allow_change)
    if weights is None:
        raise click.UsageError("there are no weights to save: give --weights, or the folder of a model as SPEC")
    import torch

    from tfkit.tools.save import check_folder
    from tfkit.tools.save import save as write
    from tfkit.tools.weights import build_with_weights

    check_folder(output, force=force, beside=weights)
    with out.stages() as stage:
        stage(f"reading {weights}")
        kind = getattr(torch, dtype) if dtype else None
        model = build_with_weights(graph, weights, dtype=kind, allow_change=allow_change)
        stage(f"writing {output}")
        written = write(model, output, layout=layout, force=force, beside=weights)  # type: ignore[arg-type]
    files = [str(path) for path in written]
    if json:
        out.print_json({"name": graph.name, "layout": layout, "files": files})
    else:
        click.echo("\n".join(f"wrote {printable(file)}" for file in files))


@command(
    "tensors",
    sets=False,
    notes="""
    PATH is a safetensors file, an index, or their folder. Tensors of equal layers
    are one line. Only the headers are read.
    """,
    examples="""
    tfkit tensors downloads/model
    tfkit tensors model.safetensors --json
    """,
)
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@json_option
def tensors(reader: Reader, path: Path, json: bool) -> None:
    """List the tensors of a checkpoint."""
    from tfkit.checkpoint.files import Checkpoint
    from tfkit.checkpoint.mismatch import collapsed
    from tfkit.cli import output as out

    with Checkpoint.open(path) as checkpoint:
        names = checkpoint.names
    kinds = {name: (str(info.dtype).removeprefix("torch."), info.shape) for name, info in names.items()}
    if json:
        out.print_json({name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in kinds.items()})
        return
    rows = [(name, " x ".join(map(str, shape)), dtype) for name, (dtype, shape) in collapsed(kinds)]
    values = sum(prod(info.shape) for info in names.values())
    out.show(out.table(["tensor", "shape", "type"], rows), "", f"{len(names):,} tensors, {values:,} values")


@command(
    "compare",
    notes="""
    A and B are specs; or B is the folder of a transformers model, for which
    transformers must be installed, or a file that torch.jit or torch.export wrote.
    Both read the same tokens. The model of a folder has its own weights, and gives
    them to the other if that has none; otherwise both start from the same seed, or
    have the weights of --weights. Components that cannot be compared are listed
    with the reason.

    Exit status: 0 if the outputs can be compared and no component differs by more
    than the tolerance, else 1.
    """,
    examples="""
    tfkit compare my_model.yaml downloads/model
    tfkit compare gpt2 my_gpt2.yaml --reference float64
    tfkit compare out1 out2
    """,
)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--weights", metavar="PATH", type=click.Path(path_type=Path), help="The weights of both.")
@allow_change_option
@click.option(
    "--length", type=click.IntRange(1), metavar="N", help="Tokens to read.  [default: 16, or as many as both can]"
)
@click.option("--batch", default=2, show_default=True, type=click.IntRange(1), metavar="N", help="Sequences.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), metavar="N", help="Seed of the tokens.")
@click.option(
    "--tolerance",
    default=1e-5,
    show_default=True,
    type=float,
    metavar="X",
    help="Largest difference that counts as equal.",
)
@click.option("--reference", type=click.Choice(["float64"]), metavar="TYPE", help="Run both in float64, too.")
@click.option("--device", default="cpu", show_default=True, metavar="NAME", help="cpu or cuda.")
@json_option
def compare(
    reader: Reader,
    a: str,
    b: str,
    weights: Path | None,
    allow_change: bool,
    length: int | None,
    batch: int,
    seed: int,
    tolerance: float,
    reference: str | None,
    device: str,
    json: bool,
) -> None:
    """Find the first component in which two models differ."""
    from tfkit.cli import output as out

    if device == "meta":
        raise click.UsageError("on the meta device there are no values to compare")
    graph, other = reader.load(a), _other(reader, b)
    own = None if isinstance(other, Path) or weights is not None else reader.weights(b, None)
    source = reader.weights(a, weights, allow_change=allow_change and own is None and not isinstance(other, Path))
    from tfkit.tools.compare import compare as run

    with out.stages() as stage:
        stage("running both")
        found = run(
            graph,
            other,
            weights=source or own,
            other_weights=own,
            allow_change=allow_change or source is None,
            length=length,
            batch=batch,
            seed=seed,
            tolerance=tolerance,
            float64=reference is not None,
            device=device_of(device),
        )
    if json:
        out.print_json({**vars(found), "equal": found.equal})
    else:
        _show_comparison(found)
    if not found.equal:
        raise click.exceptions.Exit(1)


def _other(reader: Reader, b: str) -> Graph | Path:
    """The second model: a spec; or the path of a program, or of a folder that holds a transformers model."""
    from tfkit.spec.load import is_folder

    path = Path(b)
    if is_folder(b, reader.plugins.specs) and ((path / "config.json").exists() or not (path / "spec.yaml").exists()):
        return path
    return path if os.path.isfile(b) and path.suffix not in (".yaml", ".yml") else reader.load(b)


def _show_comparison(found: Comparison) -> None:
    from tfkit.cli.output import show, table

    first = found.first
    at = found.parts.index(first) if first is not None else len(found.parts)
    shown = found.parts[max(0, at - ROWS // 2) : at + ROWS // 2] if first else found.parts[-ROWS:]
    columns = ["component", "of B", "difference", *(["float64"] if found.float64 else [])]
    rows = [
        [part.name, part.other, f"{part.difference:.1e}", *([f"{part.reference:.1e}"] if found.float64 else [])]
        for part in shown
    ]
    show(table(columns, rows, right=columns[2:]), "")
    if left := _not_compared(found):
        show(*left, "")
    returned = "the outputs cannot be compared"
    if found.difference is not None:
        returned = f"largest difference of the outputs: {found.difference:.1e}"
    click.echo(f"{len(found.parts)} components compared; {returned}")
    if found.equal:
        click.echo(f"equal to {found.tolerance:g}")
    if first is not None:
        place = ", ".join(map(str, first.place))
        click.echo(
            f"they diverge at {first.name}: {first.values[0]:.6g} in A, {first.values[1]:.6g} in B, at [{place}]"
        )


def _not_compared(found: Comparison) -> list[str]:
    """A line for each component that cannot be compared, equal layers in one."""
    from tfkit.checkpoint.mismatch import collapsed

    lines = [f"not compared: {name}: {why}" for name, why in collapsed({one.name: one.reason for one in found.unlike})]
    for which, names in zip("AB", found.alone, strict=True):
        lines += [f"only in {which}: {name}" for name, _ in collapsed(dict.fromkeys(names))]
    more = [f"and {len(lines) - ROWS} more, see --json"] if len(lines) > ROWS else []
    return [*lines[:ROWS], *more]
