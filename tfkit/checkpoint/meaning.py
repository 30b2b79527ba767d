"""The meaning of weights, written beside them in a safetensors file and compared with the model that reads them."""

from __future__ import annotations

from pathlib import Path

from tfkit.checkpoint.files import Checkpoint
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph
from tfkit.graph.meaning import Meaning, changes, meaning_of, parsed
from tfkit.spec.header import AGAIN, Malformed, parse_object, shown

MEANING = "tfkit_meaning"
DIGEST = "tfkit_digest"
MOST = 20
"""The most differences that an error lists."""


def safetensors_metadata(graph: Graph) -> dict[str, str]:
    """The metadata of every safetensors file of a model: the meaning of its tensors, and its digest."""
    meaning = meaning_of(graph)
    return {"format": "pt", DIGEST: meaning.digest, MEANING: meaning.text}


def check_meaning(checkpoint: Checkpoint, graph: Graph, path: Path) -> None:
    """Raise SpecError if a file states a meaning of its weights that differs from the model's.

    Files that tfkit did not write state none.
    """
    here = meaning_of(graph)
    for file, texts in checkpoint.metadata.items():
        if MEANING not in texts or texts.get(DIGEST) == here.digest:
            continue
        found = changes(_meaning(texts[MEANING], file), here)
        if found:
            more = (f"and {len(found) - MOST} more",) if len(found) > MOST else ()
            notes = (*map(str, found[:MOST]), *more)
            help = "to load them anyway: --allow-change, in Python `allow_change=True`"
            message = f"the weights in {shown(path)} are those of another model"
            raise SpecError(Diagnostic(message, notes=notes, help=help))


def _meaning(text: str, file: Path) -> Meaning:
    try:
        return parsed(parse_object(text.encode()))
    except (Malformed, ValueError) as error:
        message = f"{shown(file)} has an invalid description of what its weights mean: {error}"
        raise SpecError(Diagnostic(message, help=AGAIN)) from error
