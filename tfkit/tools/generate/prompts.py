"""A request to the command `generate`: the options, and their conversion to token ids."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.errors import Diagnostic, SpecError, quoted

if TYPE_CHECKING:
    from tfkit.decoding.masked_diffusion import MaskedDiffusion, Remasking
    from tfkit.decoding.text import Tokenizer
    from tfkit.graph.expand import Graph

DEFAULT_TOKENS = 100
"""Default number of new tokens, if that many fit."""


@dataclass(frozen=True)
class Request:
    """The options of the command, without the spec."""

    weights: Path | None
    allow_change: bool
    tokenizer: Path | None
    prompt: tuple[str, ...]
    prompt_file: tuple[Path, ...]
    tokens: tuple[str, ...]
    start: str | None
    output: str | None
    drafts: tuple[str, ...]
    mask_token: int | None
    steps: int | None
    block_length: int | None
    remasking: Remasking | None
    max_new_tokens: int | None
    temperature: float
    top_k: int | None
    top_p: float | None
    repetition_penalty: float
    stop: tuple[str, ...]
    samples: int
    seed: int
    device: str
    dtype: str | None


@dataclass(frozen=True)
class Job:
    """The arguments of `tfkit.generate`, and the texts that they come from."""

    prompts: list[str]
    tokenizer: Tokenizer
    tokens: list[list[int]]
    inputs: dict[str, Any]
    generation: MaskedDiffusion | None
    max_new_tokens: int
    stop_ids: list[int]
    end_ids: list[int]
    """The ids among `stop_ids` that end a text and have no text."""
    stop_texts: list[str]


def job_of(request: Request, graph: Graph) -> Job:
    """Convert a request to a job. All errors are raised here, before the model is loaded."""
    from tfkit.graph.decode_split import reduce_to_output
    from tfkit.graph.input_shapes import max_len
    from tfkit.tools.common.companions import END, MASK, START, Companions

    try:
        full, graph = graph, reduce_to_output(graph, request.output or graph.outputs[0])
    except ValueError as error:
        raise SpecError(Diagnostic(str(error))) from error
    companions = Companions.read(request.weights, full.spec.family)
    generation = _generation_of(request, graph, companions.ids(MASK))
    main, once = _inputs_of(graph, generation)
    _check_inputs(graph, [main, *(name for name in once[:1] if graph.inputs[name].type == "tokens")], full)
    tokenizer = tokenizer_of(request.tokenizer, request.weights, numbers=bool(request.tokens))
    check_vocabulary(tokenizer, graph, main)
    prompts = _prompt_texts(request)
    rows = [tokenizer.encode(prompt) for prompt in prompts]
    tokens, inputs = rows, {}
    if once:
        first = _start_token(request, graph, tokenizer, companions.ids(START))
        tokens, inputs = [[first]] * len(rows), {once[0]: rows}
    elif request.start is not None:
        raise click.UsageError(f"--start has no effect: {graph.name} has no encoder, and continues the prompt")
    longest, limit = max(map(len, tokens)), max_len(graph)
    fit = DEFAULT_TOKENS if limit is None else max(1, min(DEFAULT_TOKENS, limit - longest))
    stops = {stop: tokenizer.special(stop) for stop in request.stop}
    ends = [] if stops else companions.ids(END)
    return Job(
        prompts=prompts,
        tokenizer=tokenizer,
        tokens=tokens,
        inputs=inputs,
        generation=generation,
        max_new_tokens=request.max_new_tokens or fit,
        stop_ids=[*ends, *(token for token in stops.values() if token is not None)],
        end_ids=[] if request.tokens else ends,
        stop_texts=[text for text, token in stops.items() if token is None],
    )


def _check_inputs(graph: Graph, read: Sequence[str], full: Graph) -> None:
    """Raise SpecError unless a prompt provides all inputs of `graph`, the part of `full` for one output."""
    missing = [name for name, signal in graph.inputs.items() if name not in read and not signal.optional]
    if missing:
        message = f"`{graph.name}` also reads `{missing[0]}`, which a prompt does not have"
        outputs = [output for output in full.outputs if output != graph.outputs[0]]
        help = f"choose an output that does not need it: --output {outputs[0]}" if outputs else None
        raise SpecError(Diagnostic(message, help=help))


def _generation_of(request: Request, graph: Graph, mask_tokens: Sequence[int]) -> MaskedDiffusion | None:
    """Return the way to fill in masks, with the mask token of the weights by default; None to append tokens."""
    from tfkit.decoding.masked_diffusion import MaskedDiffusion
    from tfkit.graph.decode_split import split_if_decodable

    tokens = mask_tokens if request.mask_token is None else [request.mask_token]
    if request.mask_token is None and (not tokens or split_if_decodable(graph) is not None):
        for option in ("steps", "block_length", "remasking"):
            if getattr(request, option) is not None:
                name = f"--{option.replace('_', '-')}"
                raise click.UsageError(
                    f"{name} has no effect: add --mask-token, or generate with a masked diffusion run"
                )
        return None
    return MaskedDiffusion(tokens[0], request.steps, request.block_length, request.remasking or "low_confidence")


def _inputs_of(graph: Graph, generation: MaskedDiffusion | None) -> tuple[str, tuple[str, ...]]:
    """Return the input of the tokens that are generated, and the inputs that are complete before."""
    from tfkit.graph.decode_split import split_for_decoding

    if generation is not None:
        return generation.input_of(graph), ()
    try:
        parts = split_for_decoding(graph)
    except SpecError as error:
        help = "add --mask-token ID if the model was trained to predict masked tokens"
        raise SpecError(*(replace(diagnostic, help=help) for diagnostic in error.diagnostics)) from error
    return parts.step_inputs[0], parts.initial_inputs


def tokenizer_of(path: Path | None, weights: Path | None, *, numbers: bool) -> Tokenizer:
    """Return a tokenizer: of token ids (`numbers`), from a file, or next to the weights; else raise SpecError."""
    from tfkit.decoding.text import NumberTokenizer, load_tokenizer
    from tfkit.spec.folder import TOKENIZERS
    from tfkit.tools.common.loading_weights import tokenizer_beside

    if numbers:
        return NumberTokenizer()
    if path is not None:
        return load_tokenizer(path)
    if weights is not None and (file := tokenizer_beside(weights)) is not None:
        return load_tokenizer(file)
    where = " next to the weights" if weights is not None else ""
    help = "name a file with --tokenizer, or pass token ids with --tokens instead of a prompt"
    raise SpecError(Diagnostic(f"there is no {' or '.join(TOKENIZERS)}{where}", help=help))


def check_vocabulary(tokenizer: Tokenizer, graph: Graph, name: str) -> None:
    """Raise SpecError if a tokenizer has more tokens than the embedding table of an input."""
    from tfkit.graph.input_shapes import rows_of

    rows = rows_of(graph, name)
    if rows is not None and tokenizer.vocab_size > rows:
        message = f"the tokenizer has {tokenizer.vocab_size} tokens, but the model's vocabulary has {rows}"
        raise SpecError(Diagnostic(message, help="use the tokenizer that the model was trained with"))


def _prompt_texts(request: Request) -> list[str]:
    prompts = [_read_text(None) if prompt == "-" else prompt for prompt in request.prompt]
    return [*prompts, *map(_read_text, request.prompt_file), *request.tokens]


def _read_text(path: Path | None) -> str:
    """Read a file, or standard input for `-`, without its last line break."""
    from tfkit.spec.source import file_bytes

    name = "standard input" if path is None else quoted(str(path))
    try:
        data = sys.stdin.buffer.read() if path is None else file_bytes(path)
        return re.sub(r"\r?\n\Z", "", data.decode("utf-8"))
    except OSError as error:
        raise SpecError(Diagnostic(f"cannot read {name}: {error.strerror}")) from error
    except UnicodeDecodeError as error:
        raise SpecError(Diagnostic(f"cannot read {name}: it is not UTF-8")) from error


def _start_token(request: Request, graph: Graph, tokenizer: Tokenizer, default: Sequence[int]) -> int:
    if request.start is None and default:
        return default[0]
    if request.start is None:
        message = f"{graph.name} has an encoder that reads the prompt: its decoder needs a first token"
        raise SpecError(Diagnostic(message, help="add --start, a special token or an id: T5 has 0, BART 2"))
    token = tokenizer.special(request.start)
    if token is None and not request.start.isdecimal():
        raise SpecError(Diagnostic(f"--start must be a special token or a number; got {quoted(request.start)}"))
    return int(request.start) if token is None else token
