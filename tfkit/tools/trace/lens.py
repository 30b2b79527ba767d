"""The logit lens, and the contribution of every sublayer to the residual stream."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from tfkit.arguments import checked
from tfkit.building.builder import graph_of
from tfkit.building.model import BuiltModel, unwrapped_model
from tfkit.component import Call, Dropout, LearnedFactor, ResidualConfig, Step
from tfkit.errors import listing
from tfkit.graph.expand import Graph, Node
from tfkit.tools.show.points import TracePoint
from tfkit.tools.trace.trace import Hook, registered_hooks, trace


@checked
def lens(model: BuiltModel, /, *inputs: Tensor, **named: Tensor | None) -> dict[str, Any]:
    """Return the logits that the final norm and the head compute from the stream after each layer.

    The model runs once, in its mode: call `model.eval()` first to leave out dropout. Gradients flow.

    Args:
        model: a model that `tfkit.build` returned, or a wrapper of it, with a head that takes the output of a stack.
        inputs: arguments of the model's forward, in order.
        named: arguments by name, including padding masks.

    Returns:
        The logits by name of the stream, `decoder.layers.0.stream.out`. The logits of the last layer are the model's.
        A layer that runs several times has a list of logits.

    Raises:
        ValueError: the model does not have exactly one such head, or its residual replaces the stream by several
            streams.
    """
    built = unwrapped_model(model)
    head, stack = _head_and_stack(graph_of(built))
    modules = {"head": built.get_submodule(head.name)}
    if stack.stack is not None and stack.stack.final_norm is not None:
        modules["norm"] = built.get_submodule(f"{stack.name}.final_norm")
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    with ExitStack() as hooks, trace(built, read=f"{stack.name}.layers.*.stream.out") as streams:
        for name, module in modules.items():
            handle = module.register_forward_pre_hook(partial(_capture_arguments, calls, name), with_kwargs=True)
            hooks.callback(handle.remove)
        built(*inputs, **named)

    def logits(x: Tensor) -> Tensor:
        for name in reversed(modules):  # the norm precedes the head
            args, kwargs = calls[name]
            x = modules[name](x, *args[1:], **kwargs)
        return x

    return {
        name: [logits(x) for x in stream] if isinstance(stream, list) else logits(stream)
        for name, stream in streams.items()
    }


def _head_and_stack(graph: Graph) -> tuple[Node, Node]:
    """Return the head whose input is the output of a stack, and the stack."""
    stacks = {node.name: node for node in graph.built_nodes if node.stack is not None}
    sources = [(node, node.wires.get("input")) for node in graph.built_nodes if node.output.type == "logits"]
    pairs = [(node, stacks[source]) for node, source in sources if isinstance(source, str) and source in stacks]
    if len(pairs) != 1:
        heads = listing(node.name for node, _ in pairs) or "none"
        raise ValueError(f"`{graph.name}` must have one head that takes the output of a stack; got {heads}")
    return pairs[0]


def _capture_arguments(
    calls: dict[str, Any], name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    calls[name] = args, kwargs


@checked
def contributions(model: BuiltModel, /, *inputs: Tensor, **named: Tensor | None) -> dict[str, Any]:
    """Return the vectors that the sublayers add to the residual stream, after their norms, dropout and factors.

    The model runs once, in its mode: call `model.eval()` first to leave out dropout. Gradients flow.

    Args:
        model: a model that `tfkit.build` returned, or a wrapper of it.
        inputs: arguments of the model's forward, in order.
        named: arguments by name, including padding masks.

    Returns:
        For each stack, the stream before its first layer, `decoder.layers.0.stream.in`, then the additions in the order
        in which they are computed, `decoder.layers.0.attention`. Together they sum to the stream after the last layer.
        A sublayer that runs several times has a list of additions.

    Raises:
        ValueError: the model has no stack, or the stream is not a sum of outputs: post-LN, for instance, normalizes it.
    """
    built = unwrapped_model(model)
    graph = graph_of(built)
    hooks, scales = [], {}
    for node in graph.built_nodes:
        layers = () if node.stack is None else node.stack.layers
        for number, layer in enumerate(layers):
            path = f"{node.name}.layers.{number}"
            if layer.around is not None:
                raise ValueError(
                    f"`{path}` must add to the residual stream; got the residual `{layer.around.kind_name()}`"
                )
            hooks += [Hook(TracePoint(f"{path}.stream.in", "", path, 0))] * (number == 0)
            for step in layer.steps:
                hooks.append(Hook(_addition_point(path, step)))
                scales[f"{path}.{step.name}"] = step.addition.scale
    if not hooks:
        raise ValueError(f"`{graph.name}` must have a stack of layers, such as `decoder`")
    with registered_hooks(built, hooks) as values:
        built(*inputs, **named)
    for name, value in values.items():
        scale, several = scales.get(name), isinstance(value, list)
        if scale is None:
            values[name] = value[0] if several else value
        elif scale != 1:
            values[name] = [scale * x for x in value] if several else scale * value
    return values


def _addition_point(path: str, step: Step) -> TracePoint:
    """Return the output of the last module before an addition. Raise ValueError if the stream is more than a sum."""
    name, residual = f"{path}.{step.name}", step.residual
    added = isinstance(residual, ResidualConfig) and residual.onto == "previous" and residual.learned_onto == "none"
    if not added or step.norm_after is not None:
        raise ValueError(f"`{name}` must be added to the residual stream, without a norm or a factor of the sum")
    last = step.name
    for part in step.branch():
        if isinstance(part, Call | LearnedFactor):
            last = part.name
        elif isinstance(part, Dropout):
            last = f"{step.name}_dropout"
    return TracePoint(name, "[b, t, m]", f"{path}.{last}", None, name if last == step.name and step.ordered else None)
