"""Draw samples from a model that a run trained by flow matching."""

from __future__ import annotations

import io
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.console import options
from tfkit.console.commands import Reader, command
from tfkit.console.output import print_json, print_tables, stages
from tfkit.errors import Diagnostic, SpecError, printable_text, quoted

if TYPE_CHECKING:
    from tfkit.run.contract import LossConfig

LOSS = "flow_matching"


@command(
    "sample",
    section="Models",
    order=135,
    notes="""
    RUN is the folder of a run with the loss `flow_matching`. The samples are an
    array [samples, ...] in the units of the model's input, such as standardized
    pixels. With several --label, the samples take them in turn. A sample depends
    only on the weights, its label, the seed and its number.
    """,
    examples="""
    tfkit sample out -o samples.npy
    tfkit sample out --samples 8 --label 3 --guidance 2 --steps 20 \\
        --method heun -o threes.npy
    """,
)
@click.argument("run", metavar="RUN")
@options.weights_option(otherwise="the latest checkpoint of the run")
@options.allow_change_option
@options.count_option("--samples", "Number of samples.", default=16)
@options.count_option("--steps", "Number of steps from the noise to a sample.", default=50)
@click.option(
    "--method",
    type=click.Choice(["euler", "heun"]),
    default="euler",
    show_default=True,
    metavar="NAME",
    help="euler, or heun, which calls the model twice in each step.",
)
@options.count_option("--label", "A class, from 0; repeatable.  [default: no class]", minimum=0, multiple=True)
@click.option(
    "--guidance",
    type=options.FiniteRange(0, 1000),
    default=1.0,
    show_default=True,
    metavar="X",
    help="Above 1, samples are more typical of their class; it needs a run with `drop`.",
)
@options.count_option("--length", "Positions of a sample, if the model does not determine them.")
@options.seed_option("Seed of the noise.")
@options.device_option("cpu, cuda or mps.")
@options.output_option("FILE", "The file: a name that ends in .npy.", required=True, dir_okay=False)
@options.json_option
def sample(reader: Reader, run: str, output: Path, json: bool, **arguments: Any) -> None:
    if arguments["guidance"] != 1 and not arguments["label"]:
        raise click.UsageError("--guidance has no effect without a class: add a --label")
    if output.suffix != ".npy":
        raise click.BadParameter(f"`{output.name}` must end in .npy", param_hint="--output")
    import numpy as np

    from tfkit.tools.common.atomic_files import check_file, write_file

    check_file(output)
    loss = _loss_of(reader, run, guided=arguments["guidance"] != 1)
    samples = _samples(reader, run, loss, **arguments)
    contents = io.BytesIO()
    np.save(contents, samples.cpu().numpy(), allow_pickle=False)
    write_file(output, contents.getvalue())
    shape = list(samples.shape)
    if json:
        print_json({"file": str(output), "shape": shape})
    else:
        print_tables(f"wrote {printable_text(str(output))}: {shape[0]} samples {shape[1:]}")


def _loss_of(reader: Reader, run: str, *, guided: bool) -> LossConfig:
    """Return the loss of a run, without reading its data. Raise SpecError unless it is flow matching."""
    from tfkit.run.read_run import RunText
    from tfkit.run.run_spec import RunSpec
    from tfkit.spec.read_document import find_document, resolve_document

    text = RunText.read(find_document(run, RunSpec, reader.plugins.specs), reader.plugins, sets=reader.sets)
    config, provenance = resolve_document(text.root, RunSpec, reader.plugins)
    loss: Any = config.loss
    if loss.kind_name() != LOSS:
        message = f"samples must come from a run with the loss `{LOSS}`; {quoted(run)} has `{loss.kind_name()}`"
        help = "generate texts by `tfkit generate`; for losses of plugins, call `tfkit.sample_flow` in Python"
        raise SpecError(Diagnostic(message, provenance.span(("loss",)), "loss", help=help))
    if guided and not loss.drop:
        message = "`--guidance` must have a model that was also trained without classes; the run has `drop: 0`"
        raise SpecError(Diagnostic(message, provenance.span(("loss",)), "loss.drop", help="train with `drop: 0.1`"))
    return config.loss


def _samples(
    reader: Reader, run: str, loss: Any, *, weights: Path | None, allow_change: bool, device: str, **arguments: Any
) -> Any:
    from tfkit.building.instrument import instrument_model
    from tfkit.decoding.flow import FlowModel, sample_flow
    from tfkit.tools.common.loading_weights import build_with_weights

    target = options.device_of(device)
    if target.type == "meta":
        raise click.UsageError("a model on the meta device cannot draw samples: it has no values")
    graph = reader.load(run)
    path = reader.weights(run, weights, allow_change=allow_change)
    if path is None:
        message = f"{quoted(run)} has no weights"
        raise SpecError(Diagnostic(message, help="name the folder of a trained run, or add --weights"))
    reader.warn_about(path, graph)
    n_samples, labels = arguments.pop("samples"), arguments.pop("label")
    with stages() as stage:
        stage(f"reading {path}")
        model = instrument_model(build_with_weights(graph, path, device=target, allow_change=allow_change))
        stage("sampling")
        try:
            flow = FlowModel(model, time=loss.time, label=loss.label, scale=loss.scale)
            classes = list(islice(cycle(labels), n_samples)) or None
            return sample_flow(flow, n_samples, labels=classes, **arguments)
        except ValueError as error:
            raise SpecError(Diagnostic(str(error))) from error
