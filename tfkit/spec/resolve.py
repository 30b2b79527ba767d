"""From data to configs: each field gets its value from its mapping, from an enclosing config, or from its default.

The tree of configs has the structure of the YAML. Fields that hold configs are resolved first, with kinds from the
registry. Then pydantic checks the types, and the config checks relations between fields. All errors are collected. An
invalid config does not cause errors in the configs around it.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tfkit.component import Component, Config, PatchMarker, SharedMarker, marker
from tfkit.errors import MAX_ERRORS, Diagnostic, Span, closest_name
from tfkit.plugin.manager import Plugins
from tfkit.spec import key_errors, messages
from tfkit.spec.annotations import ConfigShape, numbers_and_words, shape_of, slot_setting
from tfkit.spec.arithmetic import ExpressionError, Number, evaluate
from tfkit.spec.merge import merge
from tfkit.spec.provenance import Origin, Path, Provenance
from tfkit.spec.tree import Mapping, Node, Scalar, Sequence

MAX_PARTS = 1000  # nodes of a graph, inputs, sublayers
MAX_VARIANTS = 100  # each is a layer of its own
MAX_ITEMS = 4096  # items of a list of plain values
INVALID: Any = object()


class Resolver:
    """Resolves one spec; `diagnostics` holds its errors."""

    def __init__(self, plugins: Plugins) -> None:
        self.plugins = plugins
        self.provenance = Provenance()
        self.used: set[Path] = set()
        self._errors: list[Diagnostic] = []
        self._missing: dict[tuple[Path, str], key_errors.MissingKey] = {}
        self._unknown: list[key_errors.UnknownKey] = []
        self._circles: set[tuple[str, ...]] = set()
        self._enclosing: list[tuple[Mapping, Scope]] = []

    @property
    def diagnostics(self) -> list[Diagnostic]:
        """Errors of the spec. A mistake that causes several errors is reported once."""
        missing = [key for (path, name), key in self._missing.items() if not self._missing_in_base(path, name)]
        errors = [*self._errors, *key_errors.of_keys(self._unknown, missing, self.plugins, self.provenance)]
        if self._count() >= MAX_ERRORS:
            note = f"reading stopped after {MAX_ERRORS} errors"
            last = errors.pop()
            errors.append(replace(last, notes=(*last.notes, note)))
        return errors

    def config(self, cls: type[Config], node: Mapping, path: Path, scope: Scope) -> Any:
        """Construct a config of class `cls` from a mapping, or return INVALID and add the errors to `diagnostics`."""
        before = self._count()
        if before >= MAX_ERRORS:
            return INVALID
        self.provenance.spans.setdefault(path, node.span)
        for name, span in node.keys.items():
            self.provenance.spans[(*path, name)] = _value_span(node.items[name], span)
        inputs, inner = self._field_values(cls, node, path, scope)
        values: dict[str, Any] = {}
        self._check_keys(cls, node, inputs, path)
        self._enclosing.append((node, scope))
        for name, info in cls.model_fields.items():
            value = self._field(name, info, inputs.get(name), path, inner)
            if value is not _ABSENT:
                values[name] = value
        self._enclosing.pop()
        return self._construct(cls, values, path, sound=self._count() == before and INVALID not in values.values())

    def _count(self) -> int:
        return len(self._errors) + len(self._unknown) + len(self._missing)

    def _field_values(
        self, cls: type[Config], node: Mapping, path: Path, scope: Scope
    ) -> tuple[dict[str, Scoped], Scope]:
        """Return the unresolved values of a config's fields, and the scope of the configs inside it."""
        values: dict[str, Scoped] = {}
        inside = dict(scope)
        for name, info in cls.model_fields.items():
            here = (*path, name)
            if name in node.items:
                values[name] = Scoped(node.items[name], here, inside)
                self.provenance.origins[here] = Origin("given", _value_span(node.items[name], node.keys[name]))
            elif name in scope and marker(info, SharedMarker) is not None:
                values[name] = scope[name]
                self.used.add(scope[name].path)
                self.provenance.origins[here] = Origin("inherited", scope[name].node.span)
                self.provenance.spans.setdefault(here, scope[name].node.span)
                self.provenance.inherited[here] = scope[name].path
            else:
                self.provenance.origins[here] = Origin("default")
        for name, text in cls.derived.items():
            if name not in values:
                inside[name] = Scoped(Scalar(text, node.span), (*path, name), inside)
        if path:  # the top of a spec shares all keys that are not its fields
            inside.update(values)
        return values, inside

    def _field(self, name: str, info: FieldInfo, value: Scoped | None, path: Path, scope: Scope) -> Any:
        here, default_kind = (*path, name), slot_setting(info, "default_kind")
        shape = None if value is None and default_kind is None else shape_of(info.annotation)
        if value is None:
            if shape is None or default_kind is None:
                return _ABSENT
            span = self.provenance.span(path)
            assert span is not None
            config = self._config(shape, info, Scalar(default_kind, span), here, scope)
            return (config,) if shape.container == "list" and config is not INVALID else config
        if shape is None:
            return self._plain(info, value.node, here, value.scope)
        if marker(info, PatchMarker):
            return self._patches(shape, value.node, here)
        return self._configs(shape, info, value.node, here, scope)

    def _configs(self, shape: ConfigShape, info: FieldInfo, node: Node, path: Path, scope: Scope) -> Any:
        if shape.container == "one" or (isinstance(node, Scalar) and node.value is None and shape.null):
            return self._config(shape, info, node, path, scope)
        if shape.container == "list":
            if not isinstance(node, Sequence):
                return self._error(*messages.no_list(path, node), node.span, path)
            if len(node.items) > MAX_PARTS:
                return self._error(messages.too_many(path, len(node.items), MAX_PARTS), None, node.span, path)
            for i, item in enumerate(node.items):
                self.provenance.spans[(*path, str(i))] = item.span
            items = [self._config(shape, info, item, (*path, str(i)), scope) for i, item in enumerate(node.items)]
            return INVALID if INVALID in items else tuple(items)
        if not isinstance(node, Mapping):
            return self._error(*messages.no_names(path, node), node.span, path)
        if len(node.items) > MAX_PARTS:
            return self._error(messages.too_many(path, len(node.items), MAX_PARTS), None, node.span, path)
        self._note_keys(node, path)
        parts = {name: self._config(shape, info, item, (*path, name), scope) for name, item in node.items.items()}
        return INVALID if INVALID in parts.values() else parts

    def _note_keys(self, node: Mapping, path: Path) -> None:
        for name, span in node.keys.items():
            self.provenance.spans[(*path, name)] = span

    def _patches(self, shape: ConfigShape, node: Node, path: Path) -> Any:
        """Resolve named changes: each becomes a copy of the enclosing config with the change applied."""
        if not isinstance(node, Mapping):
            return self._error(*messages.no_names(path, node), node.span, path)
        if len(node.items) > MAX_VARIANTS:
            return self._error(messages.too_many(path, len(node.items), MAX_VARIANTS), None, node.span, path)
        self._note_keys(node, path)
        base, scope = self._enclosing[-2]
        items = {name: item for name, item in base.items.items() if name in shape.config.model_fields}
        layer = Mapping(items, {name: base.keys[name] for name in items}, base.span)
        variants: dict[str, Any] = {}
        for name, patch in node.items.items():
            here = (*path, name)
            if isinstance(patch, Mapping):
                variants[name] = self.config(shape.config, merge(layer, patch), here, scope)
            else:
                message = f"variant `{name}` must be a mapping of changes; got {messages.spec_value_text(patch)}"
                variants[name] = self._error(message, None, patch.span, here)
        return INVALID if INVALID in variants.values() else variants

    def _missing_in_base(self, path: Path, name: str) -> bool:
        """Return True if a key that is missing in a variant is also missing in the stack that the variant changes."""
        return any(
            path[i + 1] == "variants" and ((*path[:i], *path[i + 3 :]), name) in self._missing
            for i in range(len(path) - 2)
        )

    def _config(self, shape: ConfigShape, info: FieldInfo, node: Node, path: Path, scope: Scope) -> Any:
        """Resolve a config from a mapping or a single word, or a null or boolean if the field allows it."""
        cls = shape.config
        if isinstance(node, Scalar):
            if isinstance(node.value, bool) and shape.boolean:
                return node.value
            if shape.null and (node.value is None or node.value is False or node.value == "none"):
                return None
            if cls.word_key is not None and (isinstance(node.value, str) or _is_word(cls, node.value)):
                node = Mapping({cls.word_key: node}, {cls.word_key: node.span}, node.span)
        if not isinstance(node, Mapping):
            diagnostic = messages.not_a_config(path, cls, shape, node, self.plugins)
            self._errors.append(diagnostic)
            return INVALID
        if not issubclass(cls, Component):
            return self.config(cls, node, path, scope)
        kind = self._kind(cls, info, node, path)
        if kind is INVALID:
            return INVALID
        key = str(cls.word_key)
        if key not in node.items:
            word = Scalar(kind.kind_name(), node.span)
            node = Mapping({key: word, **node.items}, {key: node.span, **node.keys}, node.span)
        return self.config(kind, node, path, scope)

    def _kind(self, base: type[Component], info: FieldInfo, node: Mapping, path: Path) -> Any:
        """Return the class of the kind that a mapping names."""
        key = str(base.word_key)
        kinds = self.plugins.registry.kinds(base.slot, base)
        word = node.items.get(key)
        self.provenance.spans.setdefault(path, node.span)
        if word is None:
            implied = slot_setting(info, "implied_kind") or slot_setting(info, "default_kind")
            if implied in kinds:
                return kinds[implied].config
            self._errors.append(messages.missing_kind(base, node, path, self.plugins, self.provenance))
            return INVALID
        if not isinstance(word, Scalar) or not isinstance(word.value, str):
            message = f"`{key}` must be the name of a {messages.kind_of(base)}; got {messages.spec_value_text(word)}"
            return self._error(message, None, word.span, (*path, key))
        if word.value in kinds:
            return kinds[word.value].config
        self._errors.append(messages.unknown_kind(word.value, base, self.plugins, word.span, (*path, key)))
        return INVALID

    def _plain(self, info: FieldInfo, node: Node, path: Path, scope: Scope, nested: int = 0) -> Any:
        """Resolve a value without configs and evaluate its arithmetic; `nested` is its depth within the field."""
        if not isinstance(node, Scalar) and len(node.items) > MAX_ITEMS:
            return self._error(messages.too_many(path, len(node.items), MAX_ITEMS), None, node.span, path)
        if isinstance(node, Mapping):
            self._note_keys(node, path)
            parts = {k: self._plain(info, item, (*path, k), scope, nested + 1) for k, item in node.items.items()}
            return INVALID if INVALID in parts.values() else parts
        if isinstance(node, Sequence):
            for i, item in enumerate(node.items):
                self.provenance.spans[(*path, str(i))] = item.span
            items = [self._plain(info, item, (*path, str(i)), scope, nested + 1) for i, item in enumerate(node.items)]
            return INVALID if INVALID in items else tuple(items)
        numbers, words = numbers_and_words(info.annotation)
        if node.value in words and not any(type(item) is type(node.value) and item == node.value for item in words):
            self._errors.append(messages.no_value(info, node, self.provenance.written(path), nested))  # true is not 1
            return INVALID
        if not numbers or not isinstance(node.value, str) or node.quoted or node.value in words:
            return node.value
        if node.value.isidentifier() and closest_name(node.value, scope) is None:
            self._errors.append(messages.no_value(info, node, self.provenance.written(path), nested))
            return INVALID
        try:
            value = compute_value(node.value, scope, self.provenance.written(path), self.used)
        except ExpressionError as error:
            if error.circle and error.circle in self._circles:
                return INVALID
            self._circles.add(error.circle)
            span = messages.expression_span(node.span, node.value, error.columns)
            return self._error(f"{messages.value_label(path)}: {error}", error.help, span, path, error.notes)
        return int(value) if float not in numbers and value == int(value) else value

    def _check_keys(self, cls: type[Config], node: Mapping, values: MappingABC[str, Scoped], path: Path) -> None:
        """Record the unknown and the missing keys of a config."""
        missing = [
            name
            for name, info in cls.model_fields.items()
            if name not in values and info.is_required() and slot_setting(info, "default_kind") is None
        ]
        for key in [key for key in node.items if key not in cls.model_fields][:MAX_ERRORS]:
            meant = closest_name(key, missing)
            missing = [name for name in missing if name != meant]
            self._unknown.append(key_errors.UnknownKey(key, cls, path, node.keys[key], meant))
        for name in missing:
            self._missing[path, name] = key_errors.MissingKey(name, cls, path)

    def _construct(self, cls: type[Config], values: dict[str, Any], path: Path, *, sound: bool) -> Any:
        """Construct a config from its values. Relations between fields are checked only if all values are `sound`."""
        try:
            config = cls.model_validate({name: value for name, value in values.items() if value is not INVALID})
        except ValidationError as error:
            self._errors += messages.from_pydantic(error, cls, path, self.provenance, relations=sound)
            return INVALID
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin's validator
            if sound:
                self._errors.append(messages.crash_error(cls, "the check of its config", error, path, self.provenance))
            return INVALID
        return config if sound else INVALID

    def _error(self, message: str, help: str | None, span: Span, path: Path, notes: tuple[str, ...] = ()) -> Any:
        path = self.provenance.written(path)
        self._errors.append(Diagnostic(message, span, ".".join(path), notes, help))
        return INVALID


