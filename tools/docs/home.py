"""The first screen of the site: a spec with lines that change, next to the drawing of its model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from html import escape
from itertools import product

from tfkit.graph.expand import loads
from tfkit.tools.draw.picture import draw
from tfkit.tools.draw.svg import Picture, to_svg
from tools.docs.page import plugins

FOLDER = "home"
"""The folder of the site with a picture for each combination of lines."""
SPEC = """\
tfkit: 1
name: my_model
d_model: 768
vocab_size: 50257
max_len: 1024
{norm}
graph:
  embedding: {{block: embedding, position: learned}}
  decoder:
    block: decoder
    n_layers: 12
    {attention}
    {ffn}
  {logits}
"""
LINES = {
    "norm": ("norm: layernorm", "norm: rmsnorm"),
    "attention": ("attention: {kind: mha, n_heads: 12}", "attention: {kind: gqa, n_heads: 12, n_kv_heads: 4}"),
    "ffn": ("ffn: {kind: gelu, d_ff: 3072}", "ffn: {kind: swiglu, d_ff: 2048}"),
    "logits": ("logits: {block: lm_head, tie: embedding}", "logits: lm_head"),
}
"""The lines of `SPEC` that change: as in GPT-2, and as in Llama."""
HINT = "Point at a marked line to change the model; click to keep it."


@cache
def pictures() -> dict[str, Picture]:
    """Return the drawing of each combination, by a digit for each line: 0000 has no changes."""
    combinations = product((0, 1), repeat=len(LINES))
    return {"".join(map(str, digits)): draw(loads(_spec(digits), plugins=plugins())) for digits in combinations}


def files() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file."""
    for digits, picture in pictures().items():
        yield f"{digits}.svg", to_svg(picture)


def figure() -> str:
    """Return the spec and its drawing as HTML. Without scripts, the spec does not change."""
    first = "0" * len(LINES)
    descriptions = json.dumps({digits: picture.description for digits, picture in pictures().items()})
    lines = {name: _button(*line) for name, line in LINES.items()}
    return (
        f'<div id="model" data-descriptions="{escape(descriptions)}">\n'
        f'<div><pre class="spec" tabindex="0" aria-label="A spec">{SPEC.format(**lines)}</pre>'
        f"<p>{HINT}</p></div>\n"
        f'<img src="{FOLDER}/{first}.svg" alt="{escape(pictures()[first].description)}">\n'
        '</div>\n<script src="_static/home.js"></script>'
    )


def _spec(digits: tuple[int, ...]) -> str:
    lines = {name: line[digit] for (name, line), digit in zip(LINES.items(), digits, strict=True)}
    return SPEC.format(**lines)


def _button(initial: str, changed: str) -> str:
    return (
        f'<button type="button" aria-pressed="false" data-initial="{escape(initial)}" data-changed="{escape(changed)}">'
        f"{escape(initial)}</button>"
    )
