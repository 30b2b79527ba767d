"""Lists in a config.json with a number for each layer, and the values of the spec's layer variants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfkit.checkpoint.config_json import layer_types
from tfkit.checkpoint.config_json.reading import Reading
from tfkit.errors import Invalid, listing, quoted
from tfkit.spec.checkpoint import FieldConfig
from tfkit.spec.source import plain
from tfkit.spec.tree import node_of


def read(reading: Reading, name: str, rule: FieldConfig) -> None:
    """Set the number of each variant, shared by all its layers; where it is 0, the layer is of another variant."""
    assert isinstance(rule.set, str)
    assert rule.each is not None
    node = reading.node(name)
    numbers = plain(node)
    if numbers is None:
        return
    n_layers = layer_types.n_layers_of(reading, rule.set)
    if n_layers is None:
        return
    sound = isinstance(numbers, list) and all(type(number) in (int, float) for number in numbers)
    if not sound or len(numbers) != n_layers:
        raise Invalid("", f"needs a list with a number for each of the {n_layers} layers")
    names, variants = reading.stacks.get(rule.set, ([layer_types.BASE] * n_layers, {}))
    if rule.zero is not None:
        names = [rule.zero.get(one, one) if number == 0 else one for one, number in zip(names, numbers, strict=True)]
        layer_types.put(reading, rule, names, variants, node.span)
    for variant, path in rule.each.items():
        here = {number for one, number in zip(names, numbers, strict=True) if one == variant}
        if len(here) > 1:
            said = listing(map(str, sorted(here)))
            raise Invalid("", f"layers of variant {quoted(variant)} must not differ here: {said}")
        for number in here:
            reading.put(path, node_of(number, node.span))


def write(names: Sequence[str], rule: FieldConfig, value: Callable[[str], Any]) -> list[Any]:
    """The field's value for layers of these variants; `value` gives the spec's value at a path. Raises `Invalid`."""
    assert rule.each is not None
    zeros = set((rule.zero or {}).values())
    if unknown := [one for one in names if one not in zeros and one not in rule.each]:
        raise Invalid("", f"the family has no number for layers of variant {quoted(unknown[0])}")
    numbers = {one: 0 if one in zeros else value(rule.each[one]) for one in set(names)}
    return [numbers[one] for one in names]
