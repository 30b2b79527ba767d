"""The models in which a component is checked: every layout with every pair of option values."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from tfkit.component import (
    AttentionConfig,
    Component,
    Config,
    InputPositionConfig,
    SharedMarker,
    SublayerConfig,
    marker,
)
from tfkit.errors import SpecError
from tfkit.graph.expand import expand
from tfkit.plugin.manager import Plugins
from tfkit.plugin.registry import check_config
from tfkit.spec.load import take_spec
from tfkit.tools.check.measure import SubjectType
from tfkit.tools.check.model_under_test import ModelUnderTest

Layout = Literal["encoder", "decoder", "memory"]
LAYOUTS: tuple[Layout, ...] = ("encoder", "decoder", "memory")
IN_WORDS: dict[Layout, str] = {"encoder": "an encoder", "decoder": "a decoder", "memory": "a decoder with a memory"}
SLOTS = (
    "activation",
    "attention",
    "ffn",
    "init",
    "mask_rule",
    "mixer",
    "norm",
    "position",
    "residual",
    "rope_scaling",
)
"""The slots of components that have a small model."""
SMALL_VALUES = {"n_heads": 4, "n_kv_heads": 2, "d_ff": 24, "activation": "gelu", "factor": 2.0, "original_max_len": 16}
SMALL_VALUES |= {"n_experts_per_token": 2, "lr": 1e-2, "every": 2, "n_buckets": 6}
"""Values of required fields, by name."""
LISTS: dict[str, dict[str, Any]] = {
    "longrope": {"factor": 2.0, "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
}
LISTS |= {"expression": {"where": "(q - k) % 3 != 1 or k < 2"}}
LISTS |= {"t5": {"n_buckets": 8, "max_distance": 10}, "disentangled": {"max_distance": 9}}
"""Values for kinds that require lists or text, and for tables of distances, whose last rows the small models reach."""
MAX_LEN, MIXER_MAX_LEN = 32, 300
"""Maximum length of a small model, and of one with a mixer, whose sequences may have chunks."""
NUMBER = 4
"""Value of all other required integers."""
OUTSIDE_MODELS = {"field": "a config.json"}
"""Slots of tfkit whose components are not part of a model, and what they are part of."""

Row = dict[str, Any]


def all_pairs(axes: Mapping[str, Sequence[Any]], meeting: Collection[tuple[str, str]] | None = None) -> list[Row]:
    """Return rows with a value for each axis, such that any two values of different axes occur together in a row.

    With `meeting`, only values of these pairs of axes need to. A single axis has a row for each value.
    """
    numbers = {axis: range(len(values)) for axis, values in axes.items()}  # values may be mappings, or equal
    return [{axis: axes[axis][n] for axis, n in row.items()} for row in _covering_rows(numbers, meeting)]


def _covering_rows(axes: Mapping[str, Sequence[int]], meeting: Collection[tuple[str, str]] | None) -> list[Row]:
    if len(axes) == 1:
        return [{axis: value} for axis, values in axes.items() for value in values]
    pairs = combinations(axes, 2) if meeting is None else meeting
    missing = {frozenset({(a, x), (b, y)}): None for a, b in pairs for x in axes[a] for y in axes[b]}
    rows = []
    while missing:
        row = dict(sorted(next(iter(missing))))
        for axis in sorted(axes, key=lambda axis: -len(axes[axis])):
            if axis not in row:
                row[axis] = max(
                    axes[axis], key=lambda n: sum(frozenset({(axis, n), item}) in missing for item in row.items())
                )
        for pair in combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        rows.append({axis: row[axis] for axis in axes})
    return rows


def with_component(plugins: Plugins, config: type[Component]) -> Plugins:
    """Add a component to plugins if they do not have it; raise TypeError if it is not a valid config."""
    check_config(config)
    registered = plugins.registry.find(config.slot, config.kind_name())
    if registered is not None and registered.config is config:
        return plugins
    registry = copy.deepcopy(plugins.registry)
    registry.add(config, "under test")
    return replace(plugins, registry=registry)


def required_values(config: type[Config]) -> dict[str, Any]:
    """Return values of the required fields that are numbers, words of `SMALL_VALUES`, or configs without a kind.

    An interval `every` is short even if it is not required, so the kind acts within a short run.
    """
    required: dict[str, Any] = {}
    for name, info in config.model_fields.items():
        if (not info.is_required() and name != "every") or marker(info, SharedMarker) is not None:
            continue
        nested: Any = info.annotation if isinstance(info.annotation, type) else object
        if name in SMALL_VALUES or nested is int:
            required[name] = SMALL_VALUES.get(name, NUMBER)
        elif issubclass(nested, Config) and not issubclass(nested, Component):
            required[name] = required_values(nested)
    return required


def small_spec(layout: Layout, config: type[Component], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of a small model with a component in its slot; `part` is the component's mapping."""
    if config.slot not in SLOTS:
        raise ValueError(f"slot `{config.slot}` cannot be checked alone: write a spec, and call `check_model`")
    attention: dict[str, object] = {"kind": "mha", "n_heads": 2}
    embedding: dict[str, Any] = {"block": "embedding"}
    stack: dict[str, object] = {"block": "decoder" if layout == "memory" else layout, "n_layers": 1}
    stack |= {"attention": attention, "ffn": {"kind": "gelu", "d_ff": 24, "dropout": 0.1}}
    if config.slot == "position" and issubclass(config, InputPositionConfig):
        embedding["position"] = part
    else:
        stack |= _in_slot(config.slot, layout, part, attention)
    if config.slot == "mixer" and layout != "memory":
        del stack["attention"]
    length = MAX_LEN if config.slot != "mixer" else MIXER_MAX_LEN
    spec: dict[str, Any] = {"tfkit": 1, "name": "small", "d_model": 16, "vocab_size": 11, "max_len": length}
    spec |= {"dropout": 0.1, **({"init": part} if config.slot == "init" else {})}
    if "norm" in config.model_fields and config.model_fields["norm"].is_required():
        spec["norm"] = "layernorm"
    if layout == "memory":
        stack |= {"input": "embedding", "memory": "source_embedding"}
        source = {"source_embedding": {"block": "embedding", "input": "source"}}
        graph = {**source, "embedding": {**embedding, "input": "target"}}
        spec |= {"inputs": ["source", "target"]}
    else:
        graph = {"embedding": embedding}
    if config.takes_condition:
        spec["inputs"] = {
            **dict.fromkeys(spec.get("inputs", ["tokens"]), "tokens"),
            "time": {"type": "vector", "width": 8},
        }
        graph["embedding"] = {"input": "tokens", **graph["embedding"]}
        spec |= {"d_condition": 8} if "d_condition" in config.model_fields else {}
        stack["condition"] = "time"
    if config.takes_features:  # the stack has one layer
        graph["embedding"] = {"input": "tokens", **graph["embedding"]}
        source = graph["embedding"]["input"]
        graph = {"features": {"block": "embedding", "input": source, "d_model": 8}, **graph}
        spec |= {"d_features": 8}
        stack |= {"input": "embedding", "layer_features": "features"}
    return {**spec, "graph": {**graph, "stack": stack, "logits": {"block": "lm_head"}}}


