"""Small models around one component, and every check on them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import yaml

from tfkit.builder import build
from tfkit.component import Component, InputPositionConfig, SharedMarker, marker
from tfkit.graph.expand import Graph, loads
from tfkit.graph.limits import max_len
from tfkit.graph.pieces import parts_to_decode
from tfkit.plugin.manager import Plugins, load_plugins
from tfkit.testing import checks
from tfkit.testing.cached import check_cached, check_cached_step
from tfkit.testing.inputs import example_inputs

Layout = Literal["encoder", "decoder", "memory"]

LAYOUTS: tuple[Layout, ...] = ("encoder", "decoder", "memory")
SMALL = {"n_heads": 4, "n_kv_heads": 2, "d_ff": 24, "activation": "gelu", "factor": 2.0, "original_max_len": 64}
"""What `check_component` says for fields of these names that a component requires."""
CACHED = 12
"""Tokens of the sequences that are read in pieces."""


def check_component(
    component: str | type[Component],
    *,
    slot: str | None = None,
    fields: Mapping[str, Any] | None = None,
    within: Sequence[Layout] = LAYOUTS,
    plugins: Plugins | None = None,
) -> None:
    """Prove that a component keeps every promise that tfkit makes of a model, in small models around it.

    Args:
        component: its kind, or its config class, which need not be installed.
        slot: the slot that it fills; only with a kind. One of attention, ffn, norm, activation, position, rope_scaling
            and init; a block is checked by `check_model` with a spec of your own.
        fields: what a spec would say besides `kind`. Required fields with a name that the built-in components use
            (`n_heads`, `d_ff`, `factor`) have small defaults; d_model is 16.
        within: the models to build: `encoder`, `decoder`, and `memory`, which is a decoder with cross-attention.
        plugins: where a kind is looked up; everything that is installed unless given.

    Raises:
        AssertionError: a promise is broken.
        SpecError: the component refuses its fields or the place, or its `build` failed.
    """
    plugins = plugins or load_plugins()
    if not isinstance(component, str):
        plugins = _with(plugins, component)
        slot, component = component.slot, component.kind_name()
    found = plugins.registry.find(slot or "", component)
    if found is None:
        raise ValueError(f"no kind `{component}` in slot `{slot}`; slots: {', '.join(plugins.registry.slots())}")
    part = {"kind": component, **_required(found.config), **(fields or {})}
    for layout in within:
        spec = small_spec(layout, found.config, part)
        check_model(loads(yaml.safe_dump(spec, sort_keys=False), plugins=plugins), causal=_read_by(layout))


def _with(plugins: Plugins, config: type[Component]) -> Plugins:
    known = plugins.registry.find(config.slot, config.kind_name())
    if known is not None and known.config is config:
        return plugins
    registry = copy.deepcopy(plugins.registry)
    registry.add(config, "under test")
    return replace(plugins, registry=registry)


def _required(config: type[Component]) -> dict[str, Any]:
    fields = config.model_fields.items()
    return {
        name: SMALL[name]
        for name, info in fields
        if name in SMALL and info.is_required() and marker(info, SharedMarker) is None
    }


def _read_by(layout: Layout) -> str | None:
    """The input along which the model of a layout is causal."""
    return {"encoder": None, "decoder": "tokens", "memory": "target"}[layout]


def small_spec(layout: Layout, config: type[Component], part: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of a small model with `part`, the mapping of a component, in its slot."""
    attention: Any = {"kind": "mha", "n_heads": 2}
    embedding: dict[str, Any] = {"block": "embedding"}
    stack: dict[str, Any] = {"block": "decoder" if layout == "memory" else layout, "n_layers": 1}
    stack |= {"attention": attention, "ffn": {"kind": "gelu", "d_ff": 24, "dropout": 0.1}}
    if config.slot in ("attention", "ffn", "norm"):
        stack[config.slot] = part
    elif config.slot == "activation":
        stack["ffn"] = {"kind": "mlp", "d_ff": 24, "activation": part}
    elif config.slot == "rope_scaling":
        attention["position"] = {"kind": "rope", "scaling": part}
    elif config.slot == "position":
        (embedding if issubclass(config, InputPositionConfig) else attention)["position"] = part
    elif config.slot != "init":
        raise ValueError(f"slot `{config.slot}` has no small model: write a spec, and call `check_model`")
    spec: dict[str, Any] = {"tfkit": 1, "name": "small", "d_model": 16, "vocab_size": 11, "max_len": 32}
    spec |= {"dropout": 0.1, **({"init": part} if config.slot == "init" else {})}
    if layout == "memory":
        stack |= {"input": "embedding", "memory": "source_embedding"}
        source = {"source_embedding": {"block": "embedding", "input": "source"}}
        graph = {**source, "embedding": {**embedding, "input": "target"}}
        spec |= {"inputs": ["source", "target"]}
    else:
        graph = {"embedding": embedding}
    return {**spec, "graph": {**graph, "stack": stack, "logits": {"block": "lm_head"}}}


def check_model(graph: Graph, *, causal: str | None = None) -> None:
    """Run every check on the model of a graph; `causal` names the input along which it must not look ahead.

    What is read in pieces is checked where the model can read so.
    """
    checks.check_filled(graph)
    checks.check_state_dict(graph)
    checks.check_dtype(graph, torch.bfloat16)
    model = build(graph)
    inputs = example_inputs(graph)
    if causal is not None:
        checks.check_causal(model, inputs, along=causal)
    checks.check_padding(model, inputs)
    checks.check_gradients(model, inputs)
    checks.check_gradients(model, example_inputs(graph, padding="rows"))
    calls = [example_inputs(graph, length=n, padding="left") for n in (5, 8)]
    checks.check_script(model, inputs, *calls)
    checks.check_capture(model, *calls)
    if parts_to_decode(graph) is not None:
        inputs = example_inputs(graph, length=min(CACHED, max_len(graph) or CACHED))
        check_cached(model, inputs)
        check_cached_step(model, inputs)
