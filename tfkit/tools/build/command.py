"""Build a model, run it once, and show its components."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.console import options
from tfkit.console.commands import Reader, command, print_warnings
from tfkit.console.completion import complete_spec
from tfkit.console.output import print_json, print_tables, stages, table, warnings_as_text
from tfkit.errors import FirstLossWarning, printable_text
from tfkit.tools.common.units import bytes_text, count_text

if TYPE_CHECKING:
    from tfkit.tools.build.first_run import FirstRun


@command(
    "build",
    section="Models",
    order=110,
    notes="""
    The forward runs on random inputs: 2 sequences of 16 tokens, or of `max_len` if
    that is less. With -o, DIR gets the resolved spec as spec.yaml, the weights as
    model.safetensors and the files next to --weights, such as the tokenizer, all or
    nothing. Every command takes such a folder as SPEC, and reads its weights.
    """,
    examples="""
    tfkit build gpt2
    tfkit build my_model.yaml -o out --dtype bfloat16 --seed 1
    tfkit build out
    tfkit build llama3_405b --device meta
    """,
)
@click.argument("spec", shell_complete=complete_spec)
@options.output_option("DIR", "Write the model to this folder.")
@click.option("--force", is_flag=True, help="Replace an existing model in DIR.")
@options.weights_option(otherwise="random")
@options.allow_change_option
@options.device_option("cpu, cuda, or meta: shapes, no values.")
@options.dtype_option("float32, bfloat16, float16 or float64.  [default: float32, or the type of the weights]")
@options.seed_option("Seed of the random numbers.")
@options.json_option
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
    from tfkit.tools.common.plugin_checks import warnings_of

    if force and output is None:
        raise click.UsageError("--force has no effect without -o")
    if weights is not None and device == "meta":
        raise click.UsageError("the meta device cannot hold weights: omit --weights or --device meta")
    if output is not None and device == "meta":
        raise click.UsageError("a model on the meta device has no weights to write: omit -o or --device meta")
    graph = reader.load(spec)
    print_warnings(warnings_of(graph, reader.plugins))
    if device != "meta":
        weights = reader.weights(spec, weights, allow_change=allow_change)
    import torch

    from tfkit.tools.build.first_run import first_run
    from tfkit.tools.common.companions import Companions
    from tfkit.tools.save.layouts import layouts_of
    from tfkit.tools.save.save import save

    if output is not None:
        companions = Companions.read(weights, graph.spec.family)
        layouts_of(reader.plugins).check_folder(output, force=force, companions=companions)
    with warnings_as_text(FirstLossWarning), stages() as stage:
        kind = None if dtype is None else getattr(torch, dtype)
        build_options: dict[str, Any] = {"dtype": kind, "seed": seed, "weights": weights, "allow_change": allow_change}
        model, run = first_run(graph, device=options.device_of(device), stage=stage, **build_options)
        files: list[str] = []
        if output is not None:
            stage(f"writing {output}")
            files = [str(path) for path in save(model, output, force=force, files_from=weights, plugins=reader.plugins)]
    if json:
        print_json({**vars(run), "files": files})
    else:
        _show_run(run, files)


def _show_run(run: FirstRun, files: Sequence[str]) -> None:
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
    total = f"{run.parameters:,} parameters ({count_text(run.parameters)}), {bytes_text(run.bytes)} in {run.dtype}"
    times = f"built on {run.device} in {run.build_time:.2f} s, one forward in {run.forward_time:.2f} s"
    print_tables(table(["node", "block", "reads", "output", "parameters"], rows, right=["parameters"]))
    click.echo(f"\n{run.code}\n")  # `show` breaks long lines
    print_tables(total, times, *(f"wrote {printable_text(file)}" for file in files))
