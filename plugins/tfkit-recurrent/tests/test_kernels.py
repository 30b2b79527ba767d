"""Kernels of other libraries get the layouts that they document: stand-ins compute the same in torch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from tfkit_recurrent import delta_rule, kernels, linear_attention
from torch import Tensor
from torch.nn import functional as F

from .mixers import PAIRS, context, states
from .test_mixers import SMALL_MIXERS, difference, inputs, shorten_chunks


def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [b, c, t], weight [c, k] -> [b, c, t]."""
    k = weight.size(1)
    return F.conv1d(F.pad(x, [k - 1, 0]), weight[:, None], bias, groups=weight.size(0))


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor, output_final_state: bool
) -> tuple[Tensor, Tensor]:
    """q, k [b, t, h, n], v [b, t, h, p], g [b, t, h], the state [b, h, n, p]."""
    assert output_final_state
    q, k, v = (x.transpose(1, 2) for x in (scale * q, k, v))
    y, last = linear_attention(q, k, v[:, :, None], g.transpose(1, 2)[:, :, None], initial_state[:, :, None], 64)
    return y[:, :, 0].transpose(1, 2), last[:, :, 0]


def chunk_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    """q, k [b, t, h, n], v [b, t, h, p], g [b, t, h] or [b, t, h, n], beta [b, t, h], the state [b, h, n, p]."""
    assert output_final_state
    assert beta.dim() == 3
    q, k, v = (x.transpose(1, 2) for x in (scale * q, k, v))
    g = g[..., None] if g.dim() == 3 else g
    y, last = delta_rule(q, k, v, g.transpose(1, 2), beta.transpose(1, 2)[..., None], initial_state, 64)
    return y.transpose(1, 2), last


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install stand-ins of both libraries, for tensors on any device, and return the names of the kernels called."""
    names: list[str] = []
    modules: dict[str, ModuleType] = {}

    def put(module: str, name: str, kernel: Callable[..., object]) -> None:
        def counted(*arguments: object, **named: object) -> object:
            names.append(name)
            return kernel(*arguments, **named)

        modules[module] = ModuleType(module)
        setattr(modules[module], name, counted)

    put("causal_conv1d", "causal_conv1d_fn", causal_conv1d_fn)
    put("fla.ops.simple_gla", "chunk_simple_gla", chunk_simple_gla)
    put("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", chunk_delta)
    put("fla.ops.kda", "chunk_kda", chunk_delta)
    # Not in `sys.modules`: transformers would use the stand-ins, too.
    monkeypatch.setattr(kernels, "import_module", modules.__getitem__)
    for module in ("conv", "gated_delta", "kernels"):
        monkeypatch.setattr(f"tfkit_recurrent.{module}.has_kernel", lambda library, x: True)
    return names


KERNELS: dict[str, set[str]] = {
    "short_conv": {"causal_conv1d_fn"},
    "mamba": {"causal_conv1d_fn"},
    "mamba2": {"causal_conv1d_fn", "chunk_simple_gla"},
    "mamba2 with everything": {"causal_conv1d_fn", "chunk_simple_gla"},
    "gated_delta": {"causal_conv1d_fn", "chunk_gated_delta_rule"},
    "kda": {"causal_conv1d_fn", "chunk_kda"},
    "lightning": {"chunk_simple_gla"},
    "rg_lru": {"causal_conv1d_fn"},
    "rwkv4": set(),
    "mlstm": set(),
    "channel_mix": set(),
}


@pytest.mark.parametrize("name", SMALL_MIXERS)
@torch.no_grad()
def test_kernels_compute_what_torch_does(name: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = PAIRS.get(name, PAIRS["mamba2 gated after its norm"])
    config, mixer = pair.ours(pair.theirs())
    mixer, x = mixer.double(), inputs().double()
    padding = torch.arange(x.size(1)) < torch.tensor([[x.size(1)], [61]])
    tensors, expected = states(config, 2, x.dtype), states(config, 2, x.dtype)
    y = mixer(x, context(tensors, padding))
    assert set(calls) == KERNELS[name]
    monkeypatch.undo()
    shorten_chunks(mixer, 7)
    assert difference(y, mixer(x, context(expected, padding))) <= 1e-12
    assert all(difference(state, other) <= 1e-12 for state, other in zip(tensors, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", SMALL_MIXERS)
def test_flash_linear_attention_on_a_gpu(name: str, gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, states and gradients; fla raises for gradients on Hopper GPUs if Triton is older than 3.7.1."""
    pytest.importorskip("fla")
    pair = PAIRS.get(name, PAIRS["mamba2 gated after its norm"])
    config, mixer = pair.ours(pair.theirs())
    mixer, results = mixer.cuda(), []
    for library in ("fla", "no_such_library"):
        monkeypatch.setattr(kernels, "is_installed", library.__eq__)
        x = inputs().cuda().requires_grad_(gradients)
        tensors = [state.cuda() for state in states(config, 2, torch.float32)]
        if gradients:
            leaves = [x, *(parameter for parameter in mixer.parameters() if parameter.requires_grad)]
            results.append(list(torch.autograd.grad(mixer(x, context()).square().sum(), leaves)))
            continue
        with torch.no_grad():
            chunks = [mixer(piece, context(tensors)) for piece in x.split([70, 1, x.size(1) - 71], dim=1)]
            results.append([mixer(x, context()), torch.cat(chunks, dim=1), *tensors])
    # The kernels multiply float32 in TF32.
    assert max(difference(value, expected) for value, expected in zip(*results, strict=True)) <= 2e-2


def test_libraries_are_used_for_cuda_alone() -> None:
    assert not kernels.has_kernel("causal_conv1d", torch.zeros(1))
    assert not kernels.is_installed("no_such_library")
    assert kernels.is_installed("torch")
