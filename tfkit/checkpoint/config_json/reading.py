"""The reading of a config.json: its fields, and the spec as changed by them so far."""

from __future__ import annotations

from typing import Any

from tfkit.errors import Diagnostic, Invalid, closest, quoted
from tfkit.spec.arithmetic import ExpressionError, Number, evaluate
from tfkit.spec.checkpoint import CheckpointConfig
from tfkit.spec.merge import merge, nested
from tfkit.spec.source import plain
from tfkit.spec.tree import Mapping, Node, Scalar, node_of


class Reading:
    """The fields of a config.json, and the spec as changed by them so far.

    Attributes:
        tree: the spec.
        section: the family's rules for the fields.
        values: the fields by name.
        read: the names of those that were used.
        stacks: for each stack, the variant of every layer, and all existing variants.
        errors: the errors found.
    """

    def __init__(self, config: Mapping, family: Mapping, section: CheckpointConfig) -> None:
        self.tree = family
        self.section = section
        self.rules = section.fields
        self.errors: list[Diagnostic] = []
        self.read: set[str] = set()
        self.values: dict[str, Node] = {}
        self.further = {key for rule in self.rules.values() for key in rule.variants or {}}
        self.stacks: dict[str, tuple[list[str], dict[str, Any]]] = {}
        self.span = config.span
        self._flatten(config, "")

    def _flatten(self, node: Mapping, start: str) -> None:
        """Fields by name; those of a mapping as `mapping.field` if the family knows some of them in that form."""
        for key, value in node.items.items():
            name = f"{start}{key}"
            parts = any(rule.startswith(f"{name}.") for rule in self.rules)
            if isinstance(value, Mapping) and parts:
                self._flatten(value, f"{name}.")
            if not isinstance(value, Mapping) or not parts or name in self.rules:
                self.values[name] = value

    def node(self, name: str) -> Node:
        """The value of a field, or its default; raises `Invalid` if a required one is missing."""
        self.read.add(name)
        if name in self.values:
            return self.values[name]
        rule = self.rules.get(name)
        if rule is None or "default" not in rule.model_fields_set:
            near = closest(name, self.values.keys() - self.rules.keys())
            help = f"a field with a similar name exists: {quoted(near)}" if near else None
            raise Invalid("", f"{quoted(name)} is missing", help=help)
        return node_of(rule.default, self.span)

    def put(self, path: str, value: Node) -> None:
        """Change one place of the spec; mappings of one kind are merged, everything else is replaced."""
        self.tree = merge(self.tree, nested(self._keys(path), value))

    def _keys(self, path: str) -> list[str]:
        keys, graph = path.split("."), self.tree.items.get("graph")
        return ["graph", *keys] if isinstance(graph, Mapping) and keys[0] in graph.items else keys

    def is_null_before(self, path: str) -> bool:
        """True if there is nothing to change: a path leads into a null in the spec, or into no variant."""
        node: Node | None = self.tree
        before = ""
        for key in self._keys(path)[:-1]:
            node = node.items.get(key) if isinstance(node, Mapping) else None
            unknown = node is None and before == "variants" and key not in self.further
            if unknown or (isinstance(node, Scalar) and node.value is None):
                return True
            before = key
        return False

    def computed(self, text: str, value: Node | None = None) -> Number:
        """Arithmetic over the fields, and over `value`; raises `Invalid`."""
        found = evaluate(
            text, lambda name: self.number(name) if name != "value" or value is None else _number(value, "the value")
        )
        near = round(found)
        return near if abs(found - near) <= 1e-12 * abs(found) else found

    def number(self, name: str) -> Number:
        """A field that is a number; raises `Invalid`."""
        node, rule = self.node(name), self.rules.get(name)
        if isinstance(node, Scalar) and node.value is None and rule is not None and rule.if_null is not None:
            return self.computed(rule.if_null)
        return _number(node, quoted(name))

    def error(self, message: str, node: Node | None, path: str, *notes: str, help: str | None = None) -> None:
        """Note an error in a field."""
        self.errors.append(Diagnostic(message, node.span if node else self.span, path, notes, help))


def _number(node: Node, name: str) -> Number:
    value = node.value if isinstance(node, Scalar) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ExpressionError(f"{name} is {quoted(str(plain(node)))}, not a number")
    return value


def case_of(value: object) -> str:
    """The word under which `cases` have a value."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else str(value)
