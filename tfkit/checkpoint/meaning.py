"""What weights mean, written beside them in a safetensors file and held against the model that reads them."""

from __future__ import annotations

from pathlib import Path

from tfkit.checkpoint.files import Checkpoint
from tfkit.checkpoint.header import AGAIN, Malformed, parse_object, shown
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph
from tfkit.graph.meaning import Meaning, changes, meaning_of, parsed

MEANING = "tfkit_meaning"
DIGEST = "tfkit_digest"
MOST = 20
"""Differences that an error lists."""


def safetensors_metadata(graph: Graph) -> dict[str, str]:
    """What every safetensors file of a model says beside its tensors: their meaning, and its digest."""
    meaning = meaning_of(graph)
    return {"format": "pt", DIGEST: meaning.digest, MEANING: meaning.text}


def check_meaning(checkpoint: Checkpoint, graph: Graph, path: Path) -> None:
    """Raise SpecError where a file says what its weights mean, and the model means something else.

    Files that tfkit did not write say nothing.
    """
    here = meaning_of(graph)
    for file, texts in checkpoint.metadata.items():
        if MEANING not in texts or texts.get(DIGEST) == here.digest:
            continue
        found = changes(_meaning(texts[MEANING], file), here)
        if found:
            more = (f"and {len(found) - MOST} more",) if len(found) > MOST else ()
            notes = (*map(str, found[:MOST]), *more)
            help = "to load them all the same: --allow-change, in Python `allow_change=True`"
            message = f"the weights in {shown(path)} are those of another model"
            raise SpecError(Diagnostic(message, notes=notes, help=help))


def _meaning(text: str, file: Path) -> Meaning:
    try:
        return parsed(parse_object(text.encode()))
    except (Malformed, ValueError) as error:
        message = f"{shown(file)} does not say soundly what its weights mean: {error}"
        raise SpecError(Diagnostic(message, help=AGAIN)) from error
