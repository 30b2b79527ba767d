"""Small models around one component, and every check on them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import yaml

from tfkit.component import Component, InputPositionConfig, SharedMarker, marker
from tfkit.graph.expand import Graph, loads
from tfkit.plugin.manager import Plugins, load_plugins
from tfkit.plugin.registry import check_config, place_of
from tfkit.spec.messages import kind_of
from tfkit.testing.report import broken_promises, in_lines

Layout = Literal["encoder", "decoder", "memory"]

LAYOUTS: tuple[Layout, ...] = ("encoder", "decoder", "memory")
IN_WORDS: dict[Layout, str] = {"encoder": "an encoder", "decoder": "a decoder", "memory": "a decoder with a memory"}
SMALL = {"n_heads": 4, "n_kv_heads": 2, "d_ff": 24, "activation": "gelu", "factor": 2.0, "original_max_len": 64}
"""The values that `check_component` gives to required fields of these names."""


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
        fields: the other keys of a spec, besides `kind`. Required fields with a name that the built-in components use
            (`n_heads`, `d_ff`, `factor`) have small defaults; d_model is 16.
        within: the models to build: `encoder`, `decoder`, and `memory`, which is a decoder with cross-attention.
        plugins: the plugins to look up a kind in; all installed ones unless given.

    Raises:
        AssertionError: promises are broken; the message lists all of them, each with the models that show it.
        SpecError: the component refuses its fields or the place.
        TypeError: the class is not a proper config.
        ValueError: there is no such kind or slot, or no small model for it.
    """
    plugins = plugins or load_plugins()
    if not isinstance(component, str):
        check_config(component)
        plugins = _with(plugins, component)
        slot, component = component.slot, component.kind_name()
    found = plugins.registry.find(slot or "", component)
    if found is None:
        raise ValueError(f"no kind `{component}` in slot `{slot}`; slots: {', '.join(plugins.registry.slots())}")
    part = {"kind": component, **_required(found.config), **(fields or {})}
    broken: dict[str, dict[str, str]] = {}
    for layout in within:
        spec = small_spec(layout, found.config, part)
        graph = loads(yaml.safe_dump(spec, sort_keys=False), plugins=plugins)
        broken[IN_WORDS[layout]] = broken_promises(graph, causal=_read_by(layout), component=found.config)
    if any(broken.values()):
        name = f"{kind_of(found.config)} `{component}`, {place_of(found.config)},"
        raise AssertionError(in_lines(name, broken))


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
    """The spec of a small model with a component, given as its mapping, in its slot."""
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

    Decoding step by step is checked if the model can do so. Raises AssertionError with all broken promises, except
    those that follow from another one.
    """
    if broken := broken_promises(graph, causal=causal):
        raise AssertionError(in_lines(f"`{graph.name}`", {"": broken}))
