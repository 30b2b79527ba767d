"""Explain a model: its components, their sizes and their costs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_spec
from tfkit.console.options import json_option
from tfkit.console.output import TABLE_WIDTH, percent, print_json
from tfkit.tools.common.units import bytes_text, count_text, scaled

if TYPE_CHECKING:
    from tfkit.tools.explain.explain import Explained, Explanation

COLUMNS = (9, 7, 7)
"""Widths of the columns at the right: parameters, their fraction, and the fraction of FLOPs."""
INDENT = "  "


@command(
    "explain",
    section="Tools",
    order=420,
    notes="""
    Every component in the words of its docstring, with its paper, in the order
    in which data flows. FLOPs are of one forward: 2,048 tokens, or `max_len`
    if that is less.
    """,
    examples="""
    tfkit explain gpt2
    tfkit explain my_model.yaml --set decoder.attention.kind=mqa
    """,
)
@click.argument("spec", shell_complete=complete_spec)
@json_option
def explain(reader: Reader, spec: str, json: bool) -> None:
    graph = reader.load(spec)
    from tfkit.tools.explain.explain import explain as find

    if json:
        print_json(find(graph))
    else:
        click.echo("\n".join(lines_of(find(graph))))


def lines_of(explained: Explained) -> Iterator[str]:
    """Format an explanation, line by line."""
    return (line.rstrip() for line in _lines(explained))


def _lines(explained: Explained) -> Iterator[str]:
    active = (
        f", {count_text(explained.active)} of them for each token" if explained.active < explained.parameters else ""
    )
    yield from _wrapped(f"{explained.name}: {count_text(explained.parameters)} parameters{active}", "")
    yield from _wrapped(explained.description or "", "")
    yield from _wrapped(f"Source: {explained.source}" if explained.source else "", "")
    yield ""
    yield from _row("", ("params", "share", "FLOPs"))
    yield "Inputs"
    for text in explained.inputs:
        yield from _wrapped(text, INDENT)
    for node in explained.nodes:
        yield ""
        yield from _part(node, explained, 0)
    yield ""
    yield from _part(explained.init, explained, 0)
    yield ""
    yield from _wrapped(" ".join(_end(explained)), "")


def _end(explained: Explained) -> Iterator[str]:
    """Describe the cost of a full forward and of the cache."""
    per_token = explained.flops / explained.length
    yield f"A forward takes {_flops(per_token)} per token if {explained.length:,} are read at once."
    cache = explained.cache
    if cache is not None and cache.per_token:
        yield f"The KV cache grows by {bytes_text(cache.per_token)} per token in {cache.dtype}."
    if cache is not None and cache.states:
        yield f"The states of a sequence take {bytes_text(cache.states)} at any length in {cache.dtype}."


def _flops(count: float) -> str:
    amount, prefix = scaled(count, "KMGTP", most=999.5)
    return f"{amount:.3g} {prefix}FLOPs"


def _part(part: Explanation, explained: Explained, depth: int) -> Iterator[str]:
    """Format a component, followed by the components inside it."""
    margin = INDENT * depth
    kind = f" ({part.kind})" if part.kind not in (None, part.name) else ""
    title = f"{part.name.replace('_', '-') if depth else part.name}{kind}{f', {part.where}' if part.where else ''}"
    yield from _row(f"{margin}{title}", _costs(part, explained, whole=depth == 0))
    inner = margin + INDENT
    yield from _wrapped(_stop(part.says), inner)
    yield from (f"{inner}{paper}" for paper in part.papers)
    for fact in part.facts:
        yield from _wrapped(fact, inner, "- ")
    for step in part.steps:
        numbered = step[0].isdecimal()
        yield from _wrapped(step, inner + INDENT if numbered else inner, hanging="   " if numbered else "")
    for inner_part in part.parts:
        if depth == 0:
            yield ""
        yield from _part(inner_part, explained, depth + 1)


def _stop(text: str) -> str:
    return f"{text.rstrip('.')}." if text else ""


def _costs(part: Explanation, explained: Explained, *, whole: bool) -> tuple[str, str, str]:
    """Return parameters, their fraction, and the fraction of FLOPs; for a node, including everything inside it."""
    parts = list(part.walk()) if whole else [part]
    parameters, flops = sum(component.parameters for component in parts), sum(component.flops for component in parts)
    share = percent(parameters, explained.parameters) if parameters else ""
    return (count_text(parameters) if parameters else "", share, percent(flops, explained.flops) if flops else "")


def _row(text: str, cells: tuple[str, str, str]) -> Iterator[str]:
    """Format a title with its costs at the right, over several lines if it is long."""
    right = "".join(cell.rjust(width) for cell, width in zip(cells, COLUMNS, strict=True))
    room = TABLE_WIDTH - sum(COLUMNS)
    margin = text[: len(text) - len(text.lstrip())]
    first, *rest = textwrap.wrap(text.strip(), room, initial_indent=margin, subsequent_indent=f"{margin}    ") or [""]
    yield f"{first.ljust(room)}{right}"
    yield from rest


def _wrapped(text: str, margin: str, bullet: str = "", hanging: str = "") -> Iterator[str]:
    indent = margin + (" " * len(bullet) or hanging)
    yield from textwrap.wrap(
        text,
        TABLE_WIDTH,
        initial_indent=margin + bullet,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
