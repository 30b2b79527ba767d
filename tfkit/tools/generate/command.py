"""Let a model continue a text, and print the tokens as it generates them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.console import options
from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_spec
from tfkit.console.output import print_json, stages
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.tools.generate.prompts import Job, Request, job_of

if TYPE_CHECKING:
    from torch import fx

    from tfkit.decoding.generate import Generated
    from tfkit.decoding.text import Texts
    from tfkit.graph.expand import Graph

TITLE = 40
"""Maximum length of a title, which is the start of the prompt, in characters."""


@command(
    "generate",
    section="Models",
    order=130,
    notes="""
    SPEC may be the folder of a model with its weights. The tokenizer is the
    `tokenizer.json` or `chars.json` next to the weights by default; a text
    file stands for its characters. Only the continuation is printed. An encoder
    reads the prompt if there is one. The last line break of a file, or of standard
    input, is ignored. A text ends at eos_token_id of the generation_config.json or
    config.json next to the weights; in a run, at `end` of its data. A run with the
    loss `masked_diffusion` fills in masks.
    """,
    examples="""
    tfkit generate gpt2 --weights model.safetensors --prompt "Once upon a time"
    tfkit generate out --prompt - < a.txt
    tfkit generate nanogpt --weights w.safetensors --tokenizer shakespeare.txt \\
        --prompt "ROMEO:" --temperature 0.8 --top-k 50 --samples 3 --seed 1
    tfkit generate gpt2 --tokens 464,3290 --max-new-tokens 5
    """,
)
@click.argument("spec", shell_complete=complete_spec)
@options.weights_option(otherwise="random")
@options.allow_change_option
@click.option("--tokenizer", type=click.Path(path_type=Path), metavar="FILE", help="Text to tokens and back.")
@click.option("--prompt", multiple=True, metavar="TEXT", help="Text to continue; - for standard input; repeatable.")
@click.option(
    "--prompt-file", multiple=True, type=click.Path(path_type=Path), metavar="FILE", help="A prompt from a file."
)
@click.option(
    "--tokens", multiple=True, metavar="IDS", help="A prompt as token ids; the output is also printed as ids."
)
@click.option(
    "--start",
    metavar="TOKEN",
    help="The decoder's first token, for a model with an encoder.  [default: as the weights define it]",
)
@click.option("--output", metavar="NAME", help="The output to choose tokens from.  [default: the first]")
@click.option(
    "--drafts",
    multiple=True,
    metavar="NAME",
    help="An output that drafts a later token, to save forwards of the model; repeatable, the nearest token first.",
)
@click.option(
    "--mask-token",
    type=click.IntRange(0),
    metavar="ID",
    help="Fill in masks, with a model that attends to all tokens.  [default: mask_token_id next to the weights]",
)
@options.count_option("--steps", "Maximum number of forwards for filling in masks.  [default: one for each token]")
@options.count_option("--block-length", "Fill in masks in blocks of N tokens.  [default: all tokens]")
@click.option(
    "--remasking",
    type=click.Choice(["low_confidence", "random"]),
    metavar="KIND",
    help="Predictions that a step masks again: low_confidence or random.  [default: low_confidence]",
)
@options.count_option("--max-new-tokens", "Maximum number of new tokens.  [default: 100, or as many as fit]")
@click.option(
    "--temperature",
    default=0.0,
    show_default=True,
    type=options.FiniteRange(0),
    metavar="X",
    help="Randomness of sampling; 0 takes the most likely token.",
)
@options.count_option("--top-k", "Sample from the N most likely tokens.")
@click.option(
    "--top-p",
    type=options.FiniteRange(0, 1, min_open=True),
    metavar="P",
    help="Sample from the most likely tokens of total probability P.",
)
@click.option(
    "--repetition-penalty",
    default=1.0,
    show_default=True,
    type=options.FiniteRange(0, min_open=True),
    metavar="X",
    help="Above 1, fewer repetitions.",
)
@click.option(
    "--stop",
    multiple=True,
    metavar="TEXT",
    help="A text or special token to stop at; repeatable.  [default: the end of a text, as the weights define it]",
)
@options.count_option("--samples", "Continuations of each prompt.", default=1)
@options.seed_option("Seed of the random numbers.")
@options.device_option("cpu, cuda or mps.")
@options.dtype_option("float32, bfloat16 ...  [default: the type of the weights]")
@options.json_option
def generate(reader: Reader, spec: str, json: bool, **options: Any) -> None:
    request = Request(**options)
    _check_usage(request)
    graph = reader.load(spec)
    weights = reader.weights(spec, request.weights, allow_change=request.allow_change)
    request = replace(request, weights=weights)
    try:
        job = job_of(request, graph)
        if weights is not None:
            reader.warn_about(weights, graph)
        with stages() as stage:
            model = _load_model(request, graph, stage)
        live = None if json else Live(_text_titles(job, request.samples))
        texts, generated, seconds = _generate_texts(model, job, request, live)
    except SpecError:
        raise
    except ValueError as error:  # the prompt is too long, or has ids outside the vocabulary
        raise SpecError(Diagnostic(str(error))) from error
    if json:
        print_json(_result_data(job, texts, generated, request, seconds))
    else:
        counts = bool(request.drafts or job.generation)
        click.echo(_speed_text(generated, seconds, forwards=counts), err=True)


def _check_usage(request: Request) -> None:
    """Raise an error for options that contradict each other."""
    prompts = request.prompt or request.prompt_file
    if not prompts and not request.tokens:
        raise click.UsageError("a prompt is missing: add --prompt, --prompt-file or --tokens")
    if request.tokens and (prompts or request.tokenizer):
        raise click.UsageError("--tokens cannot be combined with --prompt, --prompt-file or --tokenizer")
    if request.prompt.count("-") > 1:
        raise click.UsageError("standard input can be only one prompt")
    if "" in request.stop:
        raise click.UsageError("--stop must not be empty: it would end every text immediately")
    for option, value in (("--top-k", request.top_k), ("--top-p", request.top_p)):
        if value is not None and request.temperature == 0:
            raise click.UsageError(f"{option} has no effect at temperature 0: add a --temperature")
    if request.samples > 1 and request.temperature == 0 and request.remasking != "random":
        raise click.UsageError("several samples must have a --temperature above 0: at 0 all samples are equal")


def _load_model(request: Request, graph: Graph, stage: Callable[[str], None]) -> fx.GraphModule:
    import torch

    from tfkit.building.builder import build
    from tfkit.building.instrument import instrument_model
    from tfkit.tools.common.loading_weights import build_with_weights
    from tfkit.tools.common.memory_needs import check_memory

    device = options.device_of(request.device)
    if device.type == "meta":
        raise click.UsageError("a model on the meta device cannot generate: it has no values")
    dtype = getattr(torch, request.dtype) if request.dtype else None
    if request.weights is not None:
        stage(f"reading {request.weights}")
        model = build_with_weights(
            graph, request.weights, device=device, dtype=dtype, allow_change=request.allow_change
        )
        return instrument_model(model)
    click.echo("warning: without --weights the model is random, and so is its text", err=True)
    stage("building")
    check_memory(build(graph, device="meta", dtype=dtype), device)
    return instrument_model(build(graph, device=device, dtype=dtype, seed=request.seed))


def _generate_texts(
    model: fx.GraphModule, job: Job, request: Request, live: Live | None
) -> tuple[list[str], Generated, float]:
    """Generate, and return the texts, their tokens, and the elapsed seconds."""
    import tfkit.decoding.generate as decoding
    from tfkit.decoding.text import Texts

    show = live or (lambda texts: None)
    texts = Texts(job.tokenizer, len(job.prompts) * request.samples, job.stop_texts, show, ends=job.end_ids)
    begin = time.perf_counter()
    try:
        generated = decoding.generate(
            model,
            job.tokens,
            max_new_tokens=job.max_new_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            repetition_penalty=request.repetition_penalty,
            stop=job.stop_ids,
            n_samples=request.samples,
            seed=request.seed,
            on_token=texts,
            output=request.output,
            drafts=request.drafts,
            generation=job.generation,
            **job.inputs,
        )
    except KeyboardInterrupt:
        click.echo()  # begin a line for the message about the interrupt
        raise
    seconds = time.perf_counter() - begin
    return texts.finish(), generated, seconds


class Live:
    """Prints texts one below the other while all of them grow: it streams the first text that is incomplete."""

    def __init__(self, titles: Sequence[str]) -> None:
        self._titles = titles
        self._row = 0
        self._printed: int | None = None

    def __call__(self, texts: Texts) -> None:
        while self._row < len(texts.texts):
            if self._printed is None:
                self._printed = 0
                if self._titles:
                    click.echo(("\n" if self._row else "") + self._titles[self._row])
            text = texts.texts[self._row]
            click.echo(_printable_text(text[self._printed :]), nl=False)
            self._printed = len(text)
            if not texts.complete[self._row]:
                return
            click.echo()
            self._row, self._printed = self._row + 1, None


def _printable_text(text: str) -> str:
    """Return a text as standard output can show it; on a terminal, control characters are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if sys.stdout.isatty():
        text = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return text.encode(encoding, "replace").decode(encoding)


def _text_titles(job: Job, samples: int) -> list[str]:
    """Return the title of each text, if there are several."""
    if len(job.prompts) * samples == 1:
        return []
    many = [f", sample {sample + 1} of {samples}" if samples > 1 else "" for sample in range(samples)]
    return [f"── {quoted(prompt, TITLE)}{sample} ──" for prompt in job.prompts for sample in many]


def _speed_text(generated: Generated, seconds: float, *, forwards: bool) -> str:
    count = sum(generated.lengths)
    text = f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s"
    return f"{text}, {generated.forwards} forwards" if forwards else text


def _result_data(
    job: Job, texts: Sequence[str], generated: Generated, request: Request, seconds: float
) -> dict[str, Any]:
    rows = zip(texts, generated.rows(), generated.ended, strict=True)
    return {
        "texts": [
            {
                "prompt": job.prompts[row // request.samples],
                "sample": row % request.samples + 1,
                "text": text,
                "tokens": tokens,
                "ended": ended,
            }
            for row, (text, tokens, ended) in enumerate(rows)
        ],
        "forwards": generated.forwards,
        "seconds": seconds,
        "tokens_per_second": sum(generated.lengths) / seconds,
    }