def _in_slot(slot: str, layout: Layout, part: object, attention: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a stack with a component in a slot of its layers."""
    if slot in ("attention", "ffn", "mixer", "norm", "residual"):
        return {slot: part}
    if slot == "activation":
        return {"ffn": {"kind": "mlp", "d_ff": 24, "activation": part}}
    if slot == "mask_rule":
        mask = {"rule": part} if layout == "encoder" else {"right": 0, "rule": part}
        return {"attention": {**attention, "position": "rope", "mask": mask}}
    if slot == "rope_scaling":
        return {"attention": {**attention, "position": {"kind": "rope", "scaling": part}}}
    return {"attention": {**attention, "position": part}} if slot == "position" else {}


def models_of(
    config: type[Component],
    plugins: Plugins,
    *,
    options: Mapping[str, Sequence[Any]],
    fields: Mapping[str, Any] | None = None,
    within: Sequence[Layout] = LAYOUTS,
    seed: int = 0,
    reference: Callable[..., Any] | None = None,
) -> dict[str, ModelUnderTest]:
    """Return models around a component by description: each layout, with all pairs of option values.

    Combinations of options that the component rejects are omitted. Raises SpecError if all are rejected, or if the
    component is rejected without options.
    """
    models: dict[str, ModelUnderTest] = {}
    refused: SpecError | None = None
    kind = config.kind_name()
    kinds = None if reference is None else {config.slot: {kind: reference}}
    for row in all_pairs(options) or [{}]:
        part = {"kind": kind, **required_values(config), **LISTS.get(kind, {}), **(fields or {}), **row}
        words = "".join(f", {name}: {json.dumps(value)}" for name, value in row.items())
        for layout in within:
            if layout == "memory" and issubclass(config, AttentionConfig) and not config.takes_memory:
                continue
            if layout != "encoder" and issubclass(config, SublayerConfig) and not config.causal:
                continue
            try:
                graph = expand(take_spec(small_spec(layout, config, part), plugins))
            except SpecError as error:
                refused = error
            else:
                models[IN_WORDS[layout] + words] = ModelUnderTest(graph, plugins, seed, component=config, kinds=kinds)
    if refused is not None and not models and fields is None and (optional := _optional_mappings(config)):
        # The component may require one of several fields, so that none of them is required.
        return models_of(
            config, plugins, options=options, fields=optional, within=within, seed=seed, reference=reference
        )
    # A mask rule may be valid only in an encoder.
    if refused is not None and not (models and (options or config.slot == "mask_rule")):
        raise refused
    return models


def _optional_mappings(config: type[Component]) -> dict[str, Any]:
    """Return values of the fields that the class itself declares as a config without a kind, or null."""
    values: dict[str, Any] = {}
    inherited: Any = config.__base__
    for name in config.model_fields.keys() - inherited.model_fields.keys():
        for part in get_args(config.model_fields[name].annotation):
            if isinstance(part, type) and issubclass(part, Config) and not issubclass(part, Component):
                values[name] = required_values(part)
    return values


def options_of(config: type[Component]) -> dict[str, list[Any]]:
    """Return alternative values of a component's fields: true and false, each of several words, or null and a value."""
    fields = {
        name: info
        for name, info in config.model_fields.items()
        if name != config.word_key and marker(info, SharedMarker) is None
    }
    options = {name: legal_values(name, info) for name, info in fields.items()}
    return {name: values for name, values in options.items() if len(values) > 1}


def legal_values(name: str, info: FieldInfo) -> list[Any]:
    """Return the values of a field in the models of a check; empty if the field keeps its default."""
    if info.annotation is bool:
        return [False, True]
    if get_origin(info.annotation) is Literal:
        return list(get_args(info.annotation))
    if info.default is not None:
        return []
    words = [word for part in get_args(info.annotation) if get_origin(part) is Literal for word in get_args(part)]
    if words or bool in get_args(info.annotation):
        return [None, *(words or [False, True])]
    legal = (
        number
        for number in (SMALL_VALUES.get(name), 0.5, NUMBER, 2.0, 1)
        if number is not None and _is_valid_value(info, number)
    )
    return [None, *islice(legal, 1)]


def _is_valid_value(info: FieldInfo, value: Any) -> bool:
    """Return True if a value is valid for a field, disregarding the other fields of its config."""
    field: Any = Annotated[info.annotation, info]
    try:
        TypeAdapter(field).validate_python(value, strict=True)
    except (ValidationError, PydanticUserError):
        return False
    return True


def instead_of(config: type[Component], plugins: Plugins, types: Iterable[SubjectType]) -> str:
    """Return the help for a component that cannot be checked alone."""
    fields = f"`tfkit components {config.slot}` shows its fields"
    owners = {slot: f"a {subject_type.name}" for subject_type in types for slot in subject_type.further_slots}
    owners |= OUTSIDE_MODELS
    if config.slot in owners:
        return f"it is part of {owners[config.slot]}, not of a model; {fields}"
    written = re.compile(rf"\b{config.word_key}: {config.kind_name()}\b")
    files = plugins.specs.files if config.slot == "block" else {}
    name = next((name for name, file in files.items() if written.search(file.path.read_text(encoding="utf-8"))), None)
    return f"check a spec that has it: `tfkit check {name}`" if name else f"check a spec that has it; {fields}"
