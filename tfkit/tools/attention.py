"""Draw which keys each query of a model attends to, layer by layer and head by head, as SVG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfkit.console import options
from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_spec
from tfkit.console.output import print_json, print_tables, stages
from tfkit.errors import Diagnostic, SpecError, listing, printable_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tfkit.graph.expand import Graph
    from tfkit.tools.common.heat_map import HeatMap

PER_LINE = 4
"""Number of heads next to each other."""


@command(
    "attention",
    section="Tools",
    order=440,
    notes="""
    Each map is a head: rows are queries, columns are keys, and the darkest colour
    is a weight of 1. SPEC may be the folder of a model with its weights. The
    tokenizer is the `tokenizer.json` or `chars.json` next to the weights by
    default; a text file stands for its characters. In Python,
    `tfkit.attention_weights` returns the weights, also of models with several
    inputs.
    """,
    examples="""
    tfkit attention out --prompt "To be, or not" -o attention.svg
    tfkit attention gpt2 --weights model.safetensors --tokens 464,3290 \\
        --layer 0 --layer 5 -o attention.svg
    """,
)
@click.argument("spec", shell_complete=complete_spec)
@options.weights_option(otherwise="random")
@options.allow_change_option
@click.option("--tokenizer", type=click.Path(path_type=Path), metavar="FILE", help="Text to tokens and back.")
@click.option("--prompt", metavar="TEXT", help="Text to read.")
@click.option("--tokens", metavar="IDS", help="Token ids to read, instead of a text.")
@options.count_option("--layer", "A layer, from 0; repeatable.  [default: all]", minimum=0, multiple=True)
@options.output_option("FILE", "The file: a name that ends in .svg.", required=True, dir_okay=False)
@options.json_option
def attention(
    reader: Reader,
    spec: str,
    weights: Path | None,
    allow_change: bool,
    tokenizer: Path | None,
    prompt: str | None,
    tokens: str | None,
    layer: tuple[int, ...],
    output: Path,
    json: bool,
) -> None:
    if (prompt is None) == (tokens is None):
        raise click.UsageError("a text must be read: add either --prompt or --tokens")
    if tokens is not None and tokenizer is not None:
        raise click.UsageError("--tokens cannot be combined with --tokenizer")
    if output.suffix != ".svg":
        raise click.BadParameter(f"`{output.name}` must end in .svg", param_hint="--output")
    from tfkit.tools.common.atomic_files import check_file, write_file
    from tfkit.tools.common.heat_map import heat_map_picture
    from tfkit.tools.common.loading_weights import build_with_weights
    from tfkit.tools.generate.prompts import check_vocabulary, tokenizer_of

    check_file(output)
    graph = reader.load(spec)
    name = _token_input(graph)
    path = reader.weights(spec, weights, allow_change=allow_change)
    text_tokenizer = tokenizer_of(tokenizer, path, numbers=tokens is not None)
    check_vocabulary(text_tokenizer, graph, name)
    if path is None:
        click.echo("warning: without --weights the model is random, and so is its attention", err=True)
    try:
        ids = text_tokenizer.encode(tokens or prompt or "")
        if not ids:
            raise ValueError("a text must have at least one token")
        with stages() as stage:
            stage("building")
            model = build_with_weights(graph, path, allow_change=allow_change)
            import torch

            from tfkit.tools.trace.attention_weights import attention_weights

            patterns = attention_weights(model, **{name: torch.tensor([ids], dtype=torch.long)})
    except SpecError:
        raise
    except ValueError as error:  # of the text: too long, not in the vocabulary; or of an attention without weights
        raise SpecError(Diagnostic(str(error))) from error
    patterns = _of_layers(patterns, layer)
    labels = [text_tokenizer.decode([token]) for token in ids] if tokens is None else [str(token) for token in ids]
    title = f"attention of {graph.name}"
    write_file(
        output, heat_map_picture(title, list(_head_maps(patterns, labels)), per_line=PER_LINE, square=True, maximum=1.0)
    )
    if json:
        print_json({"file": str(output), "attentions": list(patterns)})
    else:
        heads = sum(weights.size(1) for weights in patterns.values())
        print_tables(f"wrote {printable_text(str(output))}: {heads} heads, {len(ids)} tokens")


def _token_input(graph: Graph) -> str:
    """Return the input of tokens; raise SpecError if the model needs further inputs."""
    names = [name for name, signal in graph.inputs.items() if not signal.optional]
    if len(names) == 1 and graph.inputs[names[0]].type == "tokens":
        return names[0]
    message = f"`{graph.name}` must read tokens alone; its inputs are {listing(f'`{name}`' for name in names)}"
    raise SpecError(Diagnostic(message, help="call `tfkit.attention_weights` in Python"))


def _of_layers(patterns: dict[str, Tensor], layers: tuple[int, ...]) -> dict[str, Tensor]:
    """Select attentions by the numbers of their layers; raise SpecError for a layer without attention."""
    for layer in layers:
        if not any(f".layers.{layer}." in name for name in patterns):
            raise SpecError(Diagnostic(f"layer {layer} has no attention", notes=(f"attentions: {listing(patterns)}",)))
    selected = {f".layers.{layer}." for layer in layers}
    return {name: x for name, x in patterns.items() if not layers or any(part in name for part in selected)}


def _head_maps(patterns: dict[str, Tensor], labels: list[str]) -> Iterator[HeatMap]:
    from tfkit.tools.common.heat_map import HeatMap

    for name, weights in patterns.items():
        for head, of_head in enumerate(weights[0].tolist()):
            rows, columns = (_position_labels(labels, size) for size in weights.shape[2:])
            yield HeatMap(f"{name} {head}", of_head, rows, columns)


def _position_labels(tokens: list[str], size: int) -> list[str]:
    """Return a label for each position; positions of a different sequence than the tokens have numbers."""
    return [printable_text(token) for token in tokens] if len(tokens) == size else [str(index) for index in range(size)]