_ABSENT: Any = object()


def _is_word(cls: type[Config], value: object) -> bool:
    """Return True for a number that replaces a mapping without kinds: it is the value of the mapping's word key."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not issubclass(cls, Component)


def _value_span(node: Node, key: Span) -> Span:
    """Return the location of a value that is on one line, else of its key."""
    return node.span if isinstance(node, Scalar) or node.span.line == key.line else key


# ---- values in scope ----


@dataclass(frozen=True, eq=False)
class Scoped:
    """An unresolved value, the path at which it was written, and the scope at that path."""

    node: Node
    path: Path
    scope: Scope = field(repr=False)


Scope: TypeAlias = MappingABC[str, Scoped]


def compute_value(text: str, scope: Scope, path: Path, used: set[Path]) -> Number:
    """Evaluate the expression at `path`, and add to `used` the paths of all values on which it depends.

    Names are looked up in the scope in which the expression was written. Raises ExpressionError.
    """
    return _Computation(used).value(text, scope, (path,))


class _Computation:
    """Evaluates expressions, each only once, so a chain of expressions takes linear time."""

    def __init__(self, used: set[Path]) -> None:
        self.used = used
        self.known: dict[Path, Number] = {}

    def value(self, text: str, scope: Scope, busy: tuple[Path, ...]) -> Number:
        return evaluate(text, lambda name: self.lookup(name, scope, busy))

    def lookup(self, name: str, scope: Scope, busy: tuple[Path, ...]) -> Number:
        entry = scope.get(name)
        if entry is None:
            raise messages.unknown_name(name, [n for n, named in scope.items() if _is_number(named.node)])
        if entry.path in busy:
            raise messages.circle_error([path[-1] for path in (*busy[busy.index(entry.path) :], entry.path)])
        self.used.add(entry.path)
        value = entry.node.value if isinstance(entry.node, Scalar) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        if not isinstance(value, str) or not _is_expression(entry):
            raise ExpressionError(f"`{name}` must be a number; got {messages.spec_value_text(entry.node)}")
        if entry.path not in self.known:
            self.known[entry.path] = self.value(value, entry.scope, (*busy, entry.path))
        return self.known[entry.path]


def _is_number(node: Node) -> bool:
    return isinstance(node, Scalar) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def _is_expression(value: Scoped) -> bool:
    """Return True for arithmetic, and False for a single word."""
    node = value.node
    if not isinstance(node, Scalar) or node.quoted or not isinstance(node.value, str):
        return False
    return not node.value.isidentifier() or node.value in value.scope
