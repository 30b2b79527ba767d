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
    """Return the rule for an operation; None if torch computes it."""
    if func not in RULES and torch.Tag.pointwise in func.tags:
        return _first_argument if dispatch.is_mutable(func) else _Pointwise(func)
    return RULES.get(func)


def empty_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of this shape and dtype."""
    return torch.empty(shape, dtype=dtype, device="meta")


def tensor_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of the same shape without gaps, with its axes in the same memory order."""
    return dense_tensor(tensor.shape, [tensor], dtype or tensor.dtype)


def dense_tensor(shape: Sequence[int], inputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a tensor for inputs that broadcast to a shape. The first input with an axis order decides the layout."""
    if inputs[0].shape == shape and inputs[0].is_contiguous():
        return empty_tensor(shape, dtype)
    all_strides = [tensor.expand(shape).stride() for tensor in inputs]

    def is_outer(axis: int, other: int) -> bool | None:
        """Return True if `axis` varies more slowly than `other`, False if it varies faster, None if undecided."""
        for strides in all_strides:
            stride, other_stride = strides[axis], strides[other]
            if stride and other_stride and (stride != other_stride or shape[axis] > shape[other]):
                return stride > other_stride or stride == other_stride
        return None

    order = [*range(len(shape))][::-1]  # sorted by insertion, as in torch: the order of two axes may be undecided
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
        tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)]
        shape, dtype = _common_shape(tensors), self._dtype(tensors, args, integral="rounding_mode" in kwargs)
        return (
            dense_tensor(shape, [argument for argument in tensors if argument.dim()], dtype)
            if shape
            else empty_tensor(shape, dtype)
        )

    def _dtype(self, tensors: list[Tensor], args: Any, *, integral: bool) -> torch.dtype:
        if self.compares:
            return torch.bool
        dtype = _promoted_dtype(tensors)
        floats = (self.floats and not integral) or any(isinstance(argument, float) for argument in args)
        return torch.get_default_dtype() if floats and not dtype.is_floating_point else dtype


_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan", "isinf"}
_FLOATS = {"div", "cos", "sin", "exp", "log", "sqrt", "rsqrt", "reciprocal", "tanh", "sigmoid"}
"""Operations that return real numbers for integers."""


def _common_shape(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the shape that all tensors broadcast to."""
    n = max(tensor.dim() for tensor in tensors)
    sizes = [[1] * (n - tensor.dim()) + list(tensor.shape) for tensor in tensors]
    return tuple(next((size for size in axis if size != 1), 1) for axis in zip(*sizes, strict=True))


def _promoted_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    integral = [tensor for tensor in tensors if tensor.dim()] or tensors
    for tensor in integral:
        dtype = (
            torch.promote_types(dtype, tensor.dtype) if dtype in [other.dtype for other in integral] else tensor.dtype
        )
    return dtype


def _first_argument(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the argument that is changed in place."""
    return tensor


def _same_layout(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor_like(tensor, kwargs.get("dtype"))


def _same_shape(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return empty_tensor(tensor.shape, tensor.dtype)


def _embedding_rows(table: Tensor, ids: Tensor, *args: Any) -> Tensor:
    return empty_tensor((*ids.shape, table.size(1)), table.dtype)


def _embedding_back(grad: Tensor, ids: Tensor, rows: int, *args: Any) -> Tensor:
    return empty_tensor((rows, grad.size(-1)), grad.dtype)


def _arange(start: float, end: float | None = None, step: float = 1, *, dtype: Any = None, **kwargs: Any) -> Tensor:
    start, end = (0, start) if end is None else (start, end)
    integral = all(isinstance(value, int) for value in (start, end, step))
    return empty_tensor(
        (-int((start - end) // step),), dtype or (torch.int64 if integral else torch.get_default_dtype())
    )


def _filled_tensor(shape: Sequence[int], *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
    return empty_tensor(shape, dtype or torch.get_default_dtype())


def _new_tensor(tensor: Tensor, shape: Sequence[int], *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
    return empty_tensor(shape, dtype or tensor.dtype)


def _concatenated_tensors(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.size(dim) for tensor in tensors)
    return empty_tensor(shape, _promoted_dtype(tensors))


def _stacked_tensors(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return empty_tensor(shape, tensors[0].dtype)


def _matrix_product(a: Tensor, b: Tensor) -> Tensor:
    return empty_tensor((*a.shape[:-1], b.size(-1)), a.dtype)


def _product_with_bias(bias: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    return _matrix_product(a, b)


def _layer_norm(x: Tensor, shape: Sequence[int], *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
    wide = torch.promote_types(x.dtype, torch.float32)
    return _same_shape(x), empty_tensor(rows, wide), empty_tensor(rows, wide)


def _layer_norm_back(
    grad: Tensor, x: Tensor, shape: Any, mean: Any, rstd: Any, weight: Tensor | None, bias: Tensor | None, mask: Any
) -> tuple[Tensor | None, ...]:
    return tuple(
        _same_shape(tensor) if tensor is not None and on else None
        for tensor, on in zip((x, weight, bias), mask, strict=True)
    )


def _reduced_tensor(tensor: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    axes = {axis % tensor.dim() for axis in ([dim] if isinstance(dim, int) else dim or range(tensor.dim()))}
    shape = [1 if axis in axes else size for axis, size in enumerate(tensor.shape) if axis not in axes or keepdim]
    return empty_tensor(shape, dtype or tensor.dtype)


def _summed_tensor(tensor: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
    integral = None if tensor.is_floating_point() else torch.int64
    return _reduced_tensor(tensor, *args, dtype=dtype or integral, **kwargs)


def _copied_tensor(tensor: Tensor, *, dtype: Any = None, memory_format: Any = None, **kwargs: Any) -> Tensor:
    """Return a copy; contiguous if requested."""
    if memory_format is torch.contiguous_format:
        return empty_tensor(tensor.shape, dtype or tensor.dtype)
    return tensor_like(tensor, dtype)


def _top_values(tensor: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    shape = list(tensor.shape)
    shape[dim] = k
    return empty_tensor(shape, tensor.dtype), empty_tensor(shape, torch.int64)


def _sorted_values(tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _same_shape(tensor), empty_tensor(tensor.shape, torch.int64)


def _select_back(grad: Tensor, shape: Sequence[int], *args: Any) -> Tensor:
    return empty_tensor(shape, grad.dtype)


def _selected_slices(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = index.numel()
    return empty_tensor(shape, tensor.dtype)


def _gathered_values(tensor: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
    return empty_tensor(index.shape, tensor.dtype)


def _softmax(tensor: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Return the softmax. The third argument is a dtype, or a flag about half precision that is False here."""
    return empty_tensor(tensor.shape, dtype or tensor.dtype)


def _nll_loss(rows: Tensor, targets: Tensor, weight: Any, reduction: int, ignore: int) -> tuple[Tensor, Tensor]:
    return empty_tensor(targets.shape if reduction == 0 else (), rows.dtype), empty_tensor((), rows.dtype)


def _like_second_argument(grad: Tensor, tensor: Tensor, *args: Any) -> Tensor:
    return _same_shape(tensor)


def _padded_tensor(tensor: Tensor, pad: Sequence[int], *args: Any) -> Tensor:
    shape = list(tensor.shape)
    for i in range(len(pad) // 2):
        shape[-1 - i] += pad[2 * i] + pad[2 * i + 1]
    return empty_tensor(shape, tensor.dtype)


def _dropout(tensor: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    return tensor_like(tensor), tensor_like(tensor, torch.bool)


RULES: dict[Any, Rule] = {
    aten.embedding.default: _embedding_rows,
    aten.embedding_dense_backward.default: _embedding_back,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.zeros.default: _filled_tensor,
    aten.ones.default: _filled_tensor,
    aten.full.default: _filled_tensor,
    aten.new_zeros.default: _new_tensor,
    aten.new_empty.default: _new_tensor,
    aten.new_full.default: _new_tensor,
    aten.zeros_like.default: _copied_tensor,
    aten.ones_like.default: _copied_tensor,
    aten.empty_like.default: _copied_tensor,
    aten.full_like.default: lambda tensor, value, **kwargs: _copied_tensor(tensor, **kwargs),
    aten.clone.default: _copied_tensor,
    dispatch.TO_COPY: _copied_tensor,
    aten.copy_.default: _first_argument,
    aten.masked_fill.Scalar: lambda tensor, mask, value: _same_shape(tensor),
    aten.tril.default: _same_shape,
    aten.triu.default: _same_shape,
    aten.cumsum.default: _same_layout,
    aten.cat.default: _concatenated_tensors,
    aten.stack.default: _stacked_tensors,
    aten.mm.default: _matrix_product,
    aten.bmm.default: _matrix_product,
    aten.addmm.default: _product_with_bias,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_back,
    aten.native_dropout.default: _dropout,
    aten.native_dropout_backward.default: _same_layout,
    aten.sum.default: _summed_tensor,
    aten.sum.dim_IntList: _summed_tensor,
    aten.mean.dim: _reduced_tensor,
    aten.amax.default: _reduced_tensor,
    aten.all.dim: lambda tensor, dim, keepdim=False: _reduced_tensor(tensor, dim, keepdim, dtype=torch.bool),
    aten.constant_pad_nd.default: _padded_tensor,
    aten.flip.default: _same_layout,
    aten.floor_divide.default: _same_shape,
    aten.searchsorted.Tensor: lambda edges, values, **kwargs: empty_tensor(values.shape, torch.int64),
    dispatch.SOFTMAX: _same_shape,
    dispatch.SAFE_SOFTMAX: _softmax,
    dispatch.LOG_SOFTMAX: _same_shape,
    dispatch.SOFTMAX_BACKWARD: _like_second_argument,
    dispatch.LOG_SOFTMAX_BACKWARD: _like_second_argument,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _like_second_argument,
    aten.softplus_backward.default: _like_second_argument,
    aten.topk.default: _top_values,
    aten.sort.default: _sorted_values,
    aten.sort.stable: lambda tensor, **kwargs: _sorted_values(tensor),
    aten.gather.default: _gathered_values,
    aten.index_select.default: _selected_slices,
    aten.index_copy_.default: _first_argument,
    aten.scatter_.src: _first_argument,
    aten.scatter.value: _same_shape,
    aten.scatter.src: _same_shape,
    aten.scatter_add.default: _same_shape,
    aten.index_add.default: _same_shape,
    aten.slice_backward.default: _select_back,
    aten.select_backward.default: _select_back,
}
