"""Layers that are neither attention nor FFN, as the words of a config.json betray them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tfkit.errors import Diagnostic, listing, quoted
from tfkit.spec import tree
from tfkit.spec.source import plain

WORDS = re.compile(r"mamba|rwkv|lstm|recurrent|linear_att|ssm|lru|d_state|state_(size|dim)|(^|_)conv")
HELP = "the `attention` of a plugin may mix positions in any way: docs/attention.md"


def other_layers(root: tree.Mapping) -> Diagnostic | None:
    """The diagnostic of a config.json with layers that no kind of tfkit describes; None if no word of it says so."""
    config = plain(root)
    found = [word for word in dict.fromkeys(_words(config)) if WORDS.search(word)]
    if not found:
        return None
    name, node = quoted(str(config.get("model_type"))), root.items.get("model_type", root)
    note = f"words of layers with a state of one size, or with convolutions: {listing(map(quoted, found), 6)}"
    message = f"the model type {name} is unknown, and has layers that are neither attention nor FFN"
    return Diagnostic(message, node.span, "model_type", notes=(note,), help=HELP)


def _words(given: Mapping[str, Any]) -> Iterator[str]:
    """The model type, the fields, and the names of layers."""
    yield str(given.get("model_type"))
    yield from given
    for name, value in given.items():
        if name != "architectures" and isinstance(value, list):
            yield from (one for one in value if isinstance(one, str))
