"""The linear layer with its two kernels: one result, and a gradient whenever one is asked for."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tfkit.nn import Linear, kernels, linear
from tfkit.nn.kernels import GUESS_LARGE, GUESS_ROWS, ONEDNN, decoding

D_IN, D_OUT, ROWS = 256, GUESS_LARGE // 256, GUESS_ROWS


def layer() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(D_OUT, D_IN, generator=generator), torch.randn(D_OUT, generator=generator)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (0, 1), (7,), ()])
@pytest.mark.parametrize("biased", [True, False])
def test_both_kernels_agree(shape: tuple[int, ...], biased: bool) -> None:
    weight, bias = layer()
    x = torch.randn(*shape, D_IN)
    given = bias if biased else None
    with torch.no_grad(), decoding:
        found = linear(x, weight, given)
        by_columns = linear(x, weight.t().contiguous().t(), given)
    for one in (found, by_columns):
        torch.testing.assert_close(one, F.linear(x, weight, given), rtol=1e-5, atol=1e-4)


def test_a_slice_and_a_transposed_input_are_read_as_they_are() -> None:
    weight, bias = layer()
    wide = torch.randn(4, 6, 2 * D_IN)
    with torch.no_grad(), decoding:
        for x in (wide[..., :D_IN], wide[..., ::2], wide[..., :D_IN].transpose(0, 1), wide[:, -1:, D_IN:]):
            torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


@pytest.fixture(autouse=True)
def _nobody_has_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_fastest", {})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what oneDNN was given."""
    found: list[torch.Size] = []
    kernel = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda x, *rest: (found.append(x.shape), kernel(x, *rest))[1]
    )
    return found


def test_only_a_decoder_multiplies_by_another_kernel(calls: list[torch.Size]) -> None:
    weight, bias = layer()
    module = Linear(D_IN, D_OUT, bias=True)
    module.load_state_dict({"weight": weight, "bias": bias})
    x = torch.randn(ROWS, D_IN)
    module(x).sum().backward()
    assert module.weight.grad is not None
    with torch.no_grad():
        module(x)
        assert not calls
        with decoding:
            module(x)
            assert len(calls) == ONEDNN
            linear(x, weight[:1], bias[:1])  # small
            linear(x[1:], weight, bias)  # few rows
            linear(x.double(), weight.double(), None)
            with torch.autocast("cpu", torch.bfloat16):
                assert module(x).dtype == torch.bfloat16
        module(x)
    assert len(calls) == ONEDNN


class Wrapped(torch.Tensor):
    """As libraries wrap weights: to quantize, to shard."""


def test_a_weight_that_a_library_has_wrapped_is_multiplied_by_its_own_words(calls: list[torch.Size]) -> None:
    weight, _ = layer()
    with torch.no_grad(), decoding:
        linear(torch.randn(ROWS, D_IN), weight.as_subclass(Wrapped), None)
    assert not calls


@pytest.mark.skipif(not ONEDNN, reason="torch was built without oneDNN")
@pytest.mark.parametrize("fastest", ["torch", "onednn"])
def test_the_fastest_kernel_is_taken_for_its_shape_rows_and_layout(
    fastest: kernels.Kernel, calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {name: 1.0 + (name == fastest) for name in kernels.KERNELS}
    monkeypatch.setattr(kernels, "_race", lambda groups, rows: [speeds for _ in groups])
    weight, _ = layer()
    x = torch.randn(ROWS + 1, 1, D_IN)
    with torch.no_grad(), decoding:
        kernels.ask([[weight]], ROWS + 1)
        linear(x, weight, None)
        assert len(calls) == (fastest == "onednn")
        linear(x[1:], weight, None)  # a row less: nobody has asked
        linear(x, weight.t().contiguous().t(), None)  # by columns: neither
    assert len(calls) == (fastest == "onednn") + 2


@pytest.mark.parametrize("rows", [1, 4])
def test_a_race_reads_every_weight_by_every_kernel(rows: int) -> None:
    weight, _ = layer()
    found = kernels.ask([[weight, weight.clone()], [weight.t().contiguous().t()]], rows)
    assert [set(speeds) for speeds in found] == [set(kernels.KERNELS)] * 2
    assert all(10**7 < speed < 10**12 for speeds in found for speed in speeds.values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_takes_onednn_where_nobody_has_asked() -> None:
    module = Linear(D_IN, D_OUT, bias=True)
    weight, bias = layer()
    module.load_state_dict({"weight": weight, "bias": bias})
    scripted, x = torch.jit.script(module), torch.randn(ROWS, 2, D_IN)
    with torch.no_grad(), decoding:
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
