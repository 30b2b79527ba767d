"""The results of operations on the meta device.

Torch computes them too, but first imports a computer algebra system, which takes longer than everything else here.
Operations without a rule are left to torch; the tests compare every rule with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tfkit.torch_private import dispatch

Rule = Callable[..., Any]
aten: Any = torch.ops.aten


@cache
def rule_of(func: Any) -> Rule | None:
    """The rule for an operation; None if it is left to torch."""
    if func not in RULES and torch.Tag.pointwise in func.tags:
        return _first if dispatch.is_mutable(func) else _Pointwise(func)
    return RULES.get(func)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of that shape and type."""
    return torch.empty(shape, dtype=dtype, device="meta")


def like(one: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the same shape without gaps, with its axes in the same memory order."""
    return dense(one.shape, [one], dtype or one.dtype)


def dense(shape: Sequence[int], given: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The result of arguments that broadcast to a shape: its axes have the memory order of the first that has one."""
    if given[0].shape == shape and given[0].is_contiguous():
        return empty(shape, dtype)
    all_strides = [one.expand(shape).stride() for one in given]

    def is_outer(axis: int, other: int) -> bool | None:
        """True if an axis is the slower one, False if the other is, None if nothing tells."""
        for strides in all_strides:
            mine, its = strides[axis], strides[other]
            if mine and its and (mine != its or shape[axis] > shape[other]):
                return mine > its or mine == its
        return None

    order = [*range(len(shape))][::-1]  # sorted by insertion, as torch does: nothing may tell two axes apart
    for last in range(1, len(order)):
        at = last
        for before in reversed(range(last)):
            outer = is_outer(order[before], order[at])
            if outer is False:
                break
            if outer:
                order[before], order[at], at = order[at], order[before], before
    strides, step = [1] * len(order), 1
    for axis in order:
        strides[axis], step = step, step * shape[axis]
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


class _Pointwise:
    """Value by value: the shape that all arguments broadcast to."""

    def __init__(self, func: Any) -> None:
        name = func.overloadpacket.__name__
        self.compares, self.floats = name in _COMPARISONS, name in _FLOATS

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        shape, dtype = _common(tensors), self._dtype(tensors, args, whole="rounding_mode" in kwargs)
        return dense(shape, [one for one in tensors if one.dim()], dtype) if shape else empty(shape, dtype)

    def _dtype(self, tensors: list[Tensor], args: Any, *, whole: bool) -> torch.dtype:
        if self.compares:
            return torch.bool
        dtype = _promoted(tensors)
        floats = (self.floats and not whole) or any(isinstance(one, float) for one in args)
        return torch.get_default_dtype() if floats and not dtype.is_floating_point else dtype


_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan", "isinf"}
_FLOATS = {"div", "cos", "sin", "exp", "log", "sqrt", "rsqrt", "reciprocal", "tanh", "sigmoid"}
"""Operations that return real numbers for integers."""


def _common(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The shape that all broadcast to."""
    n = max(one.dim() for one in tensors)
    sizes = [[1] * (n - one.dim()) + list(one.shape) for one in tensors]
    return tuple(next((size for size in axis if size != 1), 1) for axis in zip(*sizes, strict=True))


def _promoted(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    whole = [one for one in tensors if one.dim()] or tensors
    for one in whole:
        dtype = torch.promote_types(dtype, one.dtype) if dtype in [other.dtype for other in whole] else one.dtype
    return dtype


def _first(one: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The argument that is changed in place."""
    return one


def _same(one: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return like(one, kwargs.get("dtype"))


def _plain(one: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return empty(one.shape, one.dtype)


def _embedding(table: Tensor, ids: Tensor, *args: Any) -> Tensor:
    return empty((*ids.shape, table.size(1)), table.dtype)


def _embedding_back(grad: Tensor, ids: Tensor, rows: int, *args: Any) -> Tensor:
    return empty((rows, grad.size(-1)), grad.dtype)


def _arange(start: float, end: float | None = None, step: float = 1, *, dtype: Any = None, **kwargs: Any) -> Tensor:
    start, end = (0, start) if end is None else (start, end)
    whole = all(isinstance(one, int) for one in (start, end, step))
    return empty((-int((start - end) // step),), dtype or (torch.int64 if whole else torch.get_default_dtype()))


def _full(shape: Sequence[int], *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
    return empty(shape, dtype or torch.get_default_dtype())


def _new(one: Tensor, shape: Sequence[int], *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
    return empty(shape, dtype or one.dtype)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(one.size(dim) for one in tensors)
    return empty(shape, _promoted(tensors))


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return empty(shape, tensors[0].dtype)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return empty((*a.shape[:-1], b.size(-1)), a.dtype)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    return _mm(a, b)


def _layer_norm(x: Tensor, shape: Sequence[int], *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
    wide = torch.promote_types(x.dtype, torch.float32)
    return _plain(x), empty(rows, wide), empty(rows, wide)


def _layer_norm_back(
    grad: Tensor, x: Tensor, shape: Any, mean: Any, rstd: Any, weight: Tensor | None, bias: Tensor | None, mask: Any
) -> tuple[Tensor | None, ...]:
    return tuple(
        _plain(one) if one is not None and on else None for one, on in zip((x, weight, bias), mask, strict=True)
    )


def _reduced(one: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    axes = {axis % one.dim() for axis in ([dim] if isinstance(dim, int) else dim or range(one.dim()))}
    shape = [1 if axis in axes else size for axis, size in enumerate(one.shape) if axis not in axes or keepdim]
    return empty(shape, dtype or one.dtype)


def _sum(one: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
    whole = None if one.is_floating_point() else torch.int64
    return _reduced(one, *args, dtype=dtype or whole, **kwargs)


def _copy(one: Tensor, *, dtype: Any = None, memory_format: Any = None, **kwargs: Any) -> Tensor:
    """A copy; contiguous if requested."""
    if memory_format is torch.contiguous_format:
        return empty(one.shape, dtype or one.dtype)
    return like(one, dtype)


def _best(one: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    shape = list(one.shape)
    shape[dim] = k
    return empty(shape, one.dtype), empty(shape, torch.int64)


def _sorted(one: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _plain(one), empty(one.shape, torch.int64)


def _select_back(grad: Tensor, shape: Sequence[int], *args: Any) -> Tensor:
    return empty(shape, grad.dtype)


def _select(one: Tensor, dim: int, index: Tensor) -> Tensor:
    shape = list(one.shape)
    shape[dim] = index.numel()
    return empty(shape, one.dtype)


def _gather(one: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
    return empty(index.shape, one.dtype)


def _softmax(one: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Softmax; its third argument is a type, or a flag about half precision that is False here."""
    return empty(one.shape, dtype or one.dtype)


def _nll(rows: Tensor, targets: Tensor, weight: Any, reduction: int, ignore: int) -> tuple[Tensor, Tensor]:
    return empty(targets.shape if reduction == 0 else (), rows.dtype), empty((), rows.dtype)


def _second(grad: Tensor, one: Tensor, *args: Any) -> Tensor:
    return _plain(one)


def _padded(one: Tensor, pad: Sequence[int], *args: Any) -> Tensor:
    shape = list(one.shape)
    for i in range(len(pad) // 2):
        shape[-1 - i] += pad[2 * i] + pad[2 * i + 1]
    return empty(shape, one.dtype)


def _dropout(one: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    return like(one), like(one, torch.bool)


RULES: dict[Any, Rule] = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_back,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.zeros.default: _full,
    aten.ones.default: _full,
    aten.full.default: _full,
    aten.new_zeros.default: _new,
    aten.new_empty.default: _new,
    aten.new_full.default: _new,
    aten.zeros_like.default: _copy,
    aten.ones_like.default: _copy,
    aten.empty_like.default: _copy,
    aten.full_like.default: lambda one, value, **kwargs: _copy(one, **kwargs),
    aten.clone.default: _copy,
    dispatch.TO_COPY: _copy,
    aten.copy_.default: _first,
    aten.masked_fill.Scalar: lambda one, mask, value: _plain(one),
    aten.tril.default: _plain,
    aten.cumsum.default: _same,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: _addmm,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_back,
    aten.native_dropout.default: _dropout,
    aten.native_dropout_backward.default: _same,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _reduced,
    aten.amax.default: _reduced,
    aten.all.dim: lambda one, dim, keepdim=False: _reduced(one, dim, keepdim, dtype=torch.bool),
    aten.constant_pad_nd.default: _padded,
    aten.flip.default: _same,
    aten.floor_divide.default: _plain,
    aten.searchsorted.Tensor: lambda edges, values, **kwargs: empty(values.shape, torch.int64),
    dispatch.SOFTMAX: _plain,
    dispatch.SAFE_SOFTMAX: _softmax,
    dispatch.LOG_SOFTMAX: _plain,
    dispatch.SOFTMAX_BACKWARD: _second,
    dispatch.LOG_SOFTMAX_BACKWARD: _second,
    aten.nll_loss_forward.default: _nll,
    aten.nll_loss_backward.default: _second,
    aten.topk.default: _best,
    aten.sort.default: _sorted,
    aten.sort.stable: lambda one, **kwargs: _sorted(one),
    aten.gather.default: _gather,
    aten.index_select.default: _select,
    aten.index_copy_.default: _first,
    aten.scatter_.src: _first,
    aten.scatter.value: _plain,
    aten.scatter.src: _plain,
    aten.scatter_add.default: _plain,
    aten.index_add.default: _plain,
    aten.slice_backward.default: _select_back,
    aten.select_backward.default: _select_back,
}
