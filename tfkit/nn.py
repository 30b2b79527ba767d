"""The torch side of the contract: what every component's module is built from or called with.

Annotations are evaluated here, because TorchScript does not resolve those of a `NamedTuple` that are text.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn


class Context(NamedTuple):
    """What attention receives besides x. Computed once per forward by the stack, for all layers that share it.

    b batch, h heads, q queries, k keys.
    """

    mask: Tensor | None
    """Which keys a query reads: bool, True to read, or float, added to the scores; [b or 1, h or 1, q or 1, k]. None
    hides nothing, or only later keys where the module was built with `causal`."""
    rotary: Tensor | None
    """The table of the rotary positions, for the rotation of the same kind."""
    memory: Tensor | None
    """The sequence that cross-attention reads, [b, k, d_memory]; None in self-attention."""


class Linear(nn.Linear):
    """A linear layer whose weights are filled by the spec's `init`, not on construction.

    Args:
        d_in: width of the input.
        d_out: widths of the parts of the output; several for projections that are fused into one.
        bias: whether it has a bias.
        residual: whether the output is added to the residual stream.
    """

    def __init__(self, d_in: int, d_out: int | Sequence[int], *, bias: bool, residual: bool = False) -> None:
        self.parts = [d_out] if isinstance(d_out, int) else list(d_out)
        self.residual = residual
        super().__init__(d_in, sum(self.parts), bias=bias)

    def reset_parameters(self) -> None:
        """Nothing: the builder fills the weights once they have a place in memory."""


class Table(nn.Embedding):
    """An embedding table whose weights are filled by the spec's `init`, not on construction."""

    def reset_parameters(self) -> None:
        """Nothing: the builder fills the weights once they have a place in memory."""


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax of `scores` [b, h, q, k] over the keys that `mask` (see `Context`) lets through.

    A query that may read no key gets zeros, as in `scaled_dot_product_attention`, and no NaN in either direction.
    """
    if mask is None:
        return torch.softmax(scores, dim=-1)
    hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
    if mask.dtype != torch.bool:
        scores = scores + mask.masked_fill(hidden, 0.0)
    unreadable = hidden.all(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(hidden & ~unreadable, -math.inf), dim=-1)
    return weights.masked_fill(unreadable, 0.0)


class Program:
    """Writes the `forward` of a module as straight-line code: one call per step, nothing decided at run time.

    Every step has a name; the module called in it becomes a child of that name.
    """

    def __init__(self) -> None:
        self._graph = fx.Graph()
        self._root = nn.Module()

    def input(self, name: str, annotation: Any = Tensor, *, optional: bool = False) -> fx.Node:
        """An argument of `forward`; an optional one is None unless given."""
        if not optional:
            return self._graph.placeholder(name, type_expr=annotation)
        return self._graph.placeholder(name, type_expr=annotation | None, default_value=None)

    def call(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of `module`, which becomes the child `name`."""
        self._root.add_module(name, module)
        return self._graph.create_node("call_module", name, args, kwargs, name=name)

    def apply(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a function of torch or of `operator`."""
        return self._graph.create_node("call_function", function, args, kwargs, name=name)

    def weight(self, path: str) -> fx.Node:
        """A parameter of a child by its dotted path."""
        return self._graph.get_attr(path)

    def build(self, output: Any, class_name: str) -> fx.GraphModule:
        """The module whose `forward` returns `output`."""
        self._graph.output(output)
        return fx.GraphModule(self._root, self._graph, class_name=class_name)
