"""Layers that the builder fills, and the softmax for attention that computes its own.

Each range of rows of a fused matrix has a name: `attention.project.q` is a tensor for the weight map, whether q, k
and v are stored in one matrix or in three. The layout in memory can therefore change without a change to any map.

A weight is read only when its layer is called, because adapters, sharding and hooks act at the call. The exceptions
are a tied table, which the model passes to its head, and code that first calls `is_untouched`. Everywhere but in
incremental decoding, a `Linear` is `F.linear`, with the same bits as hand-written code.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfkit.nn.kernels import GUESS_LARGE, GUESS_ROWS, MIN_ELEMENTS, ONEDNN, PLAIN_TYPES, decoding, onednn_is_faster
from tfkit.nn.settings import named
from tfkit.torch_private.onednn import linear as by_onednn
from tfkit.torch_private.onednn import scripted_linear


class Linear(nn.Linear):
    """A linear layer with weights that the spec's `init` fills, not its constructor.

    Args:
        d_in: width of the input.
        d_out: width of the output; or names and widths of its parts, for projections that are fused into one. In a
            weight map, the rows of each part are `path.to.part.weight`.
        bias: true to add a bias.
        residual: true if the output is added to the residual stream.
    """

    def __init__(self, d_in: int, d_out: int | Mapping[str, int], *, bias: bool, residual: bool = False) -> None:
        self.parts: dict[str, int] | None = None if isinstance(d_out, int) else dict(d_out)
        self.residual = residual
        super().__init__(d_in, d_out if isinstance(d_out, int) else sum(d_out.values()), bias=bias)

    def reset_parameters(self) -> None:
        """Do nothing: the builder fills the weights once they have memory."""

    if TYPE_CHECKING:  # torch types a call of a module as Any

        def __call__(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return _with_parts(super().extra_repr(), self.parts)


class StackedLinear(nn.Module):
    """The weights of `n` linear layers of one shape, such as experts.

    A subclass multiplies them in its `forward`: libraries that adapt or shard weights act when a module is called.

    The builder fills each layer by the spec's `init`, as it would fill a `Linear`.

    Args:
        n: number of layers.
        d_in: width of their inputs.
        d_out: width of their outputs, or names and widths of the parts, see `Linear`.
        bias: true to add biases.
        residual: true if their outputs are added to the residual stream.
        per_token: number of layers that each token passes through, if not all. Only the reported number of active
            parameters depends on it.

    Attributes:
        weight: [n, d_out, d_in].
        bias: [n, d_out], or None.
    """

    def __init__(
        self,
        n: int,
        d_in: int,
        d_out: int | Mapping[str, int],
        *,
        bias: bool,
        residual: bool = False,
        per_token: int | None = None,
    ) -> None:
        super().__init__()
        self.parts = None if isinstance(d_out, int) else dict(d_out)
        self.residual = residual
        self.per_token = per_token
        width = d_out if isinstance(d_out, int) else sum(d_out.values())
        self.weight = nn.Parameter(torch.empty(n, width, d_in))
        self.bias = nn.Parameter(torch.empty(n, width)) if bias else None

    def extra_repr(self) -> str:
        n, d_out, d_in = self.weight.shape
        sizes = f"{n}, in_features={d_in}, out_features={d_out}, bias={self.bias is not None}"
        return _with_parts(sizes, self.parts)


def _with_parts(sizes: str, parts: Mapping[str, int] | None) -> str:
    """Return the size of the output, and the sizes of the parts that are fused into it."""
    return sizes if parts is None else f"{sizes}, {named(parts=parts)}"


is_scripting = torch.jit.is_scripting  # type: ignore[attr-defined]
is_tracing = torch.jit.is_tracing  # type: ignore[attr-defined]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [..., d_in] by weight [d_out, d_in] and add the bias, as `torch.nn.functional.linear` does.

    While a `CachedModel` decodes, large weights are multiplied by the kernel that reads them fastest on this machine.
    """
    if is_scripting():
        return _scripted_linear(x, weight, bias)
    else:  # noqa: RET505  TorchScript compiles what follows an `if`, but not an `else` that is never reached
        eager = not torch.compiler.is_compiling()
        if eager and decoding.active and weight.numel() >= MIN_ELEMENTS and onednn_is_faster(x, weight):
            return by_onednn(x, weight, bias)
        return F.linear(x, weight, bias)


def _guessing_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, large: int = GUESS_LARGE, least_rows: int = GUESS_ROWS
) -> Tensor:
    """Return an estimate that TorchScript can compile.

    It cannot ask for autocast (torch.is_autocast_cpu_enabled ends the process), but it can see the type of a product.
    """
    plain = x.is_cpu and weight.is_cpu and x.dtype == torch.float32 and weight.dtype == torch.float32
    if plain and weight.numel() >= large and x.numel() >= least_rows * weight.size(1) and not torch.is_grad_enabled():
        empty = x.new_empty([0, 0])
        if torch.mm(empty, empty).dtype == torch.float32:
            return scripted_linear(x, weight, bias)
    return F.linear(x, weight, bias)


_scripted_linear = _guessing_linear if ONEDNN else F.linear


def is_untouched(layer: nn.Module) -> bool:
    """Return True if a layer is the `Linear` that was built, with its weight, so code may read the weight directly.

    LoRA and quantization put another module or another tensor in its place.
    """
    return type(layer) is Linear and type(layer.weight) in PLAIN_TYPES


class Table(nn.Embedding):
    """An embedding table with weights that the spec's `init` fills, not its constructor."""

    def reset_parameters(self) -> None:
        """Do nothing: the builder fills the weights once they have memory."""


class Softmax(nn.Module):
    """Softmax of scores [b, h, q, k] over the keys that a mask (see `Context`) allows: the attention weights.

    A query without a key to read gets zeros, as in `scaled_dot_product_attention`, and no NaN in forward or backward.
    It is a module so that a hook can read the weights, as `tfkit.attention_weights` does.
    """

    def forward(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return torch.softmax(scores, dim=-1)
        hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
        if mask.dtype != torch.bool:
            scores = scores + mask.masked_fill(hidden, 0.0)
        unreadable = hidden.all(dim=-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(hidden & ~unreadable, -math.inf), dim=-1)
        return weights.masked_fill(unreadable, 0.0)


def choose_top(scores: Tensor, k: int, positions: Tensor | None = None) -> Tensor:
    """Return True at the k largest scores of the last axis; among equal scores, at the first positions.

    `torch.topk` chooses among equal scores by the shape of its input, so a model would choose differently when it reads
    tokens step by step. The choice has no gradient.

    Args:
        scores: [..., n].
        k: number of scores to choose, at most n.
        positions: int, broadcast to scores: positions that are not in the order of the axis, such as the
            `key_positions` of a `Context`.

    Returns:
        bool [..., n].
    """
    scores = scores.detach()
    top, columns = torch.topk(scores, k, dim=-1, sorted=False)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, columns, True)
    ties = scores == top.amin(dim=-1, keepdim=True)
    n_tied = (chosen & ties).sum(dim=-1, keepdim=True)
    if positions is None:
        # Boolean operators, because onnxruntime has no `where` for booleans.
        return (chosen & ~ties) | (ties & (ties.cumsum(dim=-1, dtype=torch.int32) <= n_tied))
    order = positions.argsort(dim=-1, stable=True).expand_as(scores)
    counts = ties.gather(-1, order).cumsum(dim=-1, dtype=torch.int32)
    counts = torch.zeros_like(counts).scatter(-1, order, counts)
    return (chosen & ~ties) | (ties & (counts <= n_tied))
