"""An independent definition of the language: a spec with weights, computed in NumPy, in float64, in the simplest way.

Each built-in kind is a short function, written from its documentation and its paper. It shares no code with the module
that `tfkit.build` creates, so that the two can be compared.

A function takes its `Part` first: `part.config` has its fields, `part.weight(name)` its weights, and
`part.at(name, config)` fills one of its slots. The remaining arguments are the slot's, for one sequence:

    activation, norm, ffn    x; of a norm that takes it, the condition [width]      -> its shape
    attention                x [t, d_model], a Scope                                -> [t, d_model]
    residual                 "enter", x [t, d_model]                                -> the stream, [t, ...]
                             "read", stream, condition [width] or None; of a
                             residual that takes them, features [t, width]          -> [t, d_model], arrays for "write"
                             "write", stream, y [t, d_model], these arrays          -> the stream
                             "leave", stream                                        -> [t, d_model]
    mixer                    x [t, d_model], only tokens                            -> [t, d_model]
    mask_rule                positions of queries [q, 1] and of keys [1, k]         -> bool [q, k]
    position                 of an embedding: positions [t], width                  -> [t, width]
                             rotary: x [t, h, d], positions [t], number of keys     -> [t, h, d]
                             of scores: attention's config, positions [t], causal   -> [h, q, k]
                             of content: the attention's Part, queries [h, q, d], keys [h, k, d], positions [t],
                             causal, the attention's projection of rows             -> [h, q, k]
    rope_scaling             frequencies [i], theta, number of keys                 -> [i], factor of cos and sin
    block                    its wires by name, each a Value                        -> a Value
                             if it compares rows: its wires by name, each a list
                             with the Value of each row, and `row`, a number        -> the Value of this row
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfkit.arguments import checked
from tfkit.errors import listing
from tfkit.graph.expand import Graph
from tfkit.reference.attention import ATTENTIONS, Scope, multi_head, softmax
from tfkit.reference.block import BLOCKS
from tfkit.reference.mask_rule import MASK_RULES
from tfkit.reference.model import Array, Fused, Kinds, Part, Result, UnknownKind, Value, computed
from tfkit.reference.pointwise import ACTIVATIONS, FFNS, NORMS
from tfkit.reference.position import POSITIONS, ROPE_SCALINGS

__all__ = [
    "BUILT_IN",
    "Array",
    "Kinds",
    "Part",
    "Result",
    "Scope",
    "UnknownKind",
    "Value",
    "multi_head",
    "run",
    "softmax",
]

BUILT_IN: Kinds = {
    "activation": ACTIVATIONS,
    "attention": ATTENTIONS,
    "block": BLOCKS,
    "ffn": FFNS,
    "mask_rule": MASK_RULES,
    "norm": NORMS,
    "position": POSITIONS,
    "rope_scaling": ROPE_SCALINGS,
}


@checked
def run(
    graph: Graph,
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    *,
    kinds: Kinds | None = None,
    fused: Fused | None = None,
) -> Result:
    """Compute all outputs of a model, and the output of each component.

    Args:
        graph: the model, as `tfkit.load` returns it.
        weights: every tensor of the model's state dict as an array, by name.
        inputs: an array for each input, [b, ...], and for each padding mask (`tokens_mask`), if any.
        kinds: functions of additional kinds, `{"attention": {"additive": function}}`; they may replace built-in kinds.
        fused: the `parts` of the model's fused layers by path, as weight maps name them,
            `{"decoder.layers.0.ffn.gate_up": {"gate": 32, "up": 32}}`; by default, each function states the order.

    Raises:
        UnknownKind: the model has a kind that no function defines.
        ValueError: a weight or an input is missing, or does not belong to this model.
    """
    masks = {signal.mask for signal in graph.inputs.values()}
    needed = {name for name, signal in graph.inputs.items() if not signal.optional}
    if misfits := sorted(needed - set(inputs)) or sorted(set(inputs) - set(graph.inputs) - masks):
        raise ValueError(f"inputs that are missing, or not of this model: {listing(misfits)}")
    functions = {
        slot: {**BUILT_IN.get(slot, {}), **(kinds or {}).get(slot, {})} for slot in {*BUILT_IN, *(kinds or {})}
    }
    models = [Part(graph, weights, functions, fused=fused or {}) for _ in inputs[min(needed)]]
    results = computed(models, [dict(_inputs(graph, inputs, row)) for row in range(len(models))])
    if unread := [name for name in weights if name not in models[0].read]:
        raise ValueError(f"the spec has no component for the weights {listing(unread)}")
    outputs = {name: np.stack([values[name].x for values in results]) for name in graph.outputs}
    real = {name: np.stack([values[name].tokens for values in results]) for name in graph.outputs}
    traces = zip(*(model.trace for model in models), strict=True)
    per_image = {node.name for node in graph.nodes if node.output.per_image}
    trace = []
    for same in traces:
        path, arrays = same[0][0], [x for _, x in same]
        trace.append((path, (np.concatenate if path.partition(".")[0] in per_image else np.stack)(arrays)))
    return Result(outputs, real, trace)


def _inputs(graph: Graph, inputs: Mapping[str, Array], row: int) -> Iterator[tuple[str, Any]]:
    """Yield the inputs of one sequence; without a mask, all positions are tokens. Images are a list of values."""
    for name in graph.inputs.keys() & inputs:
        x, mask = np.asarray(inputs[name][row]), inputs.get(graph.inputs[name].mask or "")
        if graph.inputs[name].type == "images":
            yield name, [Value(image, np.asarray(True)) for image in x]
            continue
        tokens = np.ones(() if graph.inputs[name].type == "vector" else 2 * x.shape[:1], bool)
        yield name, Value(x, tokens if mask is None else tokens & mask[row].astype(bool))
