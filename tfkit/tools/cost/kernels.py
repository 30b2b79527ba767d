"""Kernels that keep for the backward what a real device keeps: on the meta device torch would use others.

`scaled_dot_product_attention` is one kernel that keeps queries, keys, values, its output and a number per query; if
there is none, on the CPU with dropout or a learned mask, torch computes it step by step, and so does this. The FLOPs
are the same. Dropout keeps one byte for each value on CUDA, and its factors in the model's type on the CPU.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tfkit.tools.cost.observe import Watch

Kernels = Literal["cuda", "cpu"]


class OwnKernels(TorchFunctionMode):
    """Runs attention and dropout as the kernels of a device do; `watch` receives the FLOPs of attention."""

    def __init__(self, watch: Watch, kernels: Kernels) -> None:
        super().__init__()
        self.watch = watch
        self.cuda = kernels == "cuda"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and (inputs := self._fused(*args, **kwargs)):
            return Attend.apply(self.watch, *inputs)
        if func is F.dropout and self.cuda:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
        """Return the arguments of the fused kernel, however it was called; None if there is no such kernel."""
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = attn_mask.to(query.dtype)  # each call of the kernel adds numbers, and keeps them
        learned = attn_mask is not None and attn_mask.requires_grad
        fused = self.cuda or (dropout_p == 0 and not learned and query.size(3) == value.size(3))
        return (query, key, value, attn_mask) if fused else None


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


class Attend(torch.autograd.Function):
    """Queries [b, h, q, d], keys [b, g, k, d], values [b, g, k, v] and a mask -> [b, h, q, v], in one kernel."""

    @staticmethod
    def forward(ctx: Any, watch: Watch, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = torch.empty_like(q)  # the kernels follow the strides of the queries
        if q.size(3) != v.size(3):
            out = q.new_empty(q.size(0), q.size(2), q.size(1), v.size(3)).transpose(1, 2)
        ctx.watch, ctx.flops = watch, 2 * q.size(0) * q.size(1) * q.size(2) * k.size(2) * (q.size(3) + v.size(3))
        watch.count(ctx.flops)
        watch.read_all([q, k, v] if mask is None else [q, k, v, mask])
        ctx.save_for_backward(q, k, v, mask, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, mask, _, _ = ctx.saved_tensors
        ctx.watch.count(2 * ctx.flops)
        grads = [
            torch.empty_like(tensor) if needed else None
            for tensor, needed in zip((q, k, v), ctx.needs_input_grad[1:4], strict=True)
        ]
        of_mask = None
        if ctx.needs_input_grad[4]:  # of each sequence and head, before shared ones are summed
            whole = q.new_empty(*q.shape[:3], k.size(2))
            of_mask = torch.empty_like(mask) if whole.shape != mask.shape else whole
        return None, *grads, of_mask
