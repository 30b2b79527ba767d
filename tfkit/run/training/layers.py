"""Settings of `machine` for the layers of a model: recomputation, compilation and float8, layer by layer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tfkit.building.builder import graph_of
from tfkit.building.model import is_sharded
from tfkit.nn import Linear, StackedLinear
from tfkit.run.checked_run import Run
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
CAPABILITY = (8, 9)
"""The lowest compute capability of a GPU with float8."""


def layers_of(model: fx.GraphModule, *, once: bool = False) -> Iterator[tuple[int, nn.Module]]:
    """Yield the layers of all stacks with their numbers; with `once`, omit layers that run several times."""
    for node in graph_of(model).built_nodes:
        if node.stack is not None and not (once and node.stack.repeated):
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
            # Its weights are never float32, so calls outside of the loop's autocast, as in generation, need autocast.
            layer.forward = torch.autocast(next(layer.parameters()).device.type, torch.bfloat16)(layer.forward)


def matrices_in_float8(model: fx.GraphModule, run: Run) -> tuple[list[nn.Linear], str]:
    """Return the matrices that a step multiplies in float8, with a description. Raise SpecError if there are none."""
    modules = dict.fromkeys(module for _, layer in layers_of(model) for module in layer.modules())
    matrices = [module for module in modules if isinstance(module, nn.Linear | StackedLinear)]
    # torchao would also take a subclass with another `forward`, such as a router, and omit what it computes.
    plain = [module for module in matrices if isinstance(module, nn.Linear) and type(module) in (nn.Linear, Linear)]
    fitting = [matrix for matrix in plain if matrix.in_features % 16 == matrix.out_features % 16 == 0]
    if not fitting:
        message = "`float8` has no effect: no matrix of a layer has an input and an output of a multiple of 16"
        raise run.error(message, "machine", "float8", help="remove it")
    return fitting, f"{run.config.machine.float8}, {len(fitting):,} of {len(matrices):,} matrices of layers"


def use_float8(model: fx.GraphModule, run: Run, device: torch.device) -> str:
    """Multiply matrices in float8 in training steps, emulated on a CPU; return a description.

    The modules, their names and their weights do not change.

    Raises SpecError if torchao is missing, if the device has no float8, or if there are no matrices for it.
    """
    matrices, text = matrices_in_float8(model, run)
    emulate = device.type == "cpu"
    if not emulate and (device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY):
        message = f"`float8` needs a GPU of compute capability 8.9 or higher; got `{device}`"
        raise run.error(message, "machine", "float8", help="remove it")
    try:
        float8 = importlib.import_module("torchao.float8")
    except ModuleNotFoundError as error:
        message = f"`float8` needs the package {error.name}"
        raise run.error(message, "machine", "float8", help='pip install "tfkit[float8]"') from error
    recipe = float8.Float8LinearConfig.from_recipe_name(run.config.machine.float8)
    # A GPU requires multiples of 16 in every axis, including positions, whose number depends on the data.
    recipe = replace(recipe, emulate=emulate, pad_inner_dim=True)
    for matrix in matrices:
        product = float8.convert_to_float8_training(matrix, config=recipe)
        product._parameters = matrix._parameters  # the same mapping, in which `fully_shard` exchanges the weights
        matrix.__dict__["in_float8"] = product  # not a submodule, which would add names to the model
        # `torch.compile` would compile a `partial` for each layer: it compares its identity.
        matrix.forward = MethodType(_float8_forward, matrix)  # type: ignore[method-assign]
    return f"{text}, emulated" if emulate else text


def _float8_forward(self: Any, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return type(self).forward(self, x)
    return self.in_float8(x.to(torch.bfloat16))  # torchao uses the dtype of autocast on CUDA, but not on a CPU


def _with_gradients(forward: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
    return (forward if torch.is_grad_enabled() else plain)(*args)
