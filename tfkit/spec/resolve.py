"""Data to configs: every field from the mapping, from the enclosing parts, or from its default, and known from where.

The tree of configs is the tree of the YAML. A field that holds a config is resolved first, with its kind looked up in
the registry; then pydantic checks the types and the config checks its relations. All errors are collected.
"""

from __future__ import annotations

import types
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tfkit.component import Component, Config, PatchMarker, SharedMarker, marker
from tfkit.errors import Diagnostic, Span, closest, listing, quoted
from tfkit.plugin.manager import Plugins
from tfkit.spec import complaints
from tfkit.spec.arithmetic import ExpressionError, Number, evaluate
from tfkit.spec.merge import merge
from tfkit.spec.tree import Mapping, Node, Scalar, Sequence

INVALID: Any = object()
Path = tuple[str, ...]


@dataclass(frozen=True)
class Given:
    """A value of the spec's text, and the path under which it was written."""

    node: Node
    path: Path


Scope = MappingABC[str, Given]


@dataclass(frozen=True)
class Origin:
    """Where a resolved value came from."""

    how: Literal["given", "inherited", "default"]
    span: Span | None = None


@dataclass
class Provenance:
    """Where the parts of a spec stand: the origin of each value, and the place of each path that was written."""

    origins: dict[Path, Origin] = field(default_factory=dict)
    spans: dict[Path, Span] = field(default_factory=dict)

    def span(self, path: Path) -> Span | None:
        """The place of `path`, or of the nearest part around it."""
        while path and path not in self.spans:
            path = path[:-1]
        return self.spans.get(path)


@dataclass(frozen=True)
class Shape:
    """What the annotation of a field that holds configs allows."""

    config: type[Config]
    container: Literal["one", "list", "dict"]
    null: bool
    boolean: bool


def shape_of(annotation: Any) -> Shape | None:
    """The shape of a field that holds configs; None for every other field."""
    options = _options(annotation)
    for option in options:
        arguments = [a for a in get_args(option) if a is not Ellipsis]
        container: Literal["one", "list", "dict"] = "one"
        if get_origin(option) in (tuple, list) or get_origin(option) is dict:
            container = "dict" if get_origin(option) is dict else "list"
            option = _options(arguments[-1])[0]
        if isinstance(option, type) and issubclass(option, Config):
            return Shape(option, container, type(None) in options, bool in options)
    return None


