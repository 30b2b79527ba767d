"""The linear layer with its two kernels: one result, and a gradient whenever one is asked for."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tfkit.nn import Linear, linear
from tfkit.nn.layers import LARGE, ONEDNN

D_IN, D_OUT = 256, LARGE // 256


def layer() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(D_OUT, D_IN, generator=generator), torch.randn(D_OUT, generator=generator)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (0, 1), (7,), ()])
@pytest.mark.parametrize("biased", [True, False])
def test_both_kernels_agree(shape: tuple[int, ...], biased: bool) -> None:
    weight, bias = layer()
    x = torch.randn(*shape, D_IN)
    given = bias if biased else None
    with torch.no_grad():
        found = linear(x, weight, given)
    torch.testing.assert_close(found, F.linear(x, weight, given), rtol=1e-5, atol=1e-4)


def test_a_slice_and_a_transposed_input_are_read_as_they_are() -> None:
    weight, bias = layer()
    wide = torch.randn(4, 6, 2 * D_IN)
    with torch.no_grad():
        for x in (wide[..., :D_IN], wide[..., ::2], wide[..., :D_IN].transpose(0, 1), wide[:, -1:, D_IN:]):
            torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_the_kernel_without_a_gradient_runs_only_where_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []
    kernel = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda x, *rest: (calls.append(x.shape), kernel(x, *rest))[1]
    )
    weight, bias = layer()
    module = Linear(D_IN, D_OUT, bias=True)
    module.load_state_dict({"weight": weight, "bias": bias})
    x = torch.randn(2, D_IN)
    module(x).sum().backward()
    assert module.weight.grad is not None
    assert not calls
    with torch.no_grad():
        module(x)
        assert len(calls) == 1
        linear(x, weight[:1], bias[:1])  # small
        linear(x.double(), weight.double(), None)
        linear(x, weight.t().contiguous().t(), None)  # not in its order
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x).dtype == torch.bfloat16
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_makes_the_same_choice() -> None:
    module = Linear(D_IN, D_OUT, bias=True)
    weight, bias = layer()
    module.load_state_dict({"weight": weight, "bias": bias})
    scripted, x = torch.jit.script(module), torch.randn(2, 3, D_IN)
    with torch.no_grad():
        assert torch.equal(scripted(x), module(x))
        assert torch.equal(scripted(x[..., :1, :]), module(x[..., :1, :]))
        assert torch.equal(torch.jit.script(module.double())(x.double()), module(x.double()))
        module.float()
        with torch.autocast("cpu", torch.bfloat16):
            assert scripted(x).dtype == torch.bfloat16
        with torch.profiler.profile() as profile:
            scripted(x)
    called = {event.key for event in profile.key_averages()}
    assert ("mkldnn::_linear_pointwise" in called) == ONEDNN
    scripted(x).sum().backward()
    assert module.weight.grad is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_without_gradients_has_the_kernel_that_a_trace_can_hold() -> None:
    module = Linear(D_IN, D_OUT, bias=False)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(2, D_IN)
    with torch.no_grad():
        traced = torch.jit.trace(module, x)
        torch.testing.assert_close(traced(x), module(x), rtol=1e-5, atol=1e-4)
