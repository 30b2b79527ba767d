"""Lists of layer types in a config.json, and the pattern of a spec's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from tfkit.checkpoint.config_json.reading import Reading, case_of
from tfkit.errors import Invalid, Span, listing, quoted
from tfkit.spec.checkpoint import FieldConfig
from tfkit.spec.merge import merge
from tfkit.spec.source import plain
from tfkit.spec.tree import Mapping as Tree
from tfkit.spec.tree import Scalar, node_of

BASE = "base"
MAX_LAYERS = 4096
"""The most layers that a stack may have, see `Count`."""


def read(reading: Reading, name: str, rule: FieldConfig) -> None:
    """Set the pattern of the stack at `rule.set`, and remove unused variants."""
    assert isinstance(rule.set, str)
    node = reading.node(name)
    listed = listing_of(reading.rules, rule.set)
    if rule.layers is None and listed is not None and plain(reading.node(listed)) is not None:
        return  # the list gives each layer
    if rule.layers is not None and plain(node) is None:
        return  # a number gave it
    n_layers = n_layers_of(reading, rule.set)
    if n_layers is None:
        return
    before, variants = reading.stacks.get(rule.set, ([BASE] * n_layers, {}))
    if rule.layers is None:
        names = _counted(plain(node), rule, n_layers)
    else:
        given = [case_of(one) for one in _spelt_out(plain(node))]
        if not given:
            raise Invalid("", "the list of layer types is empty", help="name the type of each layer, or leave it out")
        types = rule.layers or {}
        if unknown := [one for one in given if one not in types]:
            raise Invalid("", f"unknown layer type {quoted(unknown[0])}", notes=[f"it can be {listing(types)}"])
        names = [_at(types[one], i, before[i]) for i, one in enumerate(cycled(given, n_layers))]
    put(reading, rule, names, variants, node.span)


def n_layers_of(reading: Reading, stack: str) -> int | None:
    """The number of layers in a stack; None if it is wrong, an error of the field that gives it."""
    found = value_at(reading.tree, f"{stack}.n_layers")
    return found if type(found) is int and 0 < found <= MAX_LAYERS else None


def put(reading: Reading, rule: FieldConfig, names: list[str], variants: dict[str, Any], span: Span) -> None:
    """Set the variants of the stack's layers to `names`; `variants` are those known from earlier fields."""
    assert isinstance(rule.set, str)
    variants = _variants(reading.tree, rule, variants)
    reading.stacks[rule.set] = names, variants
    layers: Any = None
    if any(one != BASE for one in names):
        layers = {"variants": {key: one for key, one in variants.items() if key in names}, "pattern": pattern_of(names)}
    reading.put(f"{rule.set}.layers", Scalar(None, span))
    if layers is not None:
        reading.put(f"{rule.set}.layers", node_of(layers, span))


def _variants(tree: Tree, rule: FieldConfig, before: dict[str, Any]) -> dict[str, Any]:
    """The variants of the stack, those of earlier fields, and those that only the rule has."""
    node: Any = tree.items["graph"]
    for key in f"{rule.set}.layers.variants".split("."):
        node = node.items.get(key) if isinstance(node, Tree) else None
    own = node_of((rule.variants or {}) | before, tree.span)
    assert isinstance(own, Tree)
    found = plain(merge(own, node) if isinstance(node, Tree) else own)
    assert isinstance(found, dict)
    return found


def _at(variant: str | Mapping[str, str], layer: int, before: str) -> str:
    """The variant of a layer type at that place, if an earlier field gave the layer another one."""
    if isinstance(variant, str):
        return variant
    return next(variant[key] for key in (str(layer), before, "rest") if key in variant)


def listing_of(rules: Mapping[str, FieldConfig], stack: str) -> str | None:
    """The field that lists the types of a stack's layers, if there is one."""
    return next((name for name, rule in rules.items() if rule.layers is not None and rule.set == stack), None)


def _counted(number: Any, rule: FieldConfig, n_layers: int) -> list[str]:
    """The variants of layers if the first `number` of them differ from the others, or every `number`-th."""
    others, number = rule.others or BASE, number or 0
    if type(number) is not int or number < 0:
        raise Invalid("", f"{quoted(str(number))} is not a number of layers")
    if rule.first is not None:
        return [rule.first if i < number else others for i in range(n_layers)]
    assert rule.every is not None
    return [rule.every if number and (i + 1) % number == 0 else others for i in range(n_layers)]


def _spelt_out(value: Any) -> list[Any]:
    """A list of types; `[[[a, b], 12]]` is a, b, a, b ... 24 in all."""
    if not isinstance(value, list):
        raise Invalid("", f"a list of layer types is needed, not {quoted(str(value))}")
    if value and all(isinstance(one, list) and len(one) == 2 and isinstance(one[0], list) for one in value):
        return [one for cycle, times in value for _ in range(times) for one in cycle]
    return value


def cycled(types: list[Any] | None, n: int) -> list[Any]:
    """The types of `n` layers: the list repeated as often as needed."""
    return [types[i % len(types)] for i in range(n)] if types else []


def value_at(tree: Tree, path: str) -> Any:
    """A value of a spec by its path from the graph."""
    node: Any = tree.items["graph"]
    for key in path.split("."):
        node = node.items[key]
    return plain(node)


def pattern_of(names: Sequence[str]) -> Any:
    """The shortest text that arranges layers in this way: a cycle with counts, or ranges and the rest."""
    n = len(names)
    length = next(k for k in range(1, n + 1) if all(names[i] == names[i % k] for i in range(n)))
    runs = [(name, len(list(run))) for name, run in groupby(names[:length])]
    if length == n and len(runs) == 2:
        (first, count), (rest, _) = runs
        return {"0" if count == 1 else f"0-{count - 1}": first, "rest": rest}
    return [name if times == 1 else f"{name}*{times}" for name, times in runs]


def write(names: Sequence[str], rule: FieldConfig) -> Any:
    """The field's value for layers of these variants; raises `Invalid`."""
    if rule.first is not None:
        count = next((i for i, name in enumerate(names) if name != rule.first), len(names))
        if any(name != (rule.others or BASE) for name in names[count:]):
            raise Invalid("", f"only the first layers can be {quoted(rule.first)}")
        return count
    if rule.every is not None:
        count = next((i + 1 for i, name in enumerate(names) if name == rule.every), 0)
        if list(names) != _counted(count, rule, len(names)):
            raise Invalid("", f"only every n-th layer can be {quoted(rule.every)}")
        return count
    rules = reversed((rule.layers or {}).items())
    types = {name: type for type, one in rules for name in ([one] if isinstance(one, str) else one.values())}
    if unknown := [name for name in names if name not in types]:
        raise Invalid("", f"the family has no type for layers of variant {quoted(unknown[0])}")
    found = [int(types[name]) if types[name].isdecimal() else types[name] for name in names]
    counted = bool(rule.default) and isinstance(rule.default[0], tuple)
    return [[found, 1]] if counted else found
