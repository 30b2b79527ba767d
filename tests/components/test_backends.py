"""The attention backends, compared with each other through all conversions of a model."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.component import AttentionBackend
from tfkit.components.attention import MultiHeadConfig
from tfkit.nn import Softmax
from tfkit.testing import check_capture, check_causal, check_script, example_inputs

from ..sampling import chosen, slow, some
from .attentions import (
    BACKENDS,
    FEATURES,
    LEFT_TO_OTHERS,
    PLAINLY_CAUSAL,
    cores,
    mixed,
    results,
    served,
    spec,
)

# torch's own, while it traces FlexAttention
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning"),
]


@pytest.mark.usefixtures("flex")
@pytest.mark.parametrize(
    ("feature", "padded"),
    some([*((name, True) for name in FEATURES), *((name, False) for name in sorted(PLAINLY_CAUSAL))], 4),
)
def test_outputs_and_gradients_are_equal(feature: str, padded: bool) -> None:
    graph = spec(*FEATURES[feature])
    inputs = mixed(graph) if padded else example_inputs(graph, length=9)
    models = {backend: tfkit.build(graph, attention_backend=backend) for backend in BACKENDS}
    rules = served(models["flex"])
    actual = {backend: results(model, inputs) for backend, model in models.items()}
    for backend in ("eager", "flex"):
        assert actual[backend].keys() == actual["sdpa"].keys()
        for name, want in actual["sdpa"].items():
            assert want.isfinite().all()
            scale = float(want.abs().max().clamp(min=1))
            torch.testing.assert_close(actual[backend][name] / scale, want / scale, rtol=0, atol=1e-5, msg=name)
    self_served = feature not in LEFT_TO_OTHERS and (padded or feature not in PLAINLY_CAUSAL)
    assert rules == ([self_served, False] if FEATURES[feature][0] == "memory" else [self_served]) * 2


# ---- which core a model has ----


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="one of 'sdpa', 'eager', 'flex'; got 'flash'"):
        tfkit.build("gpt2", attention_backend="flash", device="meta")  # type: ignore[arg-type]


@pytest.mark.parametrize("feature", some(FEATURES, 5))
def test_flex_computes_like_sdpa_where_its_kernel_does_not_run(feature: str) -> None:
    graph = spec(*FEATURES[feature])
    model, other = tfkit.build(graph, attention_backend="flex"), tfkit.build(graph)
    rules = served(model)
    assert torch.equal(model(**mixed(graph)), other(**mixed(graph)))
    assert not any(rules)


class Evenly(nn.Module):
    """Reads all visible keys alike; knows of no flag."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = Softmax()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.softmax(q @ k.transpose(2, 3) * 0, mask) @ v


class EvenConfig(MultiHeadConfig):
    """A plugin's kind that overrides the core and nothing else."""

    kind: Literal["even"] = "even"  # type: ignore[assignment]

    def build_core(self, make: tfkit.Make, *, causal: bool) -> nn.Module:
        assert not causal
        return Evenly()


@pytest.mark.usefixtures("flex")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("position", [None, "alibi"])
def test_a_core_that_knows_no_backends_gets_its_mask_written_out(
    backend: AttentionBackend, position: str | None
) -> None:
    plugins = tfkit.load_plugins(entry_points=False)
    plugins.registry.add(EvenConfig, "under test")
    graph = spec("decoder", {"kind": "even", "position": position}, plugins=plugins)
    model = tfkit.build(graph, attention_backend=backend)
    masks: list[Any] = []
    cores(model)[0].register_forward_hook(lambda _module, args, _output: masks.append(args[3]))
    check_causal(model, example_inputs(graph), along="tokens")
    assert all(isinstance(mask, Tensor) for mask in masks)


# ---- with everything else that a model goes through ----


DECODERS = [name for name, (layout, _) in FEATURES.items() if layout == "decoder"]


