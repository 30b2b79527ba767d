"""A component alone: the only part of a stack of one layer, which provides masks, positions, memory and condition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from tfkit.arguments import Positive, Seed, checked
from tfkit.building.builder import build
from tfkit.building.placement import AnyDevice, AnyDtype
from tfkit.component import Component
from tfkit.errors import SpecError
from tfkit.graph.expand import Graph, expand
from tfkit.nn import Context, Program
from tfkit.plugin.manager import AnyPlugins, load_plugins
from tfkit.spec.data import NAME, read_data
from tfkit.spec.load import resolve_spec
from tfkit.spec.merge import merge, nested_patch
from tfkit.spec.tree import Mapping as Tree


@checked
def component(
    slot: Literal["attention", "cross_attention", "ffn", "mixer", "norm", "activation"],
    *,
    causal: bool = False,
    width: Positive | None = None,
    d_memory: Positive | None = None,
    init: str | Mapping[str, Any] = "fan_in",
    device: AnyDevice = "cpu",
    dtype: AnyDtype | None = None,
    seed: Seed = 0,
    plugins: AnyPlugins | None = None,
    **keys: Any,
) -> nn.Module:
    """Build a component alone, outside of a model, for instance to try a kind of a plugin.

        attention = tfkit.component("attention", kind="gqa", d_model=64, n_heads=8, n_kv_heads=2, position="rope")
        y = attention(torch.randn(2, 10, 64))

    Args:
        slot: the slot that the component fills.
        causal: for an attention: no query attends to a later key. An extent can also be set as `mask`.
        width: for a norm: the size of the last axis.
        d_memory: for a cross-attention: the width of the memory; by default d_model.
        init: the initialization, as in a spec.
        device: as `build` takes it.
        dtype: as `build` takes it.
        seed: as `build` takes it.
        plugins: the result of `load_plugins`; by default, all installed plugins.
        keys: the kind and the other keys of the component, as in a spec.

    Returns:
        A module. A norm and an activation take a tensor. A sublayer takes x [b, t, d_model] and `mask`, as a model, and
        a cross-attention `memory` [b, k, d_memory] and `memory_mask`. A component that depends on a condition or on
        layer features takes `condition` or `layer_features`. Sublayers are in a stack, as in a model.

    Raises:
        SpecError: the keys are wrong, or the component cannot be alone, or its `build` failed.
        ValueError: an argument has no effect on the slot, or is missing; or there is no such device or type.
    """
    arguments = locals().keys() - {"keys"}
    idle = {
        "causal": causal and (slot != "attention" or keys.get("mask") is not None),
        "width": width is not None and slot != "norm",
        "d_memory": d_memory is not None and slot != "cross_attention",
    }
    if name := next((name for name, value in idle.items() if value), None):
        raise ValueError(f"`{name}` of `component` has no effect on this {slot}")
    d_model = width if slot == "norm" else 1 if slot == "activation" else keys.get("d_model")
    if d_model is None:
        raise ValueError(f"`{'width' if slot == 'norm' else 'd_model'}` of `component` is missing: {slot} needs it")
    plugins = plugins or load_plugins()
    kind = plugins.registry.find(slot.removeprefix("cross_"), str(keys.get("kind")))
    if kind is not None and (clash := arguments & kind.config.model_fields.keys()):
        raise ValueError(
            f"{slot} `{keys['kind']}` cannot be alone: its key `{min(clash)}` is an argument of `component`"
        )
    memory = (d_memory or d_model) if slot == "cross_attention" else None
    inputs = _inputs(None if kind is None else kind.config, keys, d_model, memory)
    tree, path = _model_around(slot, keys, inputs, d_model, init, causal=causal)
    try:
        graph = _with_mask(expand(resolve_spec(tree, plugins, file=NAME)))
        model: Any = build(graph, device=device, dtype=dtype, seed=seed)
    except SpecError as error:
        prefix = ".".join([*path, ""])
        raise SpecError(*(replace(d, path=d.path.removeprefix(prefix)) for d in error.diagnostics)) from error.__cause__
    return _module_of(model, slot, conditioned="condition" in inputs)


def _with_mask(graph: Graph) -> Graph:
    """Return a graph of one node, whose input `x` takes `mask`."""
    x = replace(graph.inputs["x"], mask="mask")
    (node,) = (replace(node, signals={**node.signals, "input": x}) for node in graph.nodes)
    return replace(graph, inputs={**graph.inputs, "x": x}, nodes=(node,))


def _model_around(
    slot: str, keys: Mapping[str, Any], inputs: dict[str, Any], d_model: int, init: Any, *, causal: bool
) -> tuple[Tree, list[str]]:
    """Return the spec of a model of one layer around a component, and the path of the sublayer in it."""
    stack: dict[str, Any] = {"block": "decoder" if causal else "encoder", "n_layers": 1, "placement": "post"}
    stack |= {"input": "x", **{name: name for name in inputs if name != "x"}}
    if slot in ("norm", "activation"):
        stack["ffn"] = {"kind": "mlp", "d_ff": 1, "activation": "relu"}
    else:
        stack["sublayers"] = [{"sublayer": slot, "norm_after": False, "residual": {"onto": "nothing"}}]
    path = ["graph", slot, *(["ffn"] if slot == "activation" else [])]
    tree = read_data({"tfkit": 1, "name": slot, "d_model": d_model, "inputs": inputs, "graph": {slot: stack}})
    part = read_data({slot: keys, "init": init}).items  # errors have the paths of this mapping
    tree = merge(merge(tree, nested_patch([*path, slot], part[slot])), nested_patch(["init"], part["init"]))
    return tree, path


def _module_of(model: Any, slot: str, *, conditioned: bool) -> nn.Module:
    """Return the module of a component in the model around it."""
    layers: Any = model.get_submodule(slot).layers
    if slot == "activation":
        return layers[0].ffn.activation
    if slot == "norm":
        norm = layers[0].ffn_norm_after
        if not conditioned:
            return norm
        program = Program()
        arguments_of_layer = program.input("x"), program.input("context", Context)
        layers[0] = program.build(program.call("ffn_norm_after", norm, *arguments_of_layer), "Layer")
    model.meta.clear()  # no spec can name the mask like this
    return model


def _inputs(
    config: type[Component] | None, keys: Mapping[str, Any], d_model: int, d_memory: int | None
) -> dict[str, Any]:
    """Return the inputs of the model around a component."""
    inputs: dict[str, Any] = {"x": {"type": "features", "width": "d_model"}}
    if d_memory is not None:
        inputs["memory"] = {"type": "features", "width": d_memory}
    if config is not None and config.takes_condition:
        inputs["condition"] = {"type": "vector", "width": keys.get("d_condition", d_model)}
    if config is not None and config.takes_features:
        inputs["layer_features"] = {"type": "features", "width": keys.get("d_features", d_model)}
    return inputs
