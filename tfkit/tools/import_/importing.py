"""Conversion between the config.json of a published model and a spec, by the family of the model."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from collections.abc import Mapping as MappingABC
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from tfkit.arguments import AnyPath, checked
from tfkit.checkpoint.config_json import TEXT, contains_text_model, read_fields, value_at, write_fields
from tfkit.checkpoint.tensor_names import counts_by_module
from tfkit.component import BlockConfig, Component, Config, case_of
from tfkit.errors import Diagnostic, Span, SpecError, closest_name, listing, quoted
from tfkit.graph.expand import Graph, expand
from tfkit.plugin import missing
from tfkit.plugin.known_specs import NamedSpecs
from tfkit.plugin.manager import AnyPlugins, Plugins, load_plugins
from tfkit.plugin.missing import where_it_is
from tfkit.spec.adapter_files import base_folder
from tfkit.spec.extending import find_spec, plugin_folders
from tfkit.spec.families import FamilyConfig, expanded_names, with_inline_family
from tfkit.spec.folder import CONFIG, SPEC_KEY, has_weights
from tfkit.spec.header import how_to_convert, quoted_path
from tfkit.spec.like import with_likes
from tfkit.spec.load import Spec, read_tree, resolve_spec, take_spec, without_idle
from tfkit.spec.merge import merge, nested_patch
from tfkit.spec.render import render_tree, spec_data
from tfkit.spec.source import parse, plain_data, read
from tfkit.spec.tree import Mapping, Scalar, Sequence, node_of
from tfkit.spec.weight_files import published_pickles
from tfkit.tools.import_.draft import draft_text, nearest_family, other_layers
from tfkit.tools.import_.shapes import DraftedConfig, draft_config
from tfkit.tools.import_.text_model import (
    fields_left_out,
    text_config,
    text_family,
    text_model_notes,
    with_tie_of_weights,
)
from tfkit.tools.show.resolved_values import text_of

HOW_TO = "write a spec with a family and name it with --family: specs/README.md shows how"
DIFFERS = "of transformers does not compute the same as this model"
ROUNDING = 1e-14
"""Largest relative difference of numbers that counts as the rounding of arithmetic."""
_TEXT_ENDING = re.compile(r"_text(_model)?$")
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Imported:
    """A spec that was derived from a config.json.

    Attributes:
        text: the YAML.
        graph: the model. If the config.json was named by its folder and that folder has weights, `build` reads them.
        family: the spec that defines the fields; empty if the file contains the spec itself.
        notes: warnings: differences from the class in transformers, and the fields and the weights next to the file
            that the model omits.
        fields_left_out: the fields of a model that contains this model, without the fields that apply to this model.
        tensors_left_out: the numbers of tensors that the model omits, by module.
    """

    text: str
    graph: Graph
    family: str
    notes: tuple[Diagnostic, ...] = ()
    fields_left_out: tuple[str, ...] = ()
    tensors_left_out: MappingABC[str, int] = field(default_factory=dict)


@checked
def import_config(
    path: AnyPath,
    *,
    family: AnyPath | None = None,
    name: str | None = None,
    plugins: AnyPlugins | None = None,
) -> Imported:
    """Derive a spec from a config.json.

    Args:
        path: the file, or the folder that holds it, or the folder of an adapter for its model. If the model contains a
            text model, as models of images and text do, and tfkit does not have its type, the text model is imported.
        family: a spec whose family defines the fields; by default tfkit's spec for the file's `model_type`.
        name: the name of the model; by default the name of its folder.
        plugins: the components to choose from.

    Raises:
        SpecError: the family does not exist, or cannot represent a value of the file.
    """
    path, plugins = Path(path), plugins or load_plugins()
    weights = path.absolute() if has_weights(path) else None
    path = _config_path(path)
    config = read(path)
    if isinstance(text := config.items.get(SPEC_KEY), Scalar):
        if family is not None:
            raise ValueError(f"`family` has no effect: {CONFIG} contains the spec that tfkit wrote")
        return _embedded_spec(text, name, plugins, weights)
    source = _source(config, family, plugins, path.parent)
    model_name = name or _UNSAFE_CHARACTERS.sub("_", path.resolve().parent.name).strip("_.-")
    ignored: list[Diagnostic] = []
    tree = without_idle(_spec_tree(source, path.parent, model_name, ignored), plugins)
    with _convert_errors(source.config.span, source.rules):
        graph = replace(expand(resolve_spec(tree, plugins, file=str(path))), weights=weights)
    notes = [*source.notes, *ignored]
    notes += (Diagnostic(f"{source.rules.architecture} {DIFFERS}", notes=(text,)) for text in source.rules.differences)
    if not has_weights(path.parent) and (pickles := published_pickles(path.parent)):
        message = f"the weights in {quoted_path(path.parent)} are pickles, which tfkit does not read"
        notes.append(Diagnostic(message, help=how_to_convert(pickles[0])))
    tensors = _tensors_left_out(source.rules, path.parent)
    if tensors:
        from tfkit.checkpoint.fitting import left_out_note

        notes.append(left_out_note(tensors, quoted_path(path.parent)))
    modules = counts_by_module(tensors)
    return Imported(render_tree(tree), graph, str(source.family), tuple(notes), source.fields_left_out, modules)


@dataclass(frozen=True)
class _Source:
    """The fields of a config.json, and the spec and the family that interpret them."""

    config: Mapping
    family: AnyPath
    tree: Mapping
    rules: FamilyConfig
    notes: tuple[Diagnostic, ...] = ()
    fields_left_out: tuple[str, ...] = ()


def _source(config: Mapping, name: AnyPath | None, plugins: Plugins, folder: Path) -> _Source:
    """Return the source of a spec: a config.json, or the config of the text model that its model contains.

    The family is named, or the family of the file, or the family of its text model if no other family has that.
    """
    family = name or family_of(config, plugins.specs)
    standard = _tree_and_family(family, plugins)
    if name is None and (alone := _text_family_alone(config, standard[1], plugins.specs)) is not None:
        family, standard = alone, _tree_and_family(alone, plugins)
    elif TEXT in standard[1].families:
        config = with_tie_of_weights(config, standard[1], folder)
    if not contains_text_model(config.items, standard[1]):
        return _Source(config, family, *_family_of_class(config, family, standard, plugins, folder))
    text = text_config(config, standard[1], folder)
    tree, rules = _family_of_class(text, family, standard, plugins, folder)
    notes = tuple(text_model_notes(config, standard[1]))
    return _Source(text, family, tree, text_family(config, rules), notes, fields_left_out(config))


def _text_family_alone(config: Mapping, family: FamilyConfig, specs: NamedSpecs) -> str | None:
    """Return the spec of the family of a text model, if it is not the text model of the family around it."""
    expected, text = family.families.get(TEXT), config.items.get(TEXT)
    if expected is None or not isinstance(text, Mapping):
        return None
    stated = text.items.get("model_type")
    if not isinstance(stated, Scalar) or stated.value == expected.model_type:
        return None
    return specs.by_model_type.get(str(stated.value), specs.by_text_type.get(str(stated.value)))


def _spec_tree(source: _Source, folder: Path, name: str, ignored: list[Diagnostic] | None = None) -> Mapping:
    """Return the spec that the fields and the weights in a folder define; without a name, it has its family's name.

    Warnings about fields that the class of transformers ignores are added to `ignored`; by default, they are errors.
    """
    tree = read_fields(source.config, source.tree, source.rules, ignored)
    for path in _paths_set_by_weights(source.rules, folder):
        tree = _with_value(tree, path, True)
    header = _mapping_of({"name": name or plain_data(tree)["name"]}, tree.span)
    items = {key: node for key, node in tree.items.items() if key not in ("description", "source", "parameters")}
    return merge(Mapping(items, tree.keys, tree.span), header)


def _config_path(path: Path) -> Path:
    """Return the config.json of a folder, or of the model that its adapter changes; or the file itself.

    Raise SpecError if the folder has none, with the help for the weights that it has.
    """
    if os.path.isdir(path) and not os.path.exists(path / CONFIG):
        path = base_folder(path)
    if os.path.isdir(path) and not os.path.lexists(path / CONFIG):
        help = None
        if has_weights(path):
            help = f"write a draft from the names and shapes of the tensors: `tfkit import {path} --draft config.json`"
        elif pickles := published_pickles(path):
            help = how_to_convert(pickles[0])
        raise SpecError(Diagnostic(f"{quoted_path(path)} has no {CONFIG}", help=help))
    return path / CONFIG if os.path.isdir(path) else path


def _embedded_spec(text: Scalar, name: str | None, plugins: Plugins, weights: Path | None) -> Imported:
    """Return the spec that a config.json contains, as `tfkit save` writes it for transformers."""
    tree = parse(str(text.value), CONFIG)
    if name is not None:
        tree = merge(tree, _mapping_of({"name": name}, tree.span))
    graph = replace(expand(resolve_spec(tree, plugins, file=CONFIG)), weights=weights)
    return Imported(render_tree(tree), graph, "")


@contextmanager
def _convert_errors(config: Span | None, family: FamilyConfig) -> Iterator[None]:
    """Convert errors of the derived spec to errors of the config.json."""
    try:
        yield
    except SpecError as failure:
        raise SpecError(*(_converted_error(error, config, family) for error in failure.diagnostics)) from None


def _converted_error(error: Diagnostic, config: Span | None, family: FamilyConfig) -> Diagnostic:
    """Convert an error to an error of the config.json. If no field sets the value, name the omitted field."""
    if config is None or error.span is None or error.span.source is not config.source:
        return replace(error, span=config)
    name = family.field_of(error.path.removeprefix("graph.")) if error.span == config else None
    note = f"{quoted(str(name))} is missing, which means {quoted(case_of(family.defaults.get(str(name))))}"
    return error if name is None else replace(error, notes=(*error.notes, note))


def _paths_set_by_weights(family: FamilyConfig, folder: Path) -> Iterator[str]:
    """Yield the paths of spec values that the weights in a folder require, and that no field of config.json sets."""
    if any(family.zeros.values()) and has_weights(folder):
        from tfkit.checkpoint.files import TensorFiles
        from tfkit.checkpoint.fitting import map_without_model

        with suppress(SpecError), TensorFiles.open(folder) as opened:
            zeros = map_without_model(family, opened.names).zeros
            yield from (
                location
                for name, location in zeros.items()
                if location is not None and name in opened.names and opened.read(name).any()
            )


def _with_value(tree: Mapping, location: str, value: bool) -> Mapping:
    """Return the tree of a spec with a different value at a path in its graph."""
    return merge(tree, nested_patch(["graph", *location.split(".")], Scalar(value, tree.span)))


def _tensors_left_out(family: FamilyConfig, folder: Path) -> dict[str, str]:
    """Return the tensors of the weights in a folder that the model omits, with the reasons."""
    if not has_weights(folder):
        return {}
    from tfkit.checkpoint.fitting import left_out_of

    return left_out_of(folder, family)


def draft_family(path: AnyPath, specs: NamedSpecs) -> tuple[str, str, Diagnostic | None]:
    """Draft a family for a config.json of an unknown type, or for its text model.

    Also return a description of the family that the draft extends, and a warning if tfkit lacks the model's layers.
    """
    path = Path(path)
    path = _config_path(path)
    root = read(path)
    inner = root.items.get(TEXT)
    root = inner if isinstance(inner, Mapping) else root
    config = plain_data(root)
    near = nearest_family(config, path.parent, specs, root.span)
    return draft_text(config, near), str(near), other_layers(root)


def draft_of_weights(path: AnyPath, plugins: Plugins) -> DraftedConfig:
    """Draft a config.json for weights without one, by the names and shapes of their tensors."""
    specs = plugins.specs
    bases = Counter(str(plain_data(read(file.path)).get("extends")) for file in specs.families.values())
    # Of families with the same tensors, the family that most families extend comes first.
    names = sorted(specs.by_model_type, key=lambda name: -bases[name])
    types = {name: cache(partial(_tree_and_family, specs.by_model_type[name], plugins)) for name in names}
    return draft_config(Path(path), types, plugins)


def family_of(config: Mapping, specs: NamedSpecs) -> str:
    """Return the spec that defines the fields of a config.json, or of its text model. Raise SpecError without one."""
    node, inner, path = config.items.get("model_type"), config.items.get(TEXT), "model_type"
    name = str(node.value) if isinstance(node, Scalar) else ""
    if isinstance(inner, Mapping) and name not in specs.by_model_type and missing.plugin_of_family(name) is None:
        node, config, path = inner.items.get("model_type"), inner, f"{TEXT}.model_type"
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        where = TEXT if config is inner else "file"
        message = f"the {where} has no `model_type`, so the meaning of its fields is unknown"
        raise SpecError(Diagnostic(message, config.span, path, help="name a spec that defines it: --family gpt2"))
    families = specs.by_model_type
    spec = families.get(node.value, specs.by_text_type.get(node.value))
    if spec is None:
        raise SpecError(_unknown_family(config, node.value, families, node.span, path))
    return spec


def _unknown_family(config: Mapping, model_type: str, families: Collection[str], span: Span, path: str) -> Diagnostic:
    plugin = missing.plugin_of_family(model_type)
    if plugin is not None:
        message = f"model type {quoted(model_type)} comes with the plugin {plugin}, which is not loaded"
        help = where_it_is(plugin, plugin_folders())
        return Diagnostic(message, span, path, help=help)
    if layers := other_layers(config):
        return layers
    near = closest_name(_TEXT_ENDING.sub("", model_type), families)
    notes = (f"known: {listing(sorted(families), 200)}",)
    help = f"{f'use {quoted(near)}, a similar type; or ' if near else ''}{HOW_TO}; --draft FILE writes a draft"
    return Diagnostic(f"unknown model type {quoted(model_type)}", span, path, notes, help)


def _tree_and_family(
    name: str | os.PathLike[str], plugins: Plugins, head: str | None = None
) -> tuple[Mapping, FamilyConfig]:
    """Return the tree of a spec and its family, with `head` selected if it is set."""
    tree, _, _ = with_likes(with_inline_family(read_tree(name, plugins.specs), plugins.specs), plugins.registry)
    if head is not None:
        tree = merge(tree, _mapping_of({"checkpoint": {"head": head}}, tree.span))
    family = resolve_spec(tree, plugins, file=str(find_spec(name, plugins.specs))).family
    if family is None or not family.fields:
        message = f"{quoted(str(name))} has no `checkpoint` with `fields` to define the fields of a config.json"
        raise SpecError(Diagnostic(message, tree.span, "checkpoint"))
    return merge(tree, _mapping_of(family.spec, tree.span)), family


def _family_of_class(
    config: Mapping,
    name: str | os.PathLike[str],
    standard: tuple[Mapping, FamilyConfig],
    plugins: Plugins,
    folder: Path,
) -> tuple[Mapping, FamilyConfig]:
    """Return the tree of a spec and its family, with the head of the class that a config.json names."""
    head = _head_of_class(config, standard[1])
    if head is None:
        return standard
    with_head = _tree_and_family(name, plugins, head)
    # Older folders contain the weights of a head, but name the class without a head.
    if head.endswith("Model") and _stores_head(standard[1], with_head[1], folder):
        return standard
    return with_head


def _mapping_of(data: dict[str, Any], span: Span) -> Mapping:
    node = node_of(data, span)
    assert isinstance(node, Mapping)
    return node


def _head_of_class(config: Mapping, family: FamilyConfig) -> str | None:
    """Return the head of a family for the class in a config.json; None for the family's default head."""
    classes = config.items.get("architectures")
    if classes is not None and not isinstance(classes, Sequence) and plain_data(classes) is not None:
        message = "`architectures` must be a list with the name of a class"
        raise SpecError(Diagnostic(message, classes.span, "architectures", help='write `["GPT2LMHeadModel"]`'))
    names = [str(name) for name in plain_data(classes)] if isinstance(classes, Sequence) else []
    heads = {name.casefold(): head for name, head in family.classes.items()}
    matches = [heads[name.casefold()] for name in names if name.casefold() in heads]  # MPTForCausalLM in older files
    if matches or not names:
        return matches[0] if matches else None
    assert classes is not None
    message = f"the class {names[0]} is not supported by the family {family.model_type}"
    notes = (f"supported classes: {listing(family.classes, 20)}",)
    help = "name a spec whose family has this class: --family SPEC"
    raise SpecError(Diagnostic(message, classes.span, "architectures", notes, help))


