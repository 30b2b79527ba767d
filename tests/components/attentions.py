"""Small models with every feature of attention, and the values that the tests of the backends compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
import yaml
from torch import Tensor, fx, nn

import tfkit
from tfkit.component import AttentionBackend
from tfkit.components.flex import FlexMask
from tfkit.plugin.manager import Plugins
from tfkit.testing import example_inputs

BACKENDS: tuple[AttentionBackend, ...] = ("sdpa", "eager", "flex")
WINDOW = {"left": 2, "right": 0}

FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("decoder", {}),
    "scale": ("decoder", {"scale": 0.3}),
    "gqa": ("decoder", {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "d_head": 16}),
    "mqa": ("decoder", {"kind": "mqa", "n_heads": 4, "d_head": 16, "softcap": 3.0}),
    "rope": ("decoder", {"position": "rope", "mask": WINDOW}),
    "alibi": ("decoder", {"position": "alibi"}),
    "alibi_softcap": ("decoder", {"position": "alibi", "softcap": 3.0}),
    "t5": ("decoder", {"position": "t5"}),
    "t5_softcap": ("decoder", {"position": "t5", "softcap": 3.0}),
    "softcap": ("decoder", {"softcap": 3.0}),
    "window": ("decoder", {"mask": WINDOW}),
    "gqa_window_softcap": (
        "decoder",
        {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "d_head": 16, "mask": WINDOW, "softcap": 3.0, "scale": 0.3},
    ),
    "encoder": ("encoder", {}),
    "encoder_softcap": ("encoder", {"softcap": 3.0}),
    "encoder_alibi": ("encoder", {"position": "alibi"}),
    "encoder_window": ("encoder", {"mask": {"left": 2, "right": 1}}),
    "cross": ("memory", {}),
    "cross_softcap": ("memory", {"softcap": 3.0}),
    "prefix": ("prefix", {}),
    "chunk": ("decoder", {"position": "rope", "mask": {"right": 0, "rule": {"kind": "chunk", "size": 4}}}),
    "encoder_blocks": ("encoder", {"mask": {"rule": {"kind": "blocks", "size": 4}}}),
    "prefix_expression": ("prefix", {"mask": {"right": 0, "rule": {"kind": "expression", "where": "(q - k) % 3 < 2"}}}),
    "prefix_alibi_window": ("prefix", {"position": "alibi", "mask": WINDOW}),
}
LEFT_TO_OTHERS = {"t5", "t5_softcap"}
PLAINLY_CAUSAL = {"plain", "scale", "gqa", "cross"}
"""What the causal flag says all of, until there is padding."""


def spec(layout: str, attention: Mapping[str, Any], plugins: Plugins | None = None) -> tfkit.Graph:
    """A model of two layers with that attention."""
    part = {"kind": "mha", "n_heads": 2, **attention}
    stack: dict[str, Any] = {"block": "encoder" if layout == "encoder" else "decoder", "input": "embedding"}
    stack |= {"n_layers": 2, "attention": part, "ffn": {"kind": "relu", "d_ff": 24}}
    inputs: dict[str, Any] = {"tokens": "tokens"}
    if layout == "memory":
        inputs["source"], stack["memory"] = {"type": "features", "width": 12}, "source"
    if layout == "prefix":
        inputs["lengths"], stack["prefix"] = "lengths", "lengths"
    graph = {"embedding": {"block": "embedding", "input": "tokens"}, "stack": stack, "logits": {"block": "lm_head"}}
    text = {"tfkit": 1, "name": "m", "d_model": 32, "vocab_size": 17, "max_len": 300, "inputs": inputs, "graph": graph}
    return tfkit.loads(yaml.safe_dump(text, sort_keys=False), plugins=plugins)


def run_flex_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention uncompiled: torch's reference of what its kernel computes."""
    monkeypatch.setattr("tfkit.components.context.serves", lambda x: True)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)  # it refuses a backward, and there is one


def cores(model: nn.Module) -> list[nn.Module]:
    return [module.core for name, module in model.named_modules() if name.endswith("attention")]


def served(model: nn.Module) -> list[bool]:
    """Fills up with whether each core is given a rule."""
    result: list[bool] = []
    for core in cores(model):
        core.register_forward_hook(lambda _module, args, _output: result.append(isinstance(args[3], FlexMask)))
    return result


def mixed(graph: tfkit.Graph) -> dict[str, Tensor]:
    """Four sequences: full, padded left, padded right, and one without a token."""
    inputs = example_inputs(graph, batch=4, length=9)
    columns = torch.arange(9)
    mask = torch.stack((columns >= 0, columns >= 4, columns < 6, columns < 0))
    if "lengths" in inputs:
        inputs["lengths"] = torch.tensor([4, 3, 5, 0])
    return inputs | {f"{name}_mask": mask for name in ("tokens", "source") if name in inputs}


def results(model: fx.GraphModule, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs, and the gradient of every parameter."""
    output = model(**inputs)
    (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return {"output": output.detach()} | gradients
