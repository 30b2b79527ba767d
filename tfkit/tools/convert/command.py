"""Convert weights of Meta, litgpt, nanoGPT and old files of PyTorch to safetensors."""

from __future__ import annotations

from pathlib import Path

import click

from tfkit.console.commands import Reader, command, print_warnings
from tfkit.console.options import json_option, output_option
from tfkit.console.output import print_json, stages
from tfkit.errors import printable_text


@command(
    "convert",
    section="Published models",
    order=305,
    sets=False,
    notes="""
    SOURCE is a folder with one of these, or the file itself:
      pytorch_model.bin, or its shards    transformers
      consolidated.00.pth, params.json    Meta's Llama
      lit_model.pth, model_config.yaml    litgpt: Llama, Qwen2 or GPT-NeoX
      ckpt.pt                             nanoGPT
    DIR is a folder of transformers, with safetensors and a config.json, which
    `tfkit import`, --weights and from_pretrained read. Any other file must be a
    pickle of tensors, which keep their names. Pickles can contain code: they are
    read in a separate process, which accepts only tensors and plain values.
    The tokenizer and the settings of generation are copied.
    """,
    examples="""
    tfkit convert downloads/gpt2 -o gpt2
    tfkit convert out-shakespeare-char/ckpt.pt -o shakespeare
    """,
)
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@output_option("DIR", "The folder to write, which must be new.", required=True)
@json_option
def convert(reader: Reader, source: Path, output: Path, json: bool) -> None:
    from tfkit.tools.convert.convert import convert as write

    with stages() as stage:
        stage(f"converting {source}")
        layout, files, notes = write(source, output)
    print_warnings(notes)
    if json:
        print_json({"layout": layout, "files": [str(file) for file in files]})
    else:
        click.echo("\n".join(f"wrote {printable_text(str(file))}" for file in files))
