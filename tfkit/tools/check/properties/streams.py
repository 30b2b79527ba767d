"""Properties of the residual stream: what remains of a stack whose sublayers say nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.component import Layer, Learned, Scale, Step
from tfkit.graph.expand import Node
from tfkit.tools.check.inputs import call, hooked
from tfkit.tools.check.measure import DoesNotApplyError, Measured, distance, property_of
from tfkit.tools.check.places import outputs_of
from tfkit.tools.check.subject import Subject


@property_of("silent", "is its norms, if sublayers are silent")
def silent(subject: Subject) -> Iterator[Measured]:
    """The stream after each layer, and the stack's output, computed from its steps as the spec describes them."""
    if not subject.stacks:
        raise DoesNotApplyError("the spec has no stack")
    model, stack_inputs = subject.model, dict[str, Tensor]()
    sublayers = [f"{path}.{step.name}" for path, layer in subject.layers.items() for step in layer.steps]
    handles = [_silenced(model.get_submodule(path)) for path in sublayers]
    names = [node.name for node in subject.stacks]
    handles += [model.get_submodule(name).register_forward_pre_hook(_keep(stack_inputs, name)) for name in names]
    with hooked(handles), torch.no_grad():
        outputs = outputs_of(model, partial(call, model, subject.inputs()), [*subject.layers, *names])
        for node in subject.stacks:
            yield from _compare(model, node, stack_inputs[node.name], outputs)


def _silenced(module: nn.Module) -> Any:
    """Return a hook that lets a module return zeros."""
    return module.register_forward_hook(lambda _module, _args, output: torch.zeros_like(output))


def _keep(stack_inputs: dict[str, Tensor], name: str) -> Any:
    return lambda _module, args: stack_inputs.setdefault(name, args[0].clone())


def _compare(model: fx.GraphModule, node: Node, x: Tensor, outputs: dict[str, Tensor]) -> Iterator[Measured]:
    stack = node.stack
    assert stack is not None
    for number, layer in enumerate(stack.layers):
        path = f"{node.name}.layers.{number}"
        for run in range(stack.repeats):
            x = _through(model.get_submodule(path), layer, x)
            if run == 0:
                yield _deviation(path, outputs[path], x, "a layer")
    if stack.final_norm is not None:
        x = model.get_submodule(f"{node.name}.final_norm")(x)
    yield _deviation(node.name, outputs[node.name], x, "a stack")


def _deviation(path: str, output: Tensor, expected: Tensor, what: str) -> Measured:
    error = distance(output, expected)
    detail = f"{what} whose sublayers return nothing differs from its norms by {error:.1e}"
    return Measured(error, detail, where=path)


def _through(module: nn.Module, layer: Layer, x: Tensor) -> Tensor:
    """Return the stream after a layer whose sublayers return zeros."""
    for step in layer.steps:
        x = _after(module, step, x)
    return x


def _after(module: nn.Module, step: Step, x: Tensor) -> Tensor:
    base = x
    if step.residual.onto == "normed" and step.norm_in is not None:
        base = module.get_submodule(f"{step.name}_norm_in")(x)
    if step.onto is not None:
        base = base * module.get_parameter(f"{step.onto.name}.weight")
    y = torch.zeros_like(x)
    if step.norm_out is not None:
        y = module.get_submodule(f"{step.name}_norm_out")(y)
    for part in step.branch():
        if isinstance(part, Learned):
            y = y * module.get_parameter(f"{part.name}.weight")
        elif isinstance(part, Scale):
            y = y * part.number
    x = base + y
    return x if step.after is None else module.get_submodule(step.after.name)(x)
