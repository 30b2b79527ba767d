"""Start a larger model that computes the same function as a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_spec
from tfkit.console.options import FiniteRange, count_option, json_option, output_option, seed_option
from tfkit.console.output import print_json, print_tables, stages, table
from tfkit.errors import printable_text
from tfkit.tools.common.units import count_text

if TYPE_CHECKING:
    from tfkit.graph.expand import Graph
    from tfkit.tools.grow.growth import GrownStart


RUN_SUFFIXES = (".yaml", ".yml")


@command(
    "grow",
    section="Training",
    order=225,
    sets=False,
    notes="""
    SPEC is the folder of a run or of a model. Each change is a path and a value of
    its spec, such as decoder.n_layers=8; d_model=512 is for all of them. Both
    models are evaluated in float64 on random inputs after each change, and the
    table has the largest difference of their outputs, relative to the largest
    output. A change is exact if the difference is at most 1e-12. The larger model
    in float64 must fit into memory next to the weights of the model. For a spec
    without weights, random weights show which changes are exact.

    With -o FILE.yaml, the result is a run with the settings of the run in SPEC and
    a map of its weights. Otherwise it is a folder with the larger model. The state
    of the optimizer starts at zero; with --states, it grows with the weights.
    docs/growing.md lists the exact changes.
    """,
    examples="""
    tfkit grow runs/base decoder.n_layers=8 d_ff=2048 -o larger.yaml
    tfkit grow runs/base n_layers=12 --states -o deeper.yaml
    tfkit grow downloads/model d_model=1024 n_heads=16 -o larger
    tfkit grow char_swiglu decoder.attention.d_head=64
    """,
)
@click.argument("spec", shell_complete=complete_spec)
@click.argument("changes", nargs=-1, required=True, metavar="PATH=VALUE...")
@output_option("PATH", "The run file (.yaml) or the folder to write.")
@click.option(
    "--noise",
    type=FiniteRange(0),
    default=0.0,
    show_default=True,
    metavar="X",
    help="Noise of repeated weights, relative to the standard deviation of each.",
)
@click.option("--states", is_flag=True, help="Grow the state of the optimizer, too.")
@count_option("--length", "Tokens of the random inputs.  [default: 16, or max_len]")
@seed_option("Seed of new weights, noise and random inputs.")
@click.option("--force", is_flag=True, help="Replace an existing model in the folder.")
@json_option
def grow(
    reader: Reader,
    spec: str,
    changes: tuple[str, ...],
    output: Path | None,
    noise: float,
    states: bool,
    length: int | None,
    seed: int,
    force: bool,
    json: bool,
) -> None:
    is_run = output is not None and output.suffix in RUN_SUFFIXES
    _check_effect(output, force=force, noise=noise, states=states)
    graph = reader.load(spec)
    _check_length(length, graph)
    if output is not None and graph.weights is None:
        raise click.UsageError("there are no weights to grow: use the folder of a run or of a model as SPEC")
    from tfkit.tools.common.companions import Companions
    from tfkit.tools.grow.growth import grow as find_growth
    from tfkit.tools.params.count import count_params
    from tfkit.tools.save.layouts import layouts_of

    if output is not None and not is_run:
        companions = Companions.read(graph.weights, graph.spec.family)
        layouts_of(reader.plugins).check_folder(output, force=force, companions=companions)
    with stages() as stage:
        growth = find_growth(graph, changes, reader.plugins, seed=seed, length=length, on_step=stage)
        files = [] if output is None else _write(reader, spec, graph, growth, output, noise, seed, states, force)
    counts = [count_params(item).total for item in (graph, growth.graph)]
    if json:
        values = {name: getattr(growth, name) for name in ("steps", "difference", "exact", "weights")}
        values |= {"states": growth.states if states else (), "noise": noise, "files": files}
        print_json({"name": graph.name, "parameters": counts, **values})
    else:
        _show(graph.name, growth, counts, noise, files)
        if is_run:
            click.echo(_states_text(growth, states=states))


def _check_effect(output: Path | None, *, force: bool, noise: float, states: bool) -> None:
    """Raise `click.UsageError` for an option without effect on what is written."""
    is_run = output is not None and output.suffix in RUN_SUFFIXES
    for name, value in (("force", force), ("noise", noise)):
        if value and (output is None or is_run):
            raise click.UsageError(f"--{name} has no effect without a folder to write: -o DIR")
    if states and not is_run:
        raise click.UsageError("--states has no effect without a run to write: -o FILE.yaml")


def _check_length(length: int | None, graph: Graph) -> None:
    from tfkit.graph.input_shapes import max_len

    if length is not None and length > (max_len(graph) or length):
        raise click.UsageError(f"--length must be at most `max_len`, {max_len(graph)}; got {length}")


def _write(
    reader: Reader,
    spec: str,
    graph: Graph,
    growth: GrownStart,
    output: Path,
    noise: float,
    seed: int,
    states: bool,
    force: bool,
) -> list[str]:
    from tfkit.tools.grow.files import grown_model, write_run
    from tfkit.tools.save.save import save

    if output.suffix in RUN_SUFFIXES:
        write_run(Path(spec), growth, graph, output, reader.plugins, states=states)
        return [str(output)]
    model = grown_model(growth, graph, seed=seed, noise=noise)
    written = save(model, output, force=force, files_from=graph.weights, plugins=reader.plugins)
    return [str(path) for path in written]


def _states_text(growth: GrownStart, *, states: bool) -> str:
    """Describe the state of the optimizer at the start of the run."""
    if not states:
        return "optimizer: the state starts at zero; `--states` grows it"
    count = f"{growth.n_states:,} of {growth.n_weights:,} weights"
    rest = ", else it is zero" if growth.n_states < growth.n_weights else ""
    return f"optimizer: the state grows for {count}{rest}"


def _show(name: str, growth: GrownStart, counts: Sequence[int], noise: float, files: Sequence[str]) -> None:
    rows = [(step.change, step.rule, f"{step.difference:.1e}", "yes" if step.exact else "no") for step in growth.steps]
    exact = "yes" if growth.exact else "no"
    rows.append(("all changes", "", f"{growth.difference:.1e}", exact))
    lines = table(["change", "new weights", "difference", "exact"], rows, right=["difference"], footer=1)
    old, new = (f"{count:,} ({count_text(count)})" for count in counts)
    notes = [f"noise: {noise:g} of the standard deviation of {len(growth.repeated)} weights with repeated values"]
    print_tables(f"{name}: {old} -> {new} parameters", "", lines, *(["", *notes] if noise else []))
    if files:
        click.echo("\n".join(["", *(f"wrote {printable_text(file)}" for file in files)]))
