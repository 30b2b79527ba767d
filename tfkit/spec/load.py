"""From the name of a file to a checked spec: find the file, read it, apply `extends` and `--set`, resolve it.

A key at the top that no component uses is an error of the file or `--set` that contains it. If a different file or
`--set` replaced the last component that used it, tfkit issues a warning instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tfkit.component import Component, parts
from tfkit.errors import Diagnostic, Span, SpecError, quoted
from tfkit.plugin.discover import BUILT_IN, normalized_name
from tfkit.plugin.known_specs import NamedSpecs
from tfkit.plugin.manager import Plugins
from tfkit.plugin.missing import how_to_get
from tfkit.spec import source
from tfkit.spec.data import read_data
from tfkit.spec.extending import Language, Read, find_spec, merge_over_base, plugin_folders, read_based, short_path
from tfkit.spec.families import FamilyConfig, full_family, with_inline_family
from tfkit.spec.like import with_base, with_likes
from tfkit.spec.merge import apply_set, is_null, left_out, merge_documents, without_keys
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.provenance import Provenance
from tfkit.spec.resolve import Resolver, Scoped
from tfkit.spec.tree import Mapping, Node, Scalar
from tfkit.spec.tree import Sequence as ListNode


@dataclass(frozen=True)
class Spec:
    """A resolved spec: the model and its family, and the origin of each of their values."""

    model: ModelSpec
    provenance: Provenance
    file: str
    notes: tuple[Diagnostic, ...] = ()
    """Warnings."""
    built_with: MappingABC[str, str] = field(default_factory=dict)
    """Versions of the plugins, except tfkit, whose components the model uses, by name."""
    family: FamilyConfig | None = None
    """The names of tensors and fields in published checkpoints of the model."""

    @property
    def portable(self) -> ModelSpec:
        """The model for a file: it requires the plugins with which it was built, or later versions."""
        from tfkit.plugin.required import with_versions  # importing packaging is slow

        required = with_versions(self.model.requires or (), self.built_with)
        return self.model.model_copy(update={"requires": required or None})

    def named(self, name: str) -> Spec:
        """Return the spec under another name."""
        return replace(self, model=self.model.model_copy(update={"name": name}))


def read_spec(name: str | os.PathLike[str], plugins: Plugins, *, sets: Iterable[str] = ()) -> Spec:
    """Read and resolve the spec at a path or with a name, changed by `sets` (`path=value`).

    Raises SpecError with every error in the spec.
    """
    file = str(short_path(find_spec(name, plugins.specs, registry=plugins.registry)))
    return resolve_spec(read_tree(name, plugins.specs), plugins, sets=sets, file=file)


def read_tree(name: str | os.PathLike[str], specs: NamedSpecs, *, read: Read = source.read) -> Mapping:
    """Read the tree of a spec and apply `extends`, without resolving it; raise SpecError.

    `read` reads one file. A caller that reads many specs can pass a function that caches.
    """
    return read_based(find_spec(name, specs), spec_language(specs, read))


def parse_spec(text: str, plugins: Plugins, *, sets: Iterable[str] = (), name: str = "<spec>") -> Spec:
    """Parse and resolve the text of a spec, as `read_spec` does for a file."""
    root = source.parse(text, name)
    return resolve_spec(merge_over_base(root, Path(), spec_language(plugins.specs)), plugins, sets=sets, file=name)


def take_spec(data: MappingABC[Any, Any], plugins: Plugins, *, sets: Iterable[str] = ()) -> Spec:
    """Resolve a spec from a mapping, as `read_spec` resolves a file."""
    root = read_data(data)
    return resolve_spec(
        merge_over_base(root, Path(), spec_language(plugins.specs)), plugins, sets=sets, file=root.span.source.name
    )


def without_idle(root: Mapping, plugins: Plugins) -> Mapping:
    """Remove the values at the top that have no effect because no component uses them."""
    text = _written_out(root, plugins)
    resolved = _resolved_model(text, plugins)
    return root if resolved.errors else without_keys(root, {*resolved.idle, *text.nulls})


def resolve_spec(root: Mapping, plugins: Plugins, *, sets: Iterable[str] = (), file: str) -> Spec:
    """Resolve a tree whose `extends` has been applied, in three passes."""
    _check_required(root, plugins)
    # 1. Change. Takes the tree of a spec and the `--set` arguments; returns the changed tree.
    changed, errors = _changed_spec(root, list(sets), plugins)
    # 2. Expand. Takes the changed tree; returns the tree of a `ModelSpec` without short forms, and the values at the
    #    top that components inherit.
    text = _written_out(changed, plugins)
    # 3. Resolve. Takes both; returns the config, the origin of each value, and the errors.
    resolved = _resolved_model(text, plugins)
    errors += [_nothing_to_take(name, node) for name, node in text.nulls.items()]
    errors += [error for error in resolved.errors if error.span not in [node.span for node in text.nulls.values()]]
    # If the model has no errors, passes 2 and 3 follow for its family.
    family = None
    if not resolved.errors:
        family, family_errors = _resolved_family(changed, plugins, resolved.provenance)
        errors += family_errors
    idle, notes = ([], []) if errors else _idle_keys(root, changed, resolved.idle, plugins)
    if errors or idle:
        raise SpecError(*errors, *idle)
    return Spec(resolved.model, resolved.provenance, file, tuple(notes), _built_with(resolved.model, plugins), family)


def spec_language(specs: NamedSpecs, read: Read = source.read) -> Language:
    """Return the language of specs; `read` reads one file."""

    def find(name: str, folder: Path, span: Span) -> Path:
        return find_spec(name, specs, folder=folder, span=span)

    def merge(base: Mapping | None, patch: Mapping, folder: Path) -> Mapping:
        return patch if base is None else merge_documents(without_keys(base, {"parameters"}), patch)

    return Language(ModelSpec, find, merge, read)


# ---- before the passes: required plugins ----


def _check_required(root: Mapping, plugins: Plugins) -> None:
    """Raise SpecError for required plugins that are not loaded. Their kinds would otherwise be reported as unknown."""
    requires = root.items.get("requires")
    items = requires.items if isinstance(requires, ListNode) else ()
    texts = [item for item in items if isinstance(item, Scalar) and isinstance(item.value, str)]
    errors = [error for item in texts if (error := _unmet_requirement(str(item.value), item.span, plugins))]
    if errors:
        raise SpecError(*errors)


def _unmet_requirement(text: str, span: Span, plugins: Plugins) -> Diagnostic | None:
    """Return the error for a required plugin that is not loaded or has an unsuitable version, else None."""
    from tfkit.plugin import required  # importing packaging is slow, and most specs require no plugin

    try:
        requirement = required.parse_requirement(text)
    except ValueError as error:
        help = "write `requires: [tfkit-moe]`, or with versions: `requires: [tfkit-moe>=0.2]`"
        return Diagnostic(f"cannot read {quoted(text)}: {error}", span, "requires", help=help)
    loaded = next(
        (plugin for plugin in plugins.loaded if normalized_name(plugin.name) == normalized_name(requirement.name)), None
    )
    if loaded is None:
        message = f"the spec needs the plugin {quoted(text)}, which is not loaded"
        help = how_to_get(requirement.name, plugins, plugin_folders(Path(span.source.name).parent))
        return Diagnostic(message, span, "requires", help=help)
    if required.is_satisfied(requirement, loaded.version):
        return None
    version = loaded.version or "without a version"
    notes = (f"found: {loaded.name} {version}, from {loaded.origin}", f"required: {requirement.specifier}")
    help = f"install a version that fits, or change `requires` if {version} does"
    return Diagnostic(f"the spec needs {quoted(text)}, but {version} is loaded", span, "requires", notes, help)


# ---- pass 1: changes ----


def _changed_spec(root: Mapping, sets: list[str], plugins: Plugins) -> tuple[Mapping, list[Diagnostic]]:
    """Apply the valid `--set` arguments to `root`; return the result and the errors of the invalid arguments."""
    fields = frozenset(ModelSpec.model_fields) | plugins.registry.shared_names()
    errors: list[Diagnostic] = []
    root = without_keys(root, {"parameters"} if sets else ())
    for argument in sets:
        try:
            root = apply_set(root, argument, fields)
        except SpecError as error:
            errors += error.diagnostics
    return root, errors


# ---- pass 2: full forms ----


@dataclass(frozen=True)
class _ModelText:
    """A model without short forms.

    Attributes:
        model: the tree of a `ModelSpec`.
        shared: the values at the top that components inherit.
        nulls: the values at the top that are null although no base has a value that they could remove.
        bases: the node from which a node takes a key, by the path of the key.
        errors: the errors in short forms.
    """

    model: Mapping
    shared: Mapping
    nulls: dict[str, Node]
    bases: dict[str, str]
    errors: list[Diagnostic]


def _written_out(root: Mapping, plugins: Plugins) -> _ModelText:
    """Expand the short forms of a model: a list of inputs, nodes like others, and a family that is named by a path."""
    root, names = with_inline_family(root, plugins.specs), plugins.registry.shared_names()
    model, errors = _inputs_as_mapping(without_keys(root, names))
    model, bases, faults = with_likes(model, plugins.registry)
    shared = without_keys(root, root.items.keys() - names)
    nulls = {name: node for name, node in shared.items.items() if is_null(node)}
    return _ModelText(model, shared, nulls, bases, [*errors, *faults])


def _inputs_as_mapping(root: Mapping) -> tuple[Mapping, list[Diagnostic]]:
    """Expand `inputs: [source, target]` to a mapping of two inputs of tokens."""
    inputs = root.items.get("inputs")
    if not isinstance(inputs, ListNode):
        return root, []
    items: dict[str, Node] = {}
    spans: dict[str, Span] = {}
    errors = []
    for item in inputs.items:
        if not isinstance(item, Scalar) or not isinstance(item.value, str):
            help = "write `inputs: [source, target]`, or a mapping of names to types"
            errors.append(Diagnostic("an input in a list must be a name", item.span, "inputs", help=help))
        elif item.value in items:
            errors.append(Diagnostic(f"input {quoted(item.value)} is in the list twice", item.span, "inputs"))
        else:
            items[item.value] = Scalar("tokens", item.span)
            spans[item.value] = item.span
    return Mapping({**root.items, "inputs": Mapping(items, spans, inputs.span)}, root.keys, root.span), errors


# ---- pass 3: configs ----


@dataclass(frozen=True)
class _Resolved:
    """The result of pass 3. `idle` lists the keys at the top that no component uses; empty if there are errors."""

    model: Any
    provenance: Provenance
    errors: list[Diagnostic]
    idle: list[str]


def _resolved_model(text: _ModelText, plugins: Plugins) -> _Resolved:
    scope: dict[str, Scoped] = {}
    scope |= {name: Scoped(node, (name,), scope) for name, node in text.shared.items.items()}
    resolver = Resolver(plugins)
    resolver.provenance.spans |= {(name,): value.node.span for name, value in scope.items()}
    model = resolver.config(ModelSpec, text.model, (), scope)
    errors = [*text.errors, *(with_base(error, text.bases) for error in resolver.diagnostics)]
    idle = [] if errors else [name for name in scope if (name,) not in resolver.used]
    return _Resolved(model, resolver.provenance, errors, idle)


def _resolved_family(
    root: Mapping, plugins: Plugins, provenance: Provenance
) -> tuple[FamilyConfig | None, list[Diagnostic]]:
    """Resolve the family of a model, add its locations to `provenance`, and return the family and its errors."""
    node = root.items.get("checkpoint")
    if node is None or is_null(node):
        return None, []
    resolver = Resolver(plugins)
    text = full_family(node, plugins.specs, plugins.registry)
    family = resolver.config(FamilyConfig, text, ("checkpoint",), {})
    provenance.spans.update(resolver.provenance.spans)
    return family, resolver.diagnostics


def _built_with(model: ModelSpec, plugins: Plugins) -> dict[str, str]:
    third_party = [plugin for plugin in plugins.loaded if plugin.origin != BUILT_IN]
    owners = {component.config: plugin for plugin in third_party for component in plugin.components}
    used = {owners.get(type(part)) for _, part in parts((), model) if isinstance(part, Component)} if owners else set()
    return {plugin.name: plugin.version for plugin in third_party if plugin in used}


def _idle_keys(
    root: Mapping, changed: Mapping, idle: Iterable[str], plugins: Plugins
) -> tuple[list[Diagnostic], list[Diagnostic]]:
    """Return the errors and the warnings for keys at the top without an effect.

    The module's docstring says which keys are errors.
    """
    errors, notes = [], []
    # Unused keys do not depend on the family, and a `--set` may have replaced a family that does not exist.
    before = _resolved_model(_written_out(without_keys(root, {"checkpoint"}), plugins), plugins).idle if idle else []
    for name in idle:
        key = changed.keys[name]
        by_set = changed.items[name] is not root.items.get(name)
        if by_set or (name in before and key.source == root.span.source):
            errors.append(_idle_key_error(name, key))
        else:
            notes.append(_idle_now(name, key, by_set=name not in before))
    return errors, notes


def _idle_key_error(name: str, key: Span) -> Diagnostic:
    return Diagnostic(f"`{name}` has no effect: nothing in the model takes it", key, name, help="remove it")


def _idle_now(name: str, key: Span, *, by_set: bool) -> Diagnostic:
    """Return the warning for a key at the top whose last user was removed by a different file or a `--set`."""
    message = f"`{name}` no longer has an effect: nothing in the changed model takes it"
    help = f"remove it with `--set {name}=null`" if by_set else f"write `{name}: null` to remove it"
    return Diagnostic(message, key, name, help=help)


def _nothing_to_take(name: str, node: Node) -> Diagnostic:
    """Return the error for a null at the top that removes nothing."""
    if left_out(node):
        help = f"remove a key at the top of the spec with `--set {name}=null`"
        return Diagnostic(f"`{name}` must have a value", node.span, name, help=help)
    message = f"`{name}` is null, and there is no `{name}` to remove"
    return Diagnostic(message, node.span, name, help="set a value, or remove it")
