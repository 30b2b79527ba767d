"""The recurrences in chunks against the same recurrences token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tfkit_recurrent import delta_rule, linear_attention, linear_scan
from torch import Tensor

CHUNKS = (1, 5, 16, 64, 1000)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def delta_by_token(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    rows = []
    for t in range(q.size(2)):
        state = state * log_decay[:, :, t, :, None].exp()
        stored = (k[:, :, t, :, None] * state).sum(dim=2)
        write = beta[:, :, t] * (v[:, :, t] - stored)
        state = state + k[:, :, t, :, None] * write[:, :, None]
        rows.append((q[:, :, t, :, None] * state).sum(dim=2))
    return torch.stack(rows, dim=2), state


def attention_by_token(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    rows = []
    for t in range(q.size(2)):
        outer = k[:, :, None, t, :, None] * v[:, :, :, t, None]
        state = state * log_decay[:, :, :, t, None, None].exp() + outer
        rows.append((q[:, :, None, t, :, None] * state).sum(dim=3))
    return torch.stack(rows, dim=3), state


def delta_inputs(length: int, width: int, rate: float) -> tuple[Tensor, ...]:
    k = torch.nn.functional.normalize(normal(2, 3, length, 4), dim=-1)
    log_decay = -rate * torch.rand(2, 3, length, width, dtype=torch.float64)
    beta = 2 * torch.rand(2, 3, length, 1, dtype=torch.float64)
    return normal(2, 3, length, 4), k, normal(2, 3, length, 5), log_decay, beta, normal(2, 3, 4, 5)


def attention_inputs(length: int, rate: float) -> tuple[Tensor, ...]:
    log_decay = -rate * torch.rand(2, 2, 3, length, dtype=torch.float64)
    return (
        normal(2, 2, length, 4),
        normal(2, 2, length, 4),
        normal(2, 2, 3, length, 5),
        log_decay,
        normal(2, 2, 3, 4, 5),
    )


@pytest.mark.parametrize("rate", [0.0, 0.3, 500.0])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("length", [1, 23, 70])
def test_delta_rule(length: int, width: int, rate: float) -> None:
    inputs = delta_inputs(length, width, rate)
    y, state = delta_by_token(*inputs)
    for chunk in CHUNKS:
        output, last = delta_rule(*inputs, chunk)
        torch.testing.assert_close(output, y, atol=1e-11, rtol=1e-11)
        torch.testing.assert_close(last, state, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("rate", [0.0, 0.3, 500.0])
@pytest.mark.parametrize("length", [1, 23, 70])
def test_linear_attention(length: int, rate: float) -> None:
    inputs = attention_inputs(length, rate)
    y, state = attention_by_token(*inputs)
    for chunk in CHUNKS:
        output, last = linear_attention(*inputs, chunk)
        torch.testing.assert_close(output, y, atol=1e-11, rtol=1e-11)
        torch.testing.assert_close(last, state, atol=1e-11, rtol=1e-11)


def test_linear_scan() -> None:
    decay, write, start = torch.rand(2, 9, 3, dtype=torch.float64), normal(2, 9, 3), normal(2, 3)
    state, rows = start, []
    for t in range(9):
        state = decay[:, t] * state + write[:, t]
        rows.append(state)
    torch.testing.assert_close(linear_scan(decay, write, start), torch.stack(rows, dim=1))


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda *x: delta_rule(*x, 3), lambda length: delta_inputs(length, 1, 0.5)),
        (lambda *x: delta_rule(*x, 3), lambda length: delta_inputs(length, 4, 0.5)),
        (lambda *x: linear_attention(*x, 3), lambda length: attention_inputs(length, 0.5)),
    ],
    ids=["delta", "delta of channels", "attention"],
)
def test_gradients(
    function: Callable[..., tuple[Tensor, Tensor]], inputs: Callable[[int], tuple[Tensor, ...]], length: int
) -> None:
    tensors = [tensor[:1, :1].requires_grad_() for tensor in inputs(length)]
    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)


def test_fast_decays_have_finite_gradients() -> None:
    for inputs, function in (
        (delta_inputs(23, 4, 5000.0), delta_rule),
        (delta_inputs(23, 1, 5000.0), delta_rule),
        (attention_inputs(23, 5000.0), linear_attention),
    ):
        tensors = [tensor.float().requires_grad_() for tensor in inputs]
        function(*tensors, 16)[0].sum().backward()
        assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in tensors)
