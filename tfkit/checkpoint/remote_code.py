"""The names of a language model's tensors in a folder of code that `tfkit save` wrote for transformers.

The nodes are in a body, `model`; the last one is the head, with its output matrix as `lm_head`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from tfkit.checkpoint.weight_map import WeightMap

BODY = "model"
LM_HEAD = "lm_head"
MATRIX = "output"
"""The output matrix in the module of a head."""


def name_in_folder(name: str, head: str) -> str:
    """Return the name of a tensor, or of a module, as the folder has it; `head` is the last node."""
    node, _, rest = name.partition(".")
    if node != head:
        return f"{BODY}.{name}"
    return f"{LM_HEAD}{rest.removeprefix(MATRIX)}" if rest.split(".")[0] == MATRIX else rest


def transformers_map(model: nn.Module, head: str) -> WeightMap:
    """Return the map of a folder that was written for transformers."""
    weights = WeightMap.of_model(model)
    links = [replace(link, file=tuple(name_in_folder(name, head) for name in link.file)) for link in weights.links]
    return replace(weights, links=tuple(links))
