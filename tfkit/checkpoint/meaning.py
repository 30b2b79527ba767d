"""The semantics of weights: stored as metadata of a safetensors file, and compared with the model that loads it."""

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
"""The maximum number of differences that an error lists."""


def safetensors_metadata(graph: Graph) -> dict[str, str]:
    """Return the metadata of every safetensors file of a model: the semantics of its tensors, and their digest."""
    meaning = meaning_of(graph)
    return {"format": "pt", DIGEST: meaning.digest, MEANING: meaning.text}


def check_meaning(checkpoint: Checkpoint, graph: Graph, path: Path) -> None:
    """Raise SpecError if a file states semantics of its weights that differ from the model's.

    Files that tfkit did not write state none.
    """
    expected = meaning_of(graph)
    for file, texts in checkpoint.metadata.items():
        if MEANING not in texts or texts.get(DIGEST) == expected.digest:
            continue
        differences = changes(_meaning(texts[MEANING], file), expected)
        if differences:
            more = (f"and {len(differences) - MOST} more",) if len(differences) > MOST else ()
            notes = (*map(str, differences[:MOST]), *more)
            help = "to load them anyway: --allow-change, in Python `allow_change=True`"
            message = f"the weights in {shown(path)} belong to a different model"
            raise SpecError(Diagnostic(message, notes=notes, help=help))


def _meaning(text: str, file: Path) -> Meaning:
    try:
        return parsed(parse_object(text.encode()))
    except (Malformed, ValueError) as error:
        message = f"{shown(file)} has an invalid description of what its weights mean: {error}"
        raise SpecError(Diagnostic(message, help=AGAIN)) from error
