"""Bugs of training and of stored weights, and bugs that replace a class or a property."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit.building.initialize
from tfkit.checkpoint import folder_format
from tfkit.checkpoint.weight_map import Link, TensorLocation, WeightMap
from tfkit.components import feedforward, head, rope_scaling, stack
from tfkit.components.context import AttentionContext, ContextKey
from tfkit.graph.expand import Node
from tfkit.tools.cost import shape_rules

from .bug import BUGS, Bug, plant
from .masks import wider


@plant("dropout is never applied", "a module that nobody calls", "gpt2", "dropout", nn.Dropout, "forward")
def no_dropout(self: Any, x: Tensor) -> Tensor:
    return x


@plant("recomputed layers draw new dropout", "allenai/OLMo-core#828", "gpt2", "recompute", stack, "recomputed")
def drawn_anew(layer: nn.Module, *args: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False)


@plant("the gradient of a tie is doubled", "pytorch/torchtitan#3174", "gpt2", "ties", head.TiedOutput, "forward")
def doubled(self: Any, x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight * 2 - weight.detach(), self.bias)


@plant(
    "tensors are counted as if none had its axes in another order",
    "a copy that autograd keeps",
    "llama",
    "saved-bytes",
    shape_rules,
    "tensor_like",
)
def in_one_order(value: Tensor, dtype: Any = None) -> Tensor:
    return shape_rules.empty_tensor(value.shape, dtype or value.dtype)


make = head.TiedOutput.__init__
places_of = WeightMap.places_of


@plant("a tie is lost on the meta device", "Modalities/modalities#357", "gpt2", "copies", head.TiedOutput, "__init__")
def untied(self: Any, d_out: int, *, bias: bool) -> None:
    make(self, d_out, bias=bias)
    self.own = nn.Linear(32, d_out, bias=False)


@plant(
    "a tied table is written as an empty tensor", "pytorch/torchtitan#3764", "gpt2", "save", folder_format, "save_model"
)
def emptied(model: nn.Module, file: str, metadata: Any) -> None:
    state = {name: x if name != "embedding.tokens.weight" else torch.empty(0) for name, x in model.state_dict().items()}
    save_file(state, Path(file), metadata)


@plant("a converter exchanges gate and up", "two names of one shape", "trained", "locations", WeightMap, "places_of")
def exchanged(self: Any, link: Link) -> list[TensorLocation]:
    gate, up = (f"decoder.layers.1.ffn.{name}.weight" for name in ("gate", "up"))
    other = {gate: up, up: gate}
    return places_of(self, replace(link, model=tuple(other.get(name, name) for name in link.model)))


@plant("a family exchanges gate and up", "read and written in one way", "llama", "transformers", WeightMap, "places_of")
def gate_for_up(self: Any, link: Link) -> list[TensorLocation]:
    return places_of(self, renamed(link, "ffn.gate.", "ffn.up."))


@plant("a family exchanges two norms", "read and written in one way", "llama", "transformers", WeightMap, "places_of")
def one_norm_for_the_other(self: Any, link: Link) -> list[TensorLocation]:
    return places_of(self, renamed(link, "attention_norm_in.", "ffn_norm_in."))


def renamed(link: Link, first: str, second: str) -> Link:
    """Return the link with two tensors of each layer exchanged."""
    names = [name.replace(first, second) if first in name else name.replace(second, first) for name in link.model]
    return replace(link, model=tuple(names))


window = ContextKey.window.fget  # type: ignore[attr-defined]


def one_more(key: ContextKey) -> int | None:
    size = window(key)
    return None if size is None else size + 1


class Exchanged(tfkit.nn.Linear):
    """A linear layer of an FFN whose flag `residual` is the wrong way round."""

    def __init__(self, d_in: int, d_out: Any, *, bias: bool, residual: bool = False) -> None:
        super().__init__(d_in, d_out, bias=bias, residual=not residual)


BUGS += [
    Bug(
        "the residual factor belongs to the first matrix of the FFN",
        "a flag at the next line",
        "gpt2",
        "init",
        ((feedforward, "Linear", Exchanged),),
    ),
    Bug(
        "YaRN's factor of the softmax is missing",
        "onnxruntime/mobius#548",
        "yarn",
        "meaning",
        ((rope_scaling.YarnScalingConfig, "attention_factor", property(lambda config: 1.0)),),
    ),
    Bug(
        "the residual factor of an initialization is never applied",
        "huggingface/transformers#47458",
        "gpt2",
        "init",
        ((tfkit.building.initialize, "Linear", type("Unknown", (nn.Linear,), {})),),
    ),
    Bug(
        "a node with `same` has a copy of the weights",
        "two names in the state dict",
        "twins",
        "shared",
        ((Node, "module", property(lambda node: node.name)),),
    ),
    Bug(
        "the window is too wide in the mask and in the cache",
        "a number that both read",
        "mistral",
        "extents",
        ((AttentionContext, "visible", wider), (ContextKey, "window", property(one_more))),
    ),
]
