"""Lists of layer types in a config.json, and the pattern of a spec's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tfkit.errors import Invalid, listing, quoted
from tfkit.spec.checkpoint import FieldConfig
from tfkit.spec.source import plain
from tfkit.spec.tree import Mapping as Tree
from tfkit.spec.tree import Scalar, node_of

if TYPE_CHECKING:
    from tfkit.checkpoint.fields import Reading

BASE = "base"


def read(reading: Reading, name: str, rule: FieldConfig) -> None:
    """Set the pattern of the stack at `rule.set`, and take out the variants that it does not use."""
    from tfkit.checkpoint.fields import case_of

    assert isinstance(rule.set, str)
    node = reading.node(name)
    n_layers = value_at(reading.tree, f"{rule.set}.n_layers")
    if rule.first is not None:
        count = plain(node) or 0
        names = [rule.first if i < count else BASE for i in range(n_layers)]
    else:
        given = [case_of(one) for one in _spelt_out(plain(node))]
        types = rule.layers or {}
        if unknown := [one for one in given if one not in types]:
            raise Invalid("", f"unknown type of layer {quoted(unknown[0])}", notes=[f"it can be {listing(types)}"])
        names = [_at(types[given[i % len(given)]], i) for i in range(n_layers)] if given else []
    layers: Any = None
    if any(one != BASE for one in names):
        variants = value_at(reading.tree, f"{rule.set}.layers.variants")
        layers = {"variants": {key: one for key, one in variants.items() if key in names}, "pattern": pattern_of(names)}
    reading.put(f"{rule.set}.layers", Scalar(None, node.span))
    if layers is not None:
        reading.put(f"{rule.set}.layers", node_of(layers, node.span))


def _at(variant: str | Mapping[str, str], layer: int) -> str:
    """The variant that a type of layer has at that place."""
    return variant if isinstance(variant, str) else variant.get(str(layer), variant["rest"])


def _spelt_out(value: Any) -> list[Any]:
    """A list of types; `[[[a, b], 12]]` is a, b, a, b ... 24 in all."""
    if not isinstance(value, list):
        raise Invalid("", f"a list of layer types is needed, not {quoted(str(value))}")
    if value and all(isinstance(one, list) and len(one) == 2 and isinstance(one[0], list) for one in value):
        return [one for cycle, times in value for _ in range(times) for one in cycle]
    return value


def value_at(tree: Tree, path: str) -> Any:
    """A value of a spec by its path from the graph."""
    node: Any = tree.items["graph"]
    for key in path.split("."):
        node = node.items[key]
    return plain(node)


def pattern_of(names: Sequence[str]) -> Any:
    """The shortest text that arranges layers so: a cycle with counts, or ranges and the rest."""
    n = len(names)
    length = next(k for k in range(1, n + 1) if all(names[i] == names[i % k] for i in range(n)))
    runs = [(name, len(list(run))) for name, run in groupby(names[:length])]
    if length == n and len(runs) == 2:
        (first, count), (rest, _) = runs
        return {"0" if count == 1 else f"0-{count - 1}": first, "rest": rest}
    return [name if times == 1 else f"{name}*{times}" for name, times in runs]


def write(names: Sequence[str], rule: FieldConfig) -> Any:
    """What the field says for layers of these variants; raises `Invalid`."""
    if rule.first is not None:
        count = next((i for i, name in enumerate(names) if name != rule.first), len(names))
        if any(name != BASE for name in names[count:]):
            raise Invalid("", f"only the first layers can be {quoted(rule.first)}")
        return count
    rules = reversed((rule.layers or {}).items())
    types = {name: type for type, one in rules for name in ([one] if isinstance(one, str) else one.values())}
    if unknown := [name for name in names if name not in types]:
        raise Invalid("", f"the family has no type for layers of variant {quoted(unknown[0])}")
    return [int(types[name]) if types[name].isdecimal() else types[name] for name in names]