def _stores_head(family: FamilyConfig, body: FamilyConfig, folder: Path) -> bool:
    """Return True if the weights in a folder have tensors of nodes of the family that the body lacks."""
    stored = [entry for path, entry in body.tensors.items() if not body.removes(path)]
    entries = [entry for path, entry in family.tensors.items() if body.removes(path) and entry not in stored]
    names = [
        name for entry in entries for name in expanded_names(entry if isinstance(entry, str) else next(iter(entry)))
    ]
    stems = [stem for name in names for stem in (f"{family.in_file(name)}.", f"{name.removeprefix('.')}.")]
    if has_weights(folder):
        from tfkit.checkpoint.files import TensorFiles

        with suppress(SpecError), TensorFiles.open(folder) as opened:
            return any(f"{name}.".startswith(stem) for name in opened.names for stem in stems)
    return False


def export_config(graph: Graph, plugins: Plugins | None = None) -> dict[str, Any]:
    """Return the config.json of a model with a `checkpoint` section in its spec, checked by reading it back.

    Raises:
        SpecError: the spec has no `checkpoint`, or its family cannot represent a value of the spec.
    """
    family = _family_with_fields(graph)
    fields = write_fields(graph.spec, family)
    changed: list[tuple[str, Any, Any]] = []
    for again in _read_back(graph, family, fields, plugins or load_plugins()):
        changed = list(_value_differences(graph.spec.model.graph, again.model.graph, ""))
        if not changed:
            return fields
    message = f"a config.json of {family.model_type} cannot describe this model"
    texts = [(path, _in_short(ours), _in_short(theirs)) for path, ours, theirs in changed[:10]]
    notes = tuple(f"{path}: {ours} in the spec, {theirs} in the config" for path, ours, theirs in texts)
    raise SpecError(Diagnostic(message, None, "checkpoint", notes))


