"""Small models around one component: those in which it is checked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from tfkit.component import Component, InputPositionConfig, SharedMarker, marker
from tfkit.graph.expand import expand
from tfkit.plugin.manager import Plugins
from tfkit.plugin.registry import check_config
from tfkit.spec.load import take_spec
from tfkit.tools.check.subject import Subject

Layout = Literal["encoder", "decoder", "memory"]

LAYOUTS: tuple[Layout, ...] = ("encoder", "decoder", "memory")
IN_WORDS: dict[Layout, str] = {"encoder": "an encoder", "decoder": "a decoder", "memory": "a decoder with a memory"}
SLOTS = ("activation", "attention", "ffn", "init", "mixer", "norm", "position", "rope_scaling")
"""The slots of components that have a small model."""
SMALL = {"n_heads": 4, "n_kv_heads": 2, "d_ff": 24, "activation": "gelu", "factor": 2.0, "original_max_len": 16}
SMALL |= {"n_experts_per_token": 2}
"""The values of required fields of these names."""
LISTS = {"longrope": {"factor": 2.0, "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}}
"""The further values of kinds that need lists."""
NUMBER = 4
"""The value of every other required whole number."""


def subjects_of(
    config: type[Component],
    plugins: Plugins,
    *,
    fields: Mapping[str, Any] | None = None,
    within: Sequence[Layout] = LAYOUTS,
    seed: int = 0,
    reference: Callable[..., Any] | None = None,
) -> dict[str, Subject]:
    """Return the small models around a component, by their descriptions; see `tfkit.testing.check_component`."""
    kind = config.kind_name()
    part = {"kind": kind, **_required(config), **LISTS.get(kind, {}), **(fields or {})}
    kinds = None if reference is None else {config.slot: {kind: reference}}
    subjects = {}
    for layout in within:
        graph = expand(take_spec(small_spec(layout, config, part), plugins))
        subjects[IN_WORDS[layout]] = Subject(graph, plugins, seed, component=config, kinds=kinds)
    return subjects


def with_component(plugins: Plugins, config: type[Component]) -> Plugins:
    """Add a component to plugins if they do not have it; raise TypeError if it is not a valid config."""
    check_config(config)
    registered = plugins.registry.find(config.slot, config.kind_name())
    if registered is not None and registered.config is config:
        return plugins
    registry = copy.deepcopy(plugins.registry)
    registry.add(config, "under test")
    return replace(plugins, registry=registry)


def _required(config: type[Component]) -> dict[str, Any]:
    required = {name: info for name, info in config.model_fields.items() if info.is_required()}
    return {
        name: SMALL.get(name, NUMBER)
        for name, info in required.items()
        if (name in SMALL or info.annotation is int) and marker(info, SharedMarker) is None
    }


def small_spec(layout: Layout, config: type[Component], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of a small model with a component, given as its mapping, in its slot."""
    if config.slot not in SLOTS:
        raise ValueError(f"slot `{config.slot}` has no small model: write a spec, and call `check_model`")
    attention: dict[str, object] = {"kind": "mha", "n_heads": 2}
    embedding: dict[str, Any] = {"block": "embedding"}
    stack: dict[str, object] = {"block": "decoder" if layout == "memory" else layout, "n_layers": 1}
    stack |= {"attention": attention, "ffn": {"kind": "gelu", "d_ff": 24, "dropout": 0.1}}
    if config.slot in ("attention", "ffn", "mixer", "norm"):
        stack[config.slot] = part
    elif config.slot == "activation":
        stack["ffn"] = {"kind": "mlp", "d_ff": 24, "activation": part}
    elif config.slot == "rope_scaling":
        attention["position"] = {"kind": "rope", "scaling": part}
    elif config.slot == "position":
        (embedding if issubclass(config, InputPositionConfig) else attention)["position"] = part
    if config.slot == "mixer" and layout != "memory":
        del stack["attention"]
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