def _options(annotation: Any) -> list[Any]:
    """The members of a union, annotations taken off."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [o for argument in get_args(annotation) for o in _options(argument)]
    if hasattr(annotation, "__metadata__"):
        return _options(get_args(annotation)[0])
    return [annotation]


class Resolver:
    """Resolves one spec; `errors` holds everything that is wrong with it."""

    def __init__(self, plugins: Plugins) -> None:
        self.plugins = plugins
        self.errors: list[Diagnostic] = []
        self.provenance = Provenance()
        self.used: set[Path] = set()
        self._enclosing: list[tuple[Mapping, Scope]] = []

    def config(
        self,
        cls: type[Config],
        node: Mapping,
        path: Path,
        scope: Scope,
        *,
        extra: MappingABC[str, Any] | None = None,
    ) -> Any:
        """The config of class `cls` that the mapping says, or INVALID with the reasons in `errors`.

        `extra` are fields that are resolved already.
        """
        self.provenance.spans.setdefault(path, node.span)
        for name, span in node.keys.items():
            self.provenance.spans[(*path, name)] = _value_span(node.items[name], span)
        known = {**cls.model_fields}
        self._unknown_keys(cls, node, path)
        given = self._given(known, node, path, scope)
        inner = {**scope, **given}
        values: dict[str, Any] = dict(extra or {})
        self._enclosing.append((node, scope))
        for name, info in known.items():
            if name in values:
                continue
            value = self._field(cls, name, info, given.get(name), path, inner)
            if value is not _ABSENT:
                values[name] = value
        self._enclosing.pop()
        return self._construct(cls, values, path, node)

    def _given(self, fields: MappingABC[str, FieldInfo], node: Mapping, path: Path, scope: Scope) -> dict[str, Given]:
        """The values of a config's fields in the text: its own, and those it inherits."""
        given: dict[str, Given] = {}
        for name, info in fields.items():
            here = (*path, name)
            if name in node.items:
                given[name] = Given(node.items[name], here)
                self.provenance.origins[here] = Origin("given", _value_span(node.items[name], node.keys[name]))
            elif marker(info, SharedMarker) and name in scope:
                given[name] = scope[name]
                self.used.add(scope[name].path)
                self.provenance.origins[here] = Origin(
                    "inherited", _value_span(scope[name].node, scope[name].node.span)
                )
                self.provenance.spans.setdefault(here, scope[name].node.span)
            else:
                self.provenance.origins[here] = Origin("default")
        return given

    def _field(
        self, cls: type[Config], name: str, info: FieldInfo, given: Given | None, path: Path, scope: Scope
    ) -> Any:
        shape = shape_of(info.annotation)
        here = (*path, name)
        if given is None:
            default_kind = _extra(info, "default_kind")
            if shape is None or default_kind is None:
                return _ABSENT
            span = self.provenance.span(path)
            assert span is not None
            return self._one(shape, info, Scalar(default_kind, span), here, scope)
        if shape is None:
            return self._plain(info, given.node, name, here, scope)
        if marker(info, PatchMarker):
            return self._patches(shape, given.node, here)
        return self._configs(shape, info, given.node, here, scope)

    def _configs(self, shape: Shape, info: FieldInfo, node: Node, path: Path, scope: Scope) -> Any:
        if shape.container == "one" or (isinstance(node, Scalar) and node.value is None and shape.null):
            return self._one(shape, info, node, path, scope)
        if shape.container == "list":
            if not isinstance(node, Sequence):
                return self._error(f"`{path[-1]}` takes a list", node.span, path, help="write `[a, b]`")
            items = [self._one(shape, info, item, (*path, str(i)), scope) for i, item in enumerate(node.items)]
            return INVALID if INVALID in items else tuple(items)
        if not isinstance(node, Mapping):
            return self._error(f"`{path[-1]}` takes a mapping of names", node.span, path, help="write `name: ...`")
        self._note_keys(node, path)
        parts = {name: self._one(shape, info, item, (*path, name), scope) for name, item in node.items.items()}
        return INVALID if INVALID in parts.values() else parts

    def _note_keys(self, node: Mapping, path: Path) -> None:
        for name, span in node.keys.items():
            self.provenance.spans[(*path, name)] = span

    def _patches(self, shape: Shape, node: Node, path: Path) -> Any:
        """Named changes, each resolved as the enclosing config with the change merged in."""
        if not isinstance(node, Mapping):
            return self._error(f"`{path[-1]}` takes a mapping of names", node.span, path, help="write `name: {...}`")
        self._note_keys(node, path)
        base, scope = self._enclosing[-2]
        fields = shape.config.model_fields
        layer = Mapping({k: v for k, v in base.items.items() if k in fields}, dict(base.keys), base.span)
        layer = Mapping(layer.items, {k: base.keys[k] for k in layer.items}, base.span)
        found: dict[str, Any] = {}
        for name, patch in node.items.items():
            here = (*path, name)
            if isinstance(patch, Mapping):
                merged = merge(layer, patch)
                found[name] = self.config(shape.config, merged, here, scope)
            else:
                found[name] = self._error(f"variant `{name}` is a mapping of changes", patch.span, here)
        return INVALID if INVALID in found.values() else found

    def _one(self, shape: Shape, info: FieldInfo, node: Node, path: Path, scope: Scope) -> Any:
        """One config, from a mapping or a bare word; or null, or a boolean, where the field allows it."""
        cls = shape.config
        if isinstance(node, Scalar):
            if isinstance(node.value, bool) and shape.boolean:
                return node.value
            if shape.null and (node.value is None or node.value is False or node.value == "none"):
                return None
            if not isinstance(node.value, str) or cls.word_key is None:
                return self._error(complaints.not_a_config(path[-1], cls, shape, node), node.span, path)
            node = Mapping({cls.word_key: node}, {cls.word_key: node.span}, node.span)
        if isinstance(node, Sequence):
            return self._error(f"`{path[-1]}` takes one {_noun(cls)}, not a list", node.span, path)
        if not issubclass(cls, Component):
            return self.config(cls, node, path, scope)
        found = self._kind(cls, info, node, path)
        if found is INVALID:
            return INVALID
        kind_key = str(cls.word_key)
        if kind_key not in node.items:
            word = Scalar(found.kind_name(), node.span)
            node = Mapping({kind_key: word, **node.items}, {kind_key: node.span, **node.keys}, node.span)
        return self.config(found, node, path, scope)

    def _kind(self, base: type[Component], info: FieldInfo, node: Mapping, path: Path) -> Any:
        """The class of the kind that a mapping names."""
        key, slot = str(base.word_key), base.slot
        kinds = self.plugins.registry.kinds(slot, base)
        word = node.items.get(key)
        if word is None:
            implied = _extra(info, "implied_kind") or _extra(info, "default_kind")
            if implied in kinds:
                return kinds[implied].config
            return self._error(*complaints.missing_kind(slot, key, node, kinds), path)
        if not isinstance(word, Scalar) or not isinstance(word.value, str):
            return self._error(f"`{key}` takes the name of a kind", word.span, (*path, key))
        if word.value in kinds:
            return kinds[word.value].config
        diagnostic = complaints.unknown_kind(word.value, base, self.plugins, word.span, ".".join((*path, key)))
        self.errors.append(diagnostic)
        return INVALID

    def _plain(self, info: FieldInfo, node: Node, name: str, path: Path, scope: Scope) -> Any:
        """A value without configs inside, arithmetic evaluated."""
        if isinstance(node, Mapping):
            self._note_keys(node, path)
            return {key: self._plain(info, value, name, (*path, key), scope) for key, value in node.items.items()}
        if isinstance(node, Sequence):
            for i, item in enumerate(node.items):
                self.provenance.spans[(*path, str(i))] = item.span
            return tuple(self._plain(info, item, name, (*path, str(i)), scope) for i, item in enumerate(node.items))
        numbers, words = numeric(info.annotation)
        if not numbers or not isinstance(node.value, str) or node.quoted or node.value in words:
            return node.value
        try:
            value = self._evaluate(node.value, scope, (name,))
        except ExpressionError as wrong:
            return self._error(f"`{name}`: {wrong}", node.span, path)
        return int(value) if float not in numbers and value == int(value) else value

    def _evaluate(self, text: str, scope: Scope, busy: tuple[str, ...]) -> Number:
        def lookup(name: str) -> Number:
            if name in busy:
                raise ExpressionError(f"`{name}` is defined by itself")
            given = scope.get(name)
            if given is None:
                numbers = [n for n, g in scope.items() if isinstance(g.node, Scalar) and _is_number(g.node.value)]
                near = closest(name, numbers)
                hint = f"; a similar name exists: `{near}`" if near else f"; names: {listing(sorted(numbers))}"
                raise ExpressionError(f"there is no {quoted(name)} to compute with{hint}")
            self.used.add(given.path)
            value = given.node.value if isinstance(given.node, Scalar) else None
            if isinstance(value, str) and isinstance(given.node, Scalar) and not given.node.quoted:
                return self._evaluate(value, scope, (*busy, name))
            if not _is_number(value):
                raise ExpressionError(f"`{name}` is not a number")
            return value  # type: ignore[return-value]

        return evaluate(text, lookup)

    def _unknown_keys(self, cls: type[Config], node: Mapping, path: Path) -> None:
        missing = [
            name
            for name, info in cls.model_fields.items()
            if name not in node.items and info.is_required() and _extra(info, "default_kind") is None
        ]
        for key in node.items:
            if key not in cls.model_fields:
                span = node.keys[key]
                self.errors.append(
                    complaints.unknown_key(key, cls, missing, self.plugins, span, ".".join((*path, key)))
                )

    def _construct(self, cls: type[Config], values: dict[str, Any], path: Path, node: Mapping) -> Any:
        broken = {name for name, value in values.items() if value is INVALID}
        sound = {name: value for name, value in values.items() if name not in broken}
        try:
            config = cls.model_validate(sound)
        except ValidationError as error:
            unknown = [key for key in node.items if key not in cls.model_fields]
            for diagnostic in complaints.from_pydantic(error, cls, path, node, self.provenance, unknown):
                if diagnostic.path.removeprefix(".".join(path)).lstrip(".").split(".")[0] not in broken:
                    self.errors.append(diagnostic)
            return INVALID
        return INVALID if broken else config

    def _error(self, message: str, span: Span, path: Path, *, help: str | None = None) -> Any:
        self.errors.append(Diagnostic(message, span, ".".join(path), help=help))
        return INVALID


_ABSENT: Any = object()


def _extra(info: FieldInfo, key: str) -> str | None:
    extra = info.json_schema_extra
    return str(extra[key]) if isinstance(extra, dict) and key in extra else None


def _noun(cls: type[Config]) -> str:
    return cls.slot if issubclass(cls, Component) else "mapping"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def numeric(annotation: Any) -> tuple[set[type], set[object]]:
    """Which number types a field takes, and which words."""
    numbers: set[type] = set()
    words: set[object] = set()
    for option in _options(annotation):
        if option in (int, float):
            numbers.add(option)
        elif get_origin(option) is Literal:
            words |= set(get_args(option))
        elif get_origin(option) is dict:
            numbers |= numeric(get_args(option)[1])[0]
    return numbers, words


def _value_span(node: Node, key: Span) -> Span:
    return node.span if isinstance(node, Scalar) else key
