"""The modules for the two halves of a `DecodeSplit`. They call the modules of the model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from tfkit.building.builder import mask_inputs, write_call
from tfkit.building.model import replaced_forward
from tfkit.component import Cached, Decoding, State
from tfkit.graph.decode_split import DecodeSplit
from tfkit.graph.expand import Graph, Node
from tfkit.graph.wiring import masks_in_use, table_owner
from tfkit.nn import Past, Program, Value


def check_modules(model: fx.GraphModule, graph: Graph) -> None:
    """Raise ValueError if the steps of decoding would not compute what the forward of an edited model computes."""
    reason = replaced_forward(model)
    for node in graph.nodes:
        layers = getattr(model.get_submodule(node.module), "layers", ())
        if node.stack is not None and len(layers) != len(node.stack.layers):
            reason = f"`{node.name}` has {len(layers)} layers, and caches for the {len(node.stack.layers)} of the spec"
    if reason is not None:
        raise ValueError(f"`{graph.name}` cannot be decoded in steps: {reason}")


def reading_module(model: fx.GraphModule, graph: Graph, parts: DecodeSplit) -> fx.GraphModule:
    """Build the module that runs before decoding: initial inputs and masks -> the values in `initial_value_names`."""
    program = Program()
    values = _declare_inputs(program, graph, parts.initial_inputs)
    values |= _declare_masks(program, graph, parts.initial_inputs, parts.initial_nodes)
    for node in parts.initial_nodes:
        _hold_tables(program, model, graph, node)
        values |= write_call(program, graph, node, model.get_submodule(node.module), values)
    names = initial_value_names(parts)
    returns = tuple(Tensor if name in parts.static_sources else Tensor | None for name in names)
    return program.build_graph_module(tuple(values[name] for name in names), "Reading", returns=returns)


def initial_value_names(parts: DecodeSplit) -> list[str]:
    """Return the names of the values and masks that the second half takes from the first."""
    computed = {node.output.mask for node in parts.initial_nodes if node.makes_mask}
    read = {node.name: node.output.mask for node in parts.initial_nodes if node.name in parts.static_sources}
    names = dict.fromkeys(name for value, mask in read.items() for name in (value, *[mask] * (mask in computed)))
    return [name for name in names if name is not None]


def stepping_module(model: fx.GraphModule, graph: Graph, parts: DecodeSplit) -> fx.GraphModule:
    """Build the module that runs at every step.

    Its forward takes the step inputs; `past`, a `tfkit.nn.Past`; `cache`, with lists of tensors by layer for each node;
    `keep`, the number of last positions for which logits are computed, 0 for all; then padding masks, and the values
    that the first half computes.
    """
    check_modules(model, graph)
    program, nodes = Program(), [node for node, _ in parts.step_nodes.values()]
    optional = [name for name in parts.step_inputs if graph.inputs[name].optional]
    values = {name: program.input(name) for name in parts.step_inputs if name not in optional}
    past, cache = program.input("past", Past), program.input("cache", dict[str, list[list[Tensor]]])
    keep = program.input("keep", int)
    values |= {name: program.input(name, optional=True) for name in (*optional, *parts.static_sources)}
    values |= _declare_masks(program, graph, (*parts.step_inputs, *parts.static_sources), nodes)
    for node, decoding in parts.step_nodes.values():
        _hold_tables(program, model, graph, node)
        seen = values
        if node.output.type == "logits" and node.signals["input"].type == "sequence":
            source = str(node.wires["input"])
            seen = values | {source: program.apply(f"{source}_last", last_positions, values[source], keep)}
        module, further = model.get_submodule(node.module), _decoding_arguments(program, node, decoding, past, cache)
        values |= write_call(program, graph, node, module, seen, **further)
    outputs = [values[name] for name in graph.outputs]
    return program.build_graph_module(outputs[0] if len(outputs) == 1 else tuple(outputs), "Stepping")


def cache_sizes(
    parts: DecodeSplit, batch: int, length: int, memory_length: Callable[[Node], int], dtype: torch.dtype
) -> dict[str, list[list[tuple[tuple[int, ...], torch.dtype]]]]:
    """Return the shape and dtype of each layer's caches, by node; for the caches of a memory, by `NODE.memory`.

    A wide state has at least float32. A cache of the node's tokens has an additional slot for padding.
    """
    wide = torch.promote_types(dtype, torch.float32)

    def size(entry: Cached | State, n_tokens: int, n_more: int) -> tuple[tuple[int, ...], torch.dtype]:
        heads, rows, width = entry.shape(n_tokens)
        if isinstance(entry, State):
            return (batch, heads, rows, width), wide if entry.wide else dtype
        return (batch, heads, rows + n_more, width), dtype

    sizes = {}
    for name, (node, decoding) in parts.step_nodes.items():
        if decoding.caches:
            sizes[name] = [[size(entry, length, 1) for entry in layer] for layer in decoding.caches]
        if decoding.memory_caches:
            n_tokens = memory_length(node)
            layers = decoding.memory_caches
            sizes[f"{name}.memory"] = [[size(entry, n_tokens, 0) for entry in layer] for layer in layers]
    return sizes


def empty_caches(
    parts: DecodeSplit, batch: int, length: int, memory_length: Callable[[Node], int], like: Tensor
) -> dict[str, list[list[Tensor]]]:
    """Create the caches, filled with zeros, on the device of `like`; see `cache_sizes`."""
    sizes = cache_sizes(parts, batch, length, memory_length, like.dtype)
    return {
        name: [[like.new_zeros(shape, dtype=dtype) for shape, dtype in layer] for layer in layers]
        for name, layers in sizes.items()
    }


def _declare_inputs(program: Program, graph: Graph, names: Iterable[str]) -> dict[str, Value]:
    """Declare inputs as arguments, optional inputs last."""
    ordered = sorted(names, key=lambda name: graph.inputs[name].optional)
    return {name: program.input(name, optional=graph.inputs[name].optional) for name in ordered}


def _declare_masks(program: Program, graph: Graph, sources: Iterable[str], nodes: Iterable[Node]) -> dict[str, Value]:
    """Declare the padding masks of inputs and nodes as arguments, if one of `nodes` uses them."""
    signals = [graph.inputs[name] if name in graph.inputs else graph.node(name).output for name in sources]
    names = dict.fromkeys(signal.mask for signal in signals if signal.mask in masks_in_use(nodes))
    return mask_inputs(program, [name for name in names if name is not None])


def _decoding_arguments(program: Program, node: Node, decoding: Decoding, past: Value, cache: Value) -> dict[str, Any]:
    further: dict[str, Any] = {"past": past} if decoding.past else {}
    if decoding.caches:
        further["caches"] = program.apply(f"{node.name}_caches", operator.getitem, cache, node.name)
    if decoding.memory_caches:
        name = f"{node.name}.memory"
        further["memory_caches"] = program.apply(f"{node.name}_memory_caches", operator.getitem, cache, name)
    return further


def _hold_tables(program: Program, model: fx.GraphModule, graph: Graph, node: Node) -> None:
    """Add the module with the table that the node uses, which may run in the other half."""
    if isinstance(tie := node.wires.get("tie"), str):
        owner = table_owner(graph, tie)
        program.hold(owner, model.get_submodule(owner))


def last_positions(x: Tensor, keep: int) -> Tensor:
    """Return the last `keep` positions of x [b, t, ...], or all of them if `keep` is 0."""
    return x if keep == 0 else x[:, -keep:]
