"""Find the first component in which two models differ."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.console import options
from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_spec
from tfkit.console.output import print_json, print_tables, stages, table

if TYPE_CHECKING:
    from tfkit.graph.expand import Graph
    from tfkit.tools.compare.comparison import Comparison

ROWS = 12
"""Components that a comparison lists around the place where two models diverge."""


@command(
    "compare",
    section="Published models",
    order=340,
    notes="""
    A and B are specs; or B is the folder of a transformers model, for which
    transformers must be installed, or a file that torch.jit or torch.export wrote.
    Both read the same tokens. The model of a folder has the weights in that folder;
    if the other model has none, it uses them as well. Otherwise both start from the
    same seed, or have the weights of --weights. Both run in float32 by default, in
    which rounding stays below the tolerance. Components that cannot be compared are
    listed with the reason.

    Exit status: 0 if the outputs can be compared and no component differs by more
    than the tolerance, else 1.
    """,
    examples="""
    tfkit compare my_model.yaml downloads/model
    tfkit compare gpt2 my_gpt2.yaml --reference float64
    tfkit compare out1 out2
    """,
)
@click.argument("a", metavar="A", shell_complete=complete_spec)
@click.argument("b", metavar="B", shell_complete=complete_spec)
@options.weights_option("Safetensors for both")
@options.allow_change_option
@options.count_option("--length", "Tokens to read.  [default: 16, or as many as both can]")
@options.count_option("--batch", "Sequences.", default=2)
@options.seed_option("Seed of the tokens.")
@click.option(
    "--tolerance",
    default=1e-5,
    show_default=True,
    type=options.FiniteRange(0),
    metavar="X",
    help="Largest difference that counts as equal.",
)
@click.option(
    "--reference", type=click.Choice(["float64"]), metavar="TYPE", help="Also run both in this type: float64."
)
@options.device_option("cpu or cuda.")
@options.dtype_option("Type of both: float32, bfloat16 ...", default="float32")
@options.json_option
def compare(
    reader: Reader,
    a: str,
    b: str,
    weights: Path | None,
    allow_change: bool,
    reference: str | None,
    device: str,
    json: bool,
    **arguments: Any,
) -> None:
    if device == "meta":
        raise click.UsageError("on the meta device there are no values to compare")
    graph, other = reader.load(a), _second_model(reader, b)
    has_weights = weights or graph.weights or isinstance(other, Path) or other.weights
    if allow_change and not has_weights:
        raise click.UsageError("--allow-change has no effect without weights")
    from tfkit.tools.compare.comparison import compare as run

    with stages() as stage:
        stage("running both")
        comparison = run(
            graph,
            other,
            weights=weights,
            allow_change=allow_change,
            float64=reference is not None,
            device=options.device_of(device),
            **arguments,
        )
    if json:
        print_json({**vars(comparison), "equal": comparison.equal})
    else:
        _show_comparison(comparison)
    if not comparison.equal:
        raise click.exceptions.Exit(1)


def _second_model(reader: Reader, b: str) -> Graph | Path:
    """Return the second model: a spec; or the path of a program, or of a folder that holds a transformers model."""
    from tfkit.console.hub import local_path
    from tfkit.spec.extending import is_folder
    from tfkit.spec.folder import holds_code, model_folder

    path = model_folder(local_path(Path(b)))
    has_config, has_spec = (os.path.exists(path / name) for name in ("config.json", "spec.yaml"))
    if is_folder(str(path), reader.plugins.specs) and (has_config or not has_spec) and not holds_code(path):
        return path
    return path if os.path.isfile(b) and path.suffix not in (".yaml", ".yml") else reader.load(b)


def _show_comparison(comparison: Comparison) -> None:
    first = comparison.first
    at = comparison.parts.index(first) if first is not None else len(comparison.parts)
    parts = comparison.parts[max(0, at - ROWS // 2) : at + ROWS // 2] if first else comparison.parts[-ROWS:]
    columns = ["component", "of B", "difference", *(["float64"] if comparison.float64 else [])]
    rows = [
        [part.name, part.other, f"{part.difference:.1e}", *([f"{part.reference:.1e}"] if comparison.float64 else [])]
        for part in parts
    ]
    if rows:
        print_tables(table(columns, rows, right=columns[2:]), "")
    if left := _not_compared(comparison):
        print_tables(*left, "")
    returned = "the outputs cannot be compared"
    if comparison.difference is not None:
        returned = f"largest difference of the outputs: {comparison.difference:.1e}"
    count = len(comparison.parts)
    click.echo(f"{count or 'no'} component{'s' * (count != 1)} compared; {returned}")
    if comparison.equal:
        click.echo(f"equal to {comparison.tolerance:g}")
    if first is not None:
        location = ", ".join(map(str, first.index))
        click.echo(
            f"they diverge at {first.name}: {first.values[0]:.6g} in A, {first.values[1]:.6g} in B, at [{location}]"
        )


def _not_compared(comparison: Comparison) -> list[str]:
    """Return a line for each component that cannot be compared; equal layers share a line."""
    from tfkit.checkpoint.tensor_names import collapsed_layers

    lines = [
        f"not compared: {name}: {why}"
        for name, why in collapsed_layers({part.name: part.reason for part in comparison.unlike})
    ]
    forms = collapsed_layers({part.name: "a multiple, or what is computed from it agrees" for part in comparison.forms})
    lines += [f"in another form: {name}: {why}" for name, why in forms]
    for which, names in zip("AB", comparison.alone, strict=True):
        lines += [f"only in {which}: {name}" for name, _ in collapsed_layers(dict.fromkeys(names))]
    more = [f"and {len(lines) - ROWS} more, see --json"] if len(lines) > ROWS else []
    return [*lines[:ROWS], *more]
