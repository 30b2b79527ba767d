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
from tfkit.errors import Invalid
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

    Raises `Invalid` if the model has no layers, or fewer than the interval of `machine.recompute`.
    """
    model.meta["recompute"] = machine.recompute != "none"
    layers = list(layers_of(model))
    for name, value in {"recompute": model.meta["recompute"], "compile": machine.compile == "layers"}.items():
        if value and not layers:
            raise Invalid(f"machine.{name}", f"`{name}` has no effect: the model has no layers", help="remove it")
    n, most = machine.recompute, max((number for number, _ in layers), default=0) + 1
    if isinstance(n, int) and n > most:
        raise Invalid("machine.recompute", f"`recompute` must be at most {most}, the number of layers; got {n}")
    for number, layer in layers:
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
