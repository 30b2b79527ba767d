"""The layers of a model as the machine of a run treats them: sharded, recomputed and compiled one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tfkit.building.builder import graph_of
from tfkit.building.model import is_sharded
from tfkit.run.run_spec import MachineConfig

EXPENSIVE = [
    operation.default
    for name in (
        *("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention"),
    )
    if (operation := getattr(torch.ops.aten, name, None)) is not None
]
"""The operations whose results `recompute: selective` keeps: matrix products, and attention."""


def layers_of(model: fx.GraphModule, *, once: bool = False) -> Iterator[tuple[int, nn.Module]]:
    """Yield the layers of all stacks with their numbers; with `once`, omit layers that run several times."""
    for node in graph_of(model).nodes:
        if node.stack is not None and not (once and node.stack.repeats > 1):
            for number in range(len(node.stack.layers)):
                yield number, model.get_submodule(f"{node.name}.layers.{number}")


def prepare_layers(model: fx.GraphModule, machine: MachineConfig) -> None:
    """Compile and recompute the layers of a model as `machine` of a run describes.

    Only calls with gradients change: evaluations and generated texts have other shapes.
    """
    model.meta["recompute"] = machine.recompute != "none"
    for number, layer in layers_of(model):
        forward: Callable[..., Any] = layer.forward
        if machine.compile == "layers":
            forward = torch.compile(forward)
        if machine.recomputes(number):
            options: dict[str, Any] = {}
            if machine.recompute == "selective":
                options["context_fn"] = partial(create_selective_checkpoint_contexts, EXPENSIVE)
            forward = partial(checkpoint, forward, use_reentrant=False, **options)
        if forward != layer.forward:
            layer.forward = partial(_with_gradients, forward, layer.forward)
        if machine.gather == "bfloat16" and is_sharded(layer):
            # Its weights are never float32: outside of the loop's autocast, as in a generated text, it needs another.
            layer.forward = torch.autocast(next(layer.parameters()).device.type, torch.bfloat16)(layer.forward)


def _with_gradients(forward: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
    return (forward if torch.is_grad_enabled() else plain)(*args)
