"""Train a byte-level BPE tokenizer on texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfkit.commands import Reader, command, json_option, output_option, print_json, print_tables, stages, table
from tfkit.errors import Diagnostic, SpecError, quoted

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@command(
    "tokenizer",
    section="Training",
    order=250,
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
@output_option("FILE", "The file to write.", required=True, dir_okay=False)
@click.option("--vocab-size", required=True, type=click.IntRange(256, 2**24), metavar="N", help="Number of tokens.")
@click.option("--special", multiple=True, metavar="TEXT", help="A token that no text contains; repeatable.")
@json_option
def tokenizer(
    reader: Reader, files: tuple[Path, ...], output: Path, vocab_size: int, special: tuple[str, ...], json: bool
) -> None:
    if output.suffix != ".json":
        raise click.BadParameter(f"`{output.name}` must end in .json", param_hint="--output")
    if len(set(special)) < len(special) or "" in special:
        raise click.BadParameter("each special token must be unique, and not empty", param_hint="--special")
    if vocab_size < 256 + len(special):
        raise click.BadParameter(
            f"the vocabulary must hold 256 bytes and {len(special)} special tokens; got {vocab_size}",
            param_hint="--vocab-size",
        )
    from tfkit.commands import check_file, write_file

    check_file(output)
    with stages() as stage:
        texts = read_texts(files)
        stage("training")
        trained = train_tokenizer(texts, vocab_size=vocab_size, special=special)
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
    print_tables(table([str(output), ""], rows, right=[""]))
    if trained.get_vocab_size() < vocab_size:
        click.echo(f"warning: the text has no more pairs: {vocab_size:,} tokens were requested", err=True)


# ---- byte-level BPE from texts, by the library `tokenizers` ----


def read_texts(files: Sequence[Path]) -> list[str]:
    """Read the texts of files; raise SpecError if a file cannot be read, or all are empty."""
    texts = list(map(_read_text, files))
    if not any(texts):
        raise SpecError(Diagnostic("there is nothing to learn from: the text is empty"))
    return texts


def _read_text(path: Path) -> str:
    from tfkit.spec.source import file_bytes

    try:
        return file_bytes(path).decode()
    except OSError as error:
        raise SpecError(Diagnostic(f"cannot read {quoted(str(path))}: {error.strerror}")) from error
    except UnicodeDecodeError as error:
        raise SpecError(Diagnostic(f"{quoted(str(path))} is not UTF-8: byte {error.start:,}")) from error


def train_tokenizer(texts: Sequence[str], *, vocab_size: int, special: Sequence[str] = ()) -> Tokenizer:
    """Train a tokenizer of at most `vocab_size` tokens: special tokens, 256 bytes, and frequent pairs of the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
