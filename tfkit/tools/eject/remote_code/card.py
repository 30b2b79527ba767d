"""The model card: a description, an example of loading the model, its picture, and the run that trained it."""

from __future__ import annotations

import html
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import max_len
from tfkit.spec.folder import RUN
from tfkit.tools.common.history import read_metric_lines
from tfkit.tools.draw.picture import draw
from tfkit.tools.draw.svg import to_svg
from tfkit.tools.eject.remote_code.parts import Parts
from tfkit.tools.params.count import count_params

CARD = "README.md"
PICTURE = "model.svg"
NO_START = (
    "The token that begins a text is not known: set `decoder_start_token_id` in `model.config` and in "
    "`model.generation_config` before you call `generate` or train with `labels`."
)
"""A note for encoder-decoders without this token."""
NO_PROCESSOR = {
    True: (
        "The weights came without an image processor: preprocessor_config.json maps pixels from 0 to 255 to numbers "
        "from -1 to 1. Change it if the model was trained with different images."
    ),
    False: "The folder has no image processor, because transformers reads all images as RGB: give it `pixel_values`.",
}
"""Notes for models of images: True for 3 channels."""


def picture_of(graph: Graph) -> str:
    """Return the picture of a model as SVG."""
    return to_svg(draw(graph))


def verification(parts: Parts, *, computed: bool) -> str:
    """Describe the verification of a folder: whether its outputs were `computed`, or only its tensors compared."""
    versions = f"transformers {version('transformers')} and torch {version('torch')}"
    if not computed:
        return f"With {versions}, only names and shapes of tensors were verified: the model is too large to run."
    precision = "bit for bit" if parts.names is None else "up to rounding"
    outputs = f"the outputs of the model {precision} for random inputs"
    return f"Verified with {versions} on a CPU: without tfkit, this code computes {outputs}."


def model_card(
    parts: Parts,
    weights: Path | None,
    *,
    has_start: bool = True,
    has_processor: bool = True,
    verified: str | None = None,
) -> str:
    """Return the text of a model card.

    Args:
        parts: the model.
        weights: the source of its weights, which may be in the folder of the run that trained them.
        has_start: whether the config has the token that begins a generated text.
        has_processor: whether the weights have an image processor.
        verified: a description of the verification of the folder.
    """
    graph = parts.graph
    image = graph.inputs[parts.bodies[0].input]
    model, auto = graph.spec.model, f"AutoModel{parts.task.auto}"
    text = [
        "---",
        "library_name: transformers",
        f"pipeline_tag: {parts.task.tag}",
        "tags: [custom_code]",
        "---",
        "",
        f"# {_escaped_text(model.name)}",
        "",
        *([_escaped_text(model.description), ""] if model.description else []),
        *([f"Source: {_escaped_text(model.source)}", ""] if model.source else []),
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _sizes_of(graph).items()),
        "",
        "```python",
        f"from transformers import {auto}",
        "",
        f'model = {auto}.from_pretrained("PATH OR NAME", trust_remote_code=True)',
        "```",
        "",
        *([verified, ""] if verified else []),
        *([] if has_start or len(parts.bodies) == 1 else [NO_START, ""]),
        *([] if has_processor or image.type != "image" else [NO_PROCESSOR[image.channels == 3], ""]),
        f"![The layers of {_escaped_text(model.name)}]({PICTURE})",
    ]
    return "\n".join([*text, *_training_lines(weights)]) + "\n"


def _sizes_of(graph: Graph) -> dict[str, str]:
    count, length = count_params(graph), max_len(graph)
    rows = {"parameters": f"{count.total:,}"}
    rows |= {"of these active for a token": f"{count.active:,}"} if count.active != count.total else {}
    rows |= {f"layers of `{node.name}`": str(node.stack.depth) for node in graph.nodes if node.stack is not None}
    return rows if length is None else {**rows, "longest sequence": f"{length:,}"}


def _escaped_text(text: str) -> str:
    """Return a text on one line in which Markdown and HTML have no meaning; addresses stay links."""
    plain = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"[\\`*\[\]|~!#]|(?<!\w)_|_(?!\w)", r"\\\g<0>", plain)


def _training_lines(weights: Path | None) -> list[str]:
    """Return lines with the last metrics of the run that trained the weights; empty without a run."""
    if weights is None:
        return []
    run = next((folder for folder in (weights, *weights.absolute().parents[:2]) if (folder / RUN).is_file()), None)
    if run is None:
        return []
    metrics: dict[str, Any] = {}
    for line in read_metric_lines(run):
        metrics |= line
    rows = [
        f"| {_escaped_text(name)} | {value:.6g} |" for name, value in metrics.items() if isinstance(value, int | float)
    ]
    return ["", "## Training", "", "| at the end of the run | |", "|---|---|", *rows] if rows else []
