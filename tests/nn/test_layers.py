"""The linear layer with both kernels: equal results, and gradients whenever they are needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tfkit.nn import Linear, choose_top, kernels, linear
from tfkit.nn.kernels import GUESS_LARGE, GUESS_ROWS, ONEDNN, decoding
from tfkit.torch_private import onednn

D_IN, D_OUT, ROWS = 256, GUESS_LARGE // 256, GUESS_ROWS


def layer() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(D_OUT, D_IN, generator=generator), torch.randn(D_OUT, generator=generator)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (0, 1), (7,), ()])
@pytest.mark.parametrize("biased", [True, False])
def test_both_kernels_agree(shape: tuple[int, ...], biased: bool) -> None:
    weight, bias = layer()
    x = torch.randn(*shape, D_IN)
    options = bias if biased else None
    with torch.no_grad(), decoding:
        actual = linear(x, weight, options)
        by_columns = linear(x, weight.t().contiguous().t(), options)
    for output in (actual, by_columns):
        torch.testing.assert_close(output, F.linear(x, weight, options), rtol=1e-5, atol=1e-4)


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
    result: list[torch.Size] = []
    product = onednn._product
    monkeypatch.setattr(onednn, "_product", lambda x, *rest: (result.append(x.shape), product(x, *rest))[1])
    return result


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


def test_a_race_reads_the_weights_that_fill_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SAMPLE", 40)
    assert len(kernels.sample([torch.zeros(4)] * 5)) == 3


@pytest.mark.parametrize("rows", [1, 4])
def test_a_race_reads_every_weight_by_every_kernel(rows: int) -> None:
    weight, _ = layer()
    actual = kernels.ask([[weight, weight.clone()], [weight.t().contiguous().t()]], rows)
    assert [set(speeds) for speeds in actual] == [set(kernels.KERNELS)] * 2
    assert all(10**7 < speed < 10**12 for speeds in actual for speed in speeds.values())


@pytest.fixture
def onednn_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few the rows are."""
    monkeypatch.setattr(kernels, "GUESS_ROWS", 0)


class Halved(torch.Tensor):
    """Holds half of what it stands for, as a quantized tensor holds other numbers: only `F.linear` knows."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [
            2 * argument.as_subclass(Tensor) if isinstance(argument, cls) and function is F.linear else argument
            for argument in args
        ]
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("onednn_is_guessed")
def test_a_tensor_of_another_type_multiplies_in_its_own_way() -> None:
    weight, bias = layer()
    x = torch.randn(2, D_IN)
    with torch.no_grad(), decoding:
        expected = F.linear(x, weight, bias)
        for arguments in ((x, (weight / 2).as_subclass(Halved)), ((x / 2).as_subclass(Halved), weight)):
            torch.testing.assert_close(linear(*arguments, bias), expected)


def _dual(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, 2 * x))).tangent
        assert tangent is not None
        return tangent.clone()


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "vmap over x": lambda f, x: torch.func.vmap(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (2 * x,)),
    "dual": _dual,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of torch.jit
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.usefixtures("onednn_is_guessed")
def test_what_transforms_functions_sees_the_product(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    weight, bias = layer()
    x = torch.randn(2, D_IN)
    with torch.no_grad(), decoding:
        actual = TRANSFORMS[name](lambda x: linear(x, weight, bias), x)
        torch.testing.assert_close(actual, TRANSFORMS[name](lambda x: F.linear(x, weight, bias), x))
    assert "not yet implemented" not in capfd.readouterr().err


@pytest.mark.usefixtures("onednn_is_guessed")
def test_a_counter_of_flops_counts_it() -> None:
    weight, bias = layer()
    with torch.no_grad(), decoding, FlopCounterMode(display=False) as counter:
        linear(torch.randn(3, D_IN), weight, bias)
    assert counter.get_total_flops() == 2 * 3 * weight.numel()


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


def scores_with_ties() -> Tensor:
    """Return scores [2, 3, 41] with few distinct values, among them two zeros and minus infinity."""
    values = torch.tensor([-math.inf, -1.5, -0.0, 0.0, 0.0, 2.0])
    scores = values[torch.randint(len(values), (2, 3, 41), generator=torch.Generator().manual_seed(3))]
    scores[1, 2] = -math.inf
    return scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scripted", [False, True])
def test_equal_scores_are_chosen_by_position(dtype: torch.dtype, scripted: bool) -> None:
    function = torch.jit.script(choose_top) if scripted else choose_top
    scores, generator = scores_with_ties().to(dtype), torch.Generator().manual_seed(4)
    permuted = torch.stack([torch.randperm(41, generator=generator) for _ in range(2)])[:, None] + 7
    for k, positions in product((1, 5, 17, 30, 41), (None, permuted)):
        keys = torch.arange(41).expand_as(scores) if positions is None else positions.expand_as(scores)
        expected = torch.zeros(2, 3, 41, dtype=torch.bool)
        for row in product(range(2), range(3)):
            pairs = zip((-scores[row]).tolist(), keys[row].tolist(), strict=True)
            ranked = [column for _, column in sorted((pair, column) for column, pair in enumerate(pairs))]
            expected[row][ranked[:k]] = True
        assert torch.equal(function(scores, k, positions), expected)


def test_a_longer_axis_and_more_rows_change_no_choice() -> None:
    scores = torch.zeros(5, 3000)
    scores[:, 900:] = -1.0
    expected = torch.arange(900) < 700
    for rows, n in ((1, 900), (1, 901), (5, 1500), (2, 3000)):
        assert torch.equal(choose_top(scores[:rows, :n], 700)[:, :900], expected.expand(rows, -1))


def test_a_choice_has_no_gradient_and_contains_nan() -> None:
    scores = scores_with_ties()
    scores[0, 1, 30:33] = math.nan
    chosen = choose_top(scores.requires_grad_(), 9)
    assert not chosen.requires_grad
    assert chosen[0, 1, 30:33].all()
    assert chosen.sum(dim=-1).unique().tolist() == [9]