@pytest.mark.usefixtures("flex")
@pytest.mark.parametrize(
    ("backend", "feature"), chosen(product(["flex", "eager"], DECODERS), {*zip(cycle(["flex", "eager"]), DECODERS)})
)
def test_the_cache(backend: AttentionBackend, feature: str) -> None:
    model = tfkit.build(spec(*FEATURES[feature]), attention_backend=backend).eval()
    tokens = torch.randint(17, (2, 8))
    with torch.no_grad():
        want = model(tokens)
    cached = tfkit.CachedModel(model, length=8)
    chunks = [cached(tokens[:, :3]), cached(tokens[:, 3:5]), *(cached(tokens[:, i : i + 1]) for i in (5, 6, 7))]
    torch.testing.assert_close(torch.cat(chunks, dim=1), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("feature", ["gqa_window_softcap", slow("alibi"), slow("cross")])
@pytest.mark.parametrize("backend", ["eager", slow("flex")])
def test_torchscript(backend: AttentionBackend, feature: str) -> None:
    graph = spec(*FEATURES[feature])
    model = tfkit.build(graph, attention_backend=backend)
    check_script(model, example_inputs(graph), mixed(graph))


@pytest.mark.usefixtures("flex")
@pytest.mark.parametrize(
    ("feature", "compiler"),
    [
        ("window", None),
        slow(("alibi", None)),
        # Uncompiled, torch's own FlexAttention with a soft-cap has wrong gradients inside its checkpointing.
        slow(("gqa_window_softcap", "aot_eager")),
    ],
)
def test_training_with_recomputed_layers(feature: str, compiler: str | None) -> None:
    graph = spec(*FEATURES[feature])
    inputs = mixed(graph)
    model = tfkit.build(graph, attention_backend="flex", recompute=True)
    if compiler is not None:
        model.compile(backend=compiler, fullgraph=True)
    actual, want = results(model, inputs), results(tfkit.build(graph, attention_backend="flex"), inputs)
    torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("flex")
@pytest.mark.parametrize("feature", some(["rope", "gqa_window_softcap", "alibi"], 1))
@pytest.mark.parametrize("backend", ["eager", "flex"])
def test_mixed_precision(backend: AttentionBackend, feature: str) -> None:
    graph = spec(*FEATURES[feature])
    model, inputs = tfkit.build(graph, attention_backend=backend), example_inputs(graph)
    exact = model(**inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = model(**inputs)
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - exact).abs().max() < 0.1 * exact.std()
    actual.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("flex")
@pytest.mark.parametrize("feature", ["gqa_window_softcap", "alibi"])
def test_one_capture_serves_all_lengths(feature: str) -> None:
    graph = spec(*FEATURES[feature])
    calls = [example_inputs(graph, length=n, padding="left") for n in (150, 300)]
    check_capture(tfkit.build(graph, attention_backend="flex"), *calls)


# ---- on the device that it is for ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "compiled"])
@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in LEFT_TO_OTHERS])
def test_the_kernel_on_a_gpu(feature: str, compiled: bool) -> None:
    graph = spec(*FEATURES[feature])
    inputs = {name: value.cuda() for name, value in mixed(graph).items()}
    result = {}
    for backend in BACKENDS:
        model: Any = tfkit.build(graph, attention_backend=backend, device="cuda")
        rules = served(model)
        runs = torch.compile(model) if compiled and backend == "flex" else model
        output = runs(**inputs)
        (output * torch.linspace(-1, 1, 17, device="cuda")).sum().backward()
        result[backend] = {"output": output.detach(), **{name: p.grad for name, p in model.named_parameters()}}
        assert any(rules) == (backend == "flex")
    for backend, name in product(("eager", "flex"), result["sdpa"]):
        want = result["sdpa"][name]
        scale = want.abs().max().clamp(min=1)
        torch.testing.assert_close(result[backend][name] / scale, want / scale, rtol=0, atol=1e-4, msg=name)