def family_models(graph: Graph, plugins: Plugins) -> Iterator[Graph]:
    """Yield models near a reduced model that a config.json of its family describes, the nearest first.

    They are the model, if a config.json can state all its values, and the model that its family describes. Reducing a
    spec separates values that a family derives from each other, such as a width and a scale that is its root; and a
    class of transformers may require that such values fit. The model of the family differs from `graph` only in
    numbers.

    Raises:
        SpecError: as in `export_config`, if no such model exists.
    """
    failure: SpecError | None = None
    nearest: Graph | None = None
    try:
        export_config(graph, plugins)
    except SpecError as error:
        failure = error
    if failure is None:
        yield graph
    with suppress(SpecError):
        nearest = _family_model(graph, plugins)
    if nearest is not None:
        yield nearest
    elif failure is not None:
        raise failure


def _family_model(graph: Graph, plugins: Plugins) -> Graph | None:
    """Return the model that a config.json near a model describes; None if they differ in more than numbers."""
    family, ours = _family_with_fields(graph), graph.spec.model
    for again in _read_back(graph, family, write_fields(graph.spec, family, nearest=True), plugins):
        changed = _value_differences(ours.graph, again.model.graph, "")
        if all(_is_number(value) and _is_number(other) for _, value, other in changed):
            values = {"graph": again.model.graph, "inputs": again.model.inputs, "parameters": None}
            spec = take_spec(spec_data(ours.model_copy(update=values)), plugins)
            return expand(replace(spec, file=graph.spec.file))
    return None


