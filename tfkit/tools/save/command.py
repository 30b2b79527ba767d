"""Write a model's weights in the layout of tfkit or in a published layout."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from tfkit.console.commands import Reader, command, print_warnings
from tfkit.console.completion import complete_spec, reader_of
from tfkit.console.options import allow_change_option, dtype_option, json_option, output_option, weights_option
from tfkit.console.output import print_json, stages
from tfkit.errors import SpecError, printable_text


def _complete_layout(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    from tfkit.tools.save.layouts import layouts_of

    try:
        layouts = layouts_of(reader_of(context).loaded).named.values()
    except SpecError:  # the command reports the error
        return []
    return [
        CompletionItem(layout.name, help=layout.description) for layout in layouts if layout.name.startswith(incomplete)
    ]


@command(
    "save",
    section="Published models",
    order=330,
    notes="""
    The layout `huggingface` is a config.json and the tensors under the names in
    the spec's `checkpoint`: transformers opens DIR with from_pretrained. The
    layout `transformers` is also for specs without a `checkpoint`: DIR has the
    model's code, plugins included, and opens with trust_remote_code=True. It is
    opened and compared before it is kept. The layout `tfkit` has the tensors
    under the model's names, and the layout `peft` only the adapter of a folder
    that has one, for PEFT. The layout `sentence_transformers` is the layout
    `transformers` of an encoder of texts, with the modules that pool its
    vectors. All have the resolved spec, and the files next to the
    weights unchanged: tokenizer, chat template, generation config, processors.
    The fields of config.json that no spec contains, such as eos_token_id, are
    kept as well. A warning names the files that are not copied.
    With --names llama, the layout `transformers` has separate projections
    under the names of Llama, such as self_attn.q_proj, on which LoRA recipes,
    quantization configs and parallel plans depend.
    """,
    examples="""
    tfkit save gpt2 --weights model.safetensors --layout huggingface -o out
    tfkit save my.yaml --weights downloads/model --layout tfkit -o out
    tfkit save out --layout huggingface -o published
    tfkit save runs/mine --layout transformers -o hub
    tfkit save runs/mine --layout transformers --names llama -o hub
    """,
)
@click.argument("spec", shell_complete=complete_spec)
@weights_option(otherwise="SPEC's own")
@allow_change_option
@click.option("--allow-drop", is_flag=True, help="Write huggingface without the tensors that the model omits.")
@click.option(
    "--layout",
    required=True,
    metavar="NAME",
    shell_complete=_complete_layout,
    help="tfkit, huggingface, peft, transformers, sentence_transformers, or the layout of a plugin.",
)
@click.option(
    "--names",
    metavar="NAMES",
    help="llama: write transformers with the names and projections of Llama.  [default: the model's names]",
)
@output_option("DIR", "The folder to write.", required=True)
@dtype_option("float32, bfloat16 ...  [default: unchanged]")
@click.option("--force", is_flag=True, help="Replace an existing model in DIR.")
@json_option
def save(
    reader: Reader,
    spec: str,
    weights: Path | None,
    allow_change: bool,
    allow_drop: bool,
    layout: str,
    names: str | None,
    output: Path,
    dtype: str | None,
    force: bool,
    json: bool,
) -> None:
    from tfkit.tools.save.layouts import layouts_of

    layouts = layouts_of(reader.plugins)
    print_warnings(layouts.faults)
    drops = layouts.choose(layout, names).drops
    graph = reader.load(spec)
    weights = reader.weights(spec, weights, allow_change=allow_change)
    if weights is None:
        raise click.UsageError("there are no weights to save: add --weights, or use the folder of a model as SPEC")
    if allow_drop and not drops:
        raise click.UsageError(f"--allow-drop has no effect in the layout {layout}")
    import torch

    from tfkit.tools.common.companions import Companions
    from tfkit.tools.common.loading_weights import build_with_weights, check_weights
    from tfkit.tools.save.save import save as write

    layouts.check_folder(output, force=force, companions=Companions.read(weights, graph.spec.family))
    if not allow_change:
        check_weights(weights)
    reader.warn_about(weights, graph)
    with stages() as stage:
        stage(f"reading {weights}")
        kind = getattr(torch, dtype) if dtype else None
        model = build_with_weights(graph, weights, dtype=kind, allow_change=allow_change)
        stage(f"writing {output}")
        written = write(
            model,
            output,
            layout=layout,
            force=force,
            files_from=weights,
            allow_drop=allow_drop,
            names=names,
            plugins=reader.plugins,
        )
    files = [str(path) for path in written]
    if json:
        print_json({"name": graph.name, "layout": layout, "files": files})
    else:
        click.echo("\n".join(f"wrote {printable_text(file)}" for file in files))
