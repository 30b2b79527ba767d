"""Detection of layers that are neither attention nor FFN, by words in a config.json."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tfkit.errors import Diagnostic, listing, quoted
from tfkit.spec import tree
from tfkit.spec.source import plain

WORDS = re.compile(r"mamba|rwkv|lstm|recurrent|linear_att|ssm|lru|d_state|state_(size|dim)|(^|_)conv")
HELP = "write a plugin whose `attention` computes these layers: docs/attention.md"


def other_layers(root: tree.Mapping) -> Diagnostic | None:
    """Return the diagnostic of a config.json with layers that no kind of tfkit describes.

    Return None if no word indicates such layers.
    """
    config = plain(root)
    matches = [word for word in dict.fromkeys(_words(config)) if WORDS.search(word)]
    if not matches:
        return None
    name, node = quoted(str(config.get("model_type"))), root.items.get("model_type", root)
    note = f"words for layers with a state of constant size, or with convolutions: {listing(map(quoted, matches), 6)}"
    message = f"the model type {name} is unknown, and has layers that are neither attention nor FFN"
    return Diagnostic(message, node.span, "model_type", notes=(note,), help=HELP)


def _words(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the model type, the fields, and the names of layers."""
    yield str(config.get("model_type"))
    yield from config
    for name, value in config.items():
        if name != "architectures" and isinstance(value, list):
            yield from (item for item in value if isinstance(item, str))