def _family_with_fields(graph: Graph) -> FamilyConfig:
    family = graph.spec.family
    if family is None or not family.fields:
        message = f"the spec {quoted(graph.name)} has no family, which defines the fields of a config.json"
        raise SpecError(Diagnostic(message, None, "checkpoint", help="write a `checkpoint` as specs/README.md shows"))
    return family


def _read_back(graph: Graph, family: FamilyConfig, fields: dict[str, Any], plugins: Plugins) -> Iterator[Spec]:
    """Yield the specs that the fields of a config.json describe, by each spec that defines the fields."""
    config = _mapping_of(fields, graph.spec.provenance.spans[()])
    free = {path: value_at(graph.spec.model, path) for path in family.zeros.values() if path is not None}
    for proving in _proving_trees(graph, family, plugins):
        with _convert_errors(None, family):
            tree = read_fields(config, proving, family)
            for path, value in free.items():
                tree = _with_value(tree, path, value)
            yield resolve_spec(without_idle(tree, plugins), plugins, file=CONFIG)


def _is_number(value: Any) -> bool:
    """Return True for numbers and for tuples of numbers."""
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _proving_trees(graph: Graph, family: FamilyConfig, plugins: Plugins) -> Iterator[Mapping]:
    """Yield the trees of the specs that must reproduce the model from its config.json; one of them suffices.

    These are the first spec of the model type, if tfkit has one, and the spec of the model, if its family differs.
    """
    standard, file = plugins.specs.by_model_type.get(family.model_type), graph.spec.file
    if standard is not None:
        tree, rules = _tree_and_family(standard, plugins)
        if family.head in rules.heads:
            tree, rules = _tree_and_family(standard, plugins, family.head)
        yield tree
        if rules == family:
            return
    if os.path.isfile(file):
        yield _tree_and_family(file, plugins)[0]
    elif standard is None:
        message = f"the family {quoted(family.model_type)} does not come with tfkit, and this spec is not in a file"
        raise SpecError(Diagnostic(message, None, "checkpoint.model_type", help="write the spec to a file first"))


