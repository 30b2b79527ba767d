"""Statistics of the activations of a model's components, by their names in the spec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.arguments import checked
from tfkit.building.builder import graph_of, inputs_of
from tfkit.building.model import BuiltModel, complete_model
from tfkit.graph.expand import Graph
from tfkit.tools.show.points import points_of
from tfkit.tools.trace.attention_weights import softmax_names, written_out
from tfkit.tools.trace.trace import Hook, registered_hooks

DEAD = 1e-3
"""Threshold: a unit of an FFN is dead if its magnitude never exceeds this."""


@checked
def activity(model: BuiltModel, /, *inputs: Tensor, **named: Tensor | None) -> dict[str, float]:
    """Return the sizes of activations, the entropies of attention and the dead units of FFNs.

    The model runs once, without dropout and gradients, and with its attention written out. The model is not modified.
    Each number is an average over the positions of all sequences, without padding.

    Args:
        model: a model that `tfkit.build` returned, or a wrapper that leaves its parameters as they are.
        inputs: arguments of the model's forward, in order.
        named: arguments by name, including padding masks.

    Returns:
        Numbers by quantity and name, in the order of the model. A layer that runs several times has averages.

        - `rms/decoder.layers.0.stream.out`, `rms/decoder.layers.0.ffn.out`, `rms/embedding`: root mean square of the
          residual stream, of the output of a sublayer, of an embedding.
        - `rms/decoder.layers.0.attention.heads.2`: the same for the output of a head, before the output projection.
        - `entropy/decoder.layers.0.attention.heads.2`: entropy of the attention weights of a head, in nats.
        - `dead/decoder.layers.0.ffn`: fraction of the hidden units that are at most 0.001 at all positions.

    Raises:
        ValueError: the model was not built by `tfkit.build`, its modules were changed since, or its parameters are
            sharded.
    """
    model = complete_model(model)
    graph = graph_of(model)
    twin, tensors = written_out(model)
    arguments = dict(zip(inputs_of(model), inputs, strict=False)) | named
    meters = list(_activity_meters(graph, twin, arguments))
    with registered_hooks(twin, meters) as values, ExitStack() as hooks, torch.no_grad():
        for path, name in softmax_names(twin).items():
            record = partial(_record_entropy, values, f"entropy/{name}.heads", _token_mask(graph, name, arguments))
            hooks.callback(twin.get_submodule(path).register_forward_hook(record).remove)
        torch.func.functional_call(twin, tensors, inputs, named)
    means = {name: torch.stack(runs).mean(0) for name, runs in values.items()}
    # A single transfer, so that a GPU is synchronized once.
    numbers = torch.cat([mean.reshape(-1) for mean in means.values()]).tolist()
    return dict(zip(_number_names(means), numbers, strict=True))


def _number_names(means: dict[str, Tensor]) -> Iterator[str]:
    """Yield the name of each number; a value with heads has a number for each head."""
    for name, mean in means.items():
        yield from [name] if mean.dim() == 0 else (f"{name}.{head}" for head in range(len(mean)))


@dataclass(eq=False)
class _Meter(Hook):
    """The hook of a value, which stores a number, or a number for each head, instead of the value."""

    mask: Tensor | None = None

    def _keep(self, value: Tensor) -> None:
        name, measure = f"rms/{self.point.name}", _root_mean_square
        if name.endswith(".hidden"):
            name, measure = f"dead/{self.point.name.removesuffix('.hidden')}", _dead_fraction
        self.values.setdefault(name, []).append(measure(value.float(), self.mask))


def _activity_meters(graph: Graph, model: fx.GraphModule, arguments: dict[str, Any]) -> Iterator[_Meter]:
    embeddings = {node.name for node in graph.nodes if node.stack is None and node.output.type == "sequence"}
    modules = {path for path, _ in model.named_modules()}
    for point in points_of(graph):
        measured = point.name in embeddings or point.name.endswith((".out", ".heads", ".hidden"))
        if measured and point.module in modules:
            yield _Meter(point, mask=_token_mask(graph, point.name, arguments))


def _token_mask(graph: Graph, name: str, arguments: dict[str, Any]) -> Tensor | None:
    """Return True for each position of a value that is not padding, [b, t]; None without padding."""
    mask = arguments.get(graph.node(name.partition(".")[0]).output.mask or "")
    return mask if mask is None or mask.dim() == 2 else mask.diagonal(dim1=1, dim2=2)


def _root_mean_square(value: Tensor, mask: Tensor | None) -> Tensor:
    """Return the root mean square of a value [b, t, width], or of each head of [b, h, t, width]."""
    return _token_mean(value.square().mean(-1), mask).sqrt()


def _dead_fraction(value: Tensor, mask: Tensor | None) -> Tensor:
    sizes = value.abs() if mask is None else value.abs() * mask[..., None]
    return (sizes.flatten(0, -2).amax(0) <= DEAD).float().mean()


def _record_entropy(
    values: dict[str, Any], name: str, mask: Tensor | None, _module: nn.Module, _args: object, weights: Tensor
) -> None:
    values.setdefault(name, []).append(_token_mean(torch.special.entr(weights.float()).sum(-1), mask))


def _token_mean(value: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over sequences and positions of [b, t], or for each head of [b, h, t]."""
    if mask is None or mask.shape != (value.size(0), value.size(-1)):
        return value.mean((0, -1))
    mask = mask if value.dim() == 2 else mask[:, None]
    return (value * mask).sum((0, -1)) / mask.sum().clamp(min=1)
