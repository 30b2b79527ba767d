"""Train a byte-level BPE tokenizer on texts."""

from __future__ import annotations

from pathlib import Path

import click

from tfkit.console.commands import command
from tfkit.console.options import json_option, output_option
from tfkit.console.output import print_json, show, stages, table
from tfkit.console.reader import Reader


@command(
    "tokenizer",
    sets=False,
    notes="""
    FILE is a text in UTF-8. The tokens are the special ones, the 256 bytes, so
    that any text can be expressed, and pairs of earlier tokens, the most frequent
    first. A run reads the result: tokenizer: {kind: file, path: tokenizer.json}.
    """,
    examples="""
    tfkit tokenizer book.txt --vocab-size 4096 -o tokenizer.json
    tfkit tokenizer *.txt --vocab-size 8192 --special '<|endoftext|>' -o mine.json
    """,
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@output_option("FILE", "Write to it.", required=True, dir_okay=False)
@click.option("--vocab-size", required=True, type=click.IntRange(256, 2**24), metavar="N", help="Tokens in all.")
@click.option("--special", multiple=True, metavar="TEXT", help="A token that no text contains; repeatable.")
@json_option
def tokenizer(
    reader: Reader, files: tuple[Path, ...], output: Path, vocab_size: int, special: tuple[str, ...], json: bool
) -> None:
    if output.suffix != ".json":
        raise click.BadParameter(f"`{output.name}` must end in .json", param_hint="--output")
    if len(set(special)) < len(special) or "" in special:
        raise click.BadParameter("each takes a text of its own", param_hint="--special")
    if vocab_size < 256 + len(special):
        raise click.BadParameter(f"256 bytes and {len(special)} special tokens are more", param_hint="--vocab-size")
    from tfkit.tools.common.atomic_files import check_file, write_file
    from tfkit.tools.tokenizer.train import read_texts, train

    check_file(output)
    with stages() as stage:
        texts = read_texts(files)
        stage("training")
        trained = train(texts, vocab_size=vocab_size, special=special)
        stage("measuring")
        tokens = sum(len(trained.encode(text).ids) for text in texts)
    write_file(output, trained.to_str(pretty=True))
    size = sum(len(text.encode()) for text in texts)
    if json:
        print_json({"file": str(output), "vocab_size": trained.get_vocab_size(), "bytes": size, "tokens": tokens})
        return
    rows = [
        ("vocabulary", f"{trained.get_vocab_size():,}"),
        ("bytes", f"{size:,}"),
        ("tokens", f"{tokens:,}"),
        ("bytes per token", f"{size / tokens:.2f}"),
    ]
    show(table([str(output), ""], rows, right=[""]))
    if trained.get_vocab_size() < vocab_size:
        click.echo(f"warning: the text has no further pairs: {vocab_size:,} tokens were asked for", err=True)
