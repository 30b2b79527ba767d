"""The recurrences in chunks against the same recurrences token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tfkit_recurrent import decaying_mean, delta_rule, linear_attention, linear_scan, running_max
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


def mean_inputs(length: int, spread: float) -> tuple[Tensor, ...]:
    rates = torch.tensor([0.0, 0.3, 1e20, 2.0, 500.0], dtype=torch.float64)
    state = (torch.randn(2, 5, dtype=torch.float64), torch.tensor([-1e30, 3.0], dtype=torch.float64).expand(5, 2).mT)
    return spread * normal(2, length, 5), normal(2, length, 5), -rates, normal(5), *state


def mean_by_token(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, mean: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Average all values at each position, from the logarithms of all weights."""
    rows = []
    logs, values = weight[:, None], mean[:, None]
    for t in range(k.size(1)):
        boosted = torch.cat((logs, k[:, t, None] + bonus), dim=1)
        rows.append((boosted.softmax(dim=1) * torch.cat((values, v[:, t, None]), dim=1)).sum(dim=1))
        logs, values = torch.cat((logs + log_decay, k[:, t, None]), dim=1), torch.cat((values, v[:, t, None]), dim=1)
    return torch.stack(rows, dim=1), (logs.softmax(dim=1) * values).sum(dim=1), logs.logsumexp(dim=1)


@pytest.mark.parametrize("spread", [1.0, 300.0])
@pytest.mark.parametrize("length", [1, 23, 70])
def test_decaying_mean(length: int, spread: float) -> None:
    """Keys that differ by hundreds, of which no exponential is finite, and decays that leave nothing, are exact."""
    inputs = mean_inputs(length, spread)
    expected = mean_by_token(*inputs)
    for chunk in CHUNKS:
        for actual, other in zip(decaying_mean(*inputs, chunk), expected, strict=True):
            torch.testing.assert_close(actual, other, atol=1e-11, rtol=1e-11)


def test_running_max() -> None:
    log_decay, x = -torch.rand(2, 3, 23, dtype=torch.float64), normal(2, 3, 23)
    documents = torch.tensor([0] * 9 + [1] * 14).expand(2, -1)
    for numbers, starts in ((None, ()), (documents, (0, 9))):
        start = normal(2, 3) if numbers is None else torch.zeros(2, 3, dtype=torch.float64)
        largest, rows = start, list[Tensor]()
        for t in range(23):
            largest = torch.zeros_like(start) if t in starts else largest
            largest = torch.maximum(log_decay[:, :, t] + largest, x[:, :, t])
            rows.append(largest)
        for chunk in CHUNKS:
            results, last = running_max(log_decay, x, start, chunk, numbers)
            torch.testing.assert_close(results, torch.stack(rows, dim=2))
            torch.testing.assert_close(last, largest)


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


@pytest.mark.parametrize("length", [1, 7])
def test_gradients_of_a_decaying_mean(length: int) -> None:
    tensors = [tensor[..., :2].clone().requires_grad_() for tensor in mean_inputs(length, 1.0)]
    assert torch.autograd.gradcheck(lambda *x: decaying_mean(*x, 3), tensors, fast_mode=True)


def test_fast_decays_have_finite_gradients() -> None:
    for inputs, function in (
        (delta_inputs(23, 4, 5000.0), delta_rule),
        (delta_inputs(23, 1, 5000.0), delta_rule),
        (attention_inputs(23, 5000.0), linear_attention),
        (mean_inputs(23, 5000.0), decaying_mean),
    ):
        tensors = [tensor.float().requires_grad_() for tensor in inputs]
        function(*tensors, 16)[0].sum().backward()
        assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in tensors)