def _in_short(value: Any) -> str:
    """Describe a value briefly: a component by its kind, any other config as a mapping."""
    if isinstance(value, Component):
        return value.kind_name()
    return "a mapping" if isinstance(value, Config) else text_of(value)


def _value_differences(ours: Any, theirs: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences between two resolved values: the path, and both values at it.

    Reading may round a number that a family computes, such as a scale times the root of a width.
    """
    if ours == theirs or (type(ours) is type(theirs) is float and math.isclose(ours, theirs, rel_tol=ROUNDING)):
        return
    parts = [dict(value) if isinstance(value, dict | Config) else None for value in (ours, theirs)]
    if parts[0] is None or parts[1] is None or type(ours) is not type(theirs):
        yield path, ours, theirs
        return
    # `max_len` of a model changes no output, and may be missing in a config.json. A table of positions has a separate
    # `max_len`.
    free = {"max_len"} if isinstance(ours, BlockConfig) else set()
    if _same_variants(ours, theirs):
        parts[1]["layers"] = parts[1]["layers"].model_copy(update={"pattern": parts[0]["layers"].pattern})
    for key in [key for key in {**parts[0], **parts[1]} if key not in free]:
        yield from _value_differences(parts[0].get(key), parts[1].get(key), f"{path}.{key}".lstrip("."))


def _same_variants(ours: Any, theirs: Any) -> bool:
    """Return True if two stacks have the same variant in each layer, however their patterns are written."""
    stacks = [block.stack() for block in (ours, theirs) if isinstance(block, BlockConfig) and dict(block).get("layers")]
    variants = [stack.variants for stack in stacks if stack is not None]
    return len(variants) == 2 and variants[0] == variants[1]
