"""Kernels of other libraries, for tensors on CUDA: `causal_conv1d`, and Flash Linear Attention, `fla`.

A library is used if it is installed, and is imported at first use. Each function calls a kernel, and has the arguments
and results of the torch code that it replaces. `attend` chooses between the two.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from tfkit.nn import is_scripting
from tfkit_recurrent.recurrence import linear_attention


def has_kernel(library: str, x: Tensor) -> bool:
    """Return True if a library is installed and its kernels support x."""
    return x.is_cuda and x.dtype != torch.float64 and not torch.compiler.is_compiling() and is_installed(library)


@cache
def is_installed(library: str) -> bool:
    """Return True if a library can be imported. The result is cached: the search takes as long as a small kernel."""
    return find_spec(library) is not None


def convolve(history: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve [b, k - 1 + t, c] with the weight [c, 1, k] -> [b, t, c]."""
    kernel = import_module("causal_conv1d").causal_conv1d_fn
    y = kernel(history.mT.contiguous(), weight[:, 0], bias)
    return y[:, :, weight.size(2) - 1 :].mT


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    chunk: int,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `recurrence.linear_attention` in torch or, on CUDA and for rows of one document, by a kernel."""
    if not is_scripting():  # noqa: SIM102  TorchScript skips this `if`, but would compile its condition
        if documents is None and has_kernel("fla", q):
            return fla_linear_attention(q, k, v, log_decay, state)
    return linear_attention(q, k, v, log_decay, state, chunk, documents)


def fla_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `recurrence.linear_attention`."""
    kernel = import_module("fla.ops.simple_gla").chunk_simple_gla
    q, k = (_ungrouped(x[:, :, None].expand(-1, -1, v.size(2), -1, -1)) for x in (q, k))
    y, last = kernel(
        _exchange_axes(q),
        _exchange_axes(k),
        _exchange_axes(_ungrouped(v)),
        _exchange_axes(_ungrouped(log_decay.expand(v.shape[:4]))),
        scale=1.0,
        initial_state=None if state is None else _ungrouped(state),
        output_final_state=True,
    )
    return _exchange_axes(y).unflatten(1, v.shape[1:3]), last.unflatten(1, v.shape[1:3])


def _exchange_axes(x: Tensor) -> Tensor:
    """Exchange the axes of heads and positions, because the kernels expect positions first."""
    return torch.einsum("bht...->bth...", x)


def _ungrouped(x: Tensor) -> Tensor:
    """Merge groups and their heads: [b, g, r, ...] -> [b, h, ...]."""
    return x.flatten(1, 2)


def fla_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `recurrence.delta_rule`."""
    if log_decay.size(3) == 1:
        kernel, log_decay = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule, log_decay[..., 0]
    else:
        kernel = import_module("fla.ops.kda").chunk_kda
    y, last = kernel(
        _exchange_axes(q),
        _exchange_axes(k),
        _exchange_axes(v),
        _exchange_axes(log_decay),
        _exchange_axes(beta[..., 0]),
        scale=1.0,
        initial_state=state,
        output_final_state=True,
    )
    return _exchange_axes(y), last
