"""Fields that say which layers of a stack differ: lists of types, and numbers of layers."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal

from tfkit.component import FieldConfig, Reading, Writing, case_of, value_of
from tfkit.errors import Invalid, listing, quoted

BASE, REST = "base", "rest"


class LayerTypesConfig(FieldConfig):
    """A list with the type of each layer, for their variants; a list that is shorter repeats."""

    kind: Literal["layer_types"] = "layer_types"
    layer_types: dict[str, str | dict[str, str]]
    """The variant for each type, the usual one first; or one for some layers of the type and one for the rest
    (`{0: first, rest: base}`), or one for each variant that an earlier list gave them (`{base: dense, full: dense_full,
    rest: dense}`)."""
    at: str
    """The path of the stack."""

    @property
    def lists(self) -> str:
        return self.at

    def check(self) -> None:
        """Refuse a type with variants for some of its layers only."""
        super().check()
        for type, variant in self.layer_types.items():
            if not isinstance(variant, str) and REST not in variant:
                message = "`rest` is missing: the variant of the other layers of that type"
                raise Invalid(f"layer_types.{type}", message)

    def read(self, name: str, file: Reading) -> None:
        value = file.value(name)
        before = None if value is None else file.layers(self.at)  # without a list, a number gives them
        if before is None:
            return
        if not isinstance(value, list):
            raise Invalid("", f"a list of layer types is needed, not {quoted(str(value))}")
        given = [case_of(one) for one in spelt_out(value)]
        if not given:
            message = "the list of layer types is empty" if file.given(name) else f"{quoted(name)} is missing"
            raise Invalid("", message, help="name the type of each layer")
        types = self.layer_types
        if unknown := [one for one in given if one not in types]:
            raise Invalid("", f"unknown layer type {quoted(unknown[0])}", notes=[f"it can be {listing(types)}"])
        names = _cycled(given, len(before))
        file.arrange(self.at, [_variant(types[one], i, before[i]) for i, one in enumerate(names)])

    def pass_over(self, name: str, file: Reading) -> None:
        given, usual = spelt_out(file.given(name).get("")), next(iter(self.layer_types))
        others = [one for one in given if one != usual] if isinstance(given, list) else []
        if others:
            message = f"{quoted(name)} has {quoted(case_of(others[0]))}, but other fields say that every layer is alike"
            raise Invalid("", message, help="make them agree: classes of transformers differ in which they believe")

    def write(self, name: str, file: Writing) -> None:
        names, default = file.layers(self.at), file.default(name)
        types: dict[str, str] = {}
        for type, one in reversed(self.layer_types.items()):
            types |= dict.fromkeys([one] if isinstance(one, str) else one.values(), type)
        if unknown := [name for name in names if name not in types]:
            raise Invalid("", f"the family has no type for layers of variant {quoted(unknown[0])}")
        found = [value_of(types[name]) for name in names]
        said = [[found, 1]] if default and isinstance(default[0], tuple) else found
        if said != _cycled(default or [], len(said)):
            file.put(name, said)


class CountConfig(FieldConfig):
    """Fields of the kinds that give layers by a number."""

    at: str
    """The path of the stack."""

    @property
    def refines(self) -> bool:
        """True if the variant of a layer depends on the one that an earlier field gave it."""
        return False

    def names(self, number: int, before: Sequence[str]) -> list[str]:
        """The variant of each layer if the field is that number; `before` are those of earlier fields."""
        raise NotImplementedError

    def before(self, names: Sequence[str]) -> list[str]:
        """The variants of earlier fields from which this one makes those in `names`."""
        return [BASE] * len(names)

    def count(self, names: Sequence[str]) -> int:
        """The number that these layers suggest; `names` tells if it is right."""
        raise NotImplementedError

    def read(self, name: str, file: Reading) -> None:
        number = file.value(name) or 0
        skipped = file.listed(self.at) and not self.refines  # a list gives each layer
        layers = None if skipped else file.layers(self.at)
        if layers is None:
            return
        if type(number) is not int or number < 0:
            raise Invalid("", f"{quoted(str(number))} is not a number of layers")
        file.arrange(self.at, self.names(number, layers))

    def write(self, name: str, file: Writing) -> None:
        if file.listed(self.at) and not self.refines:
            return
        layers = file.layers(self.at)
        number = self.count(layers)
        if self.names(number, self.before(layers)) != layers:
            raise Invalid("", f"no value of {quoted(name)} expresses the variants of the layers")
        file.put(name, number)


class FirstLayersConfig(CountConfig):
    """The number of layers at the beginning that are of another variant: `{first_layers: dense, at: decoder}`."""

    kind: Literal["first_layers"] = "first_layers"
    first_layers: str | tuple[str, str] | dict[str, str]
    """Their variant; or theirs and that of the others, which is `base` unless given; or the variant of each by the one
    that an earlier field gave it, `{base: dense, full: dense_full}`, where the others stay as they are."""

    @property
    def refines(self) -> bool:
        return isinstance(self.first_layers, dict)

    def names(self, number: int, before: Sequence[str]) -> list[str]:
        if isinstance(self.first_layers, dict):
            return _refined(before, range(number), self.first_layers)
        first, others = _pair(self.first_layers)
        return [first if i < number else others for i in range(len(before))]

    def before(self, names: Sequence[str]) -> list[str]:
        return _unrefined(names, self.first_layers) if isinstance(self.first_layers, dict) else super().before(names)

    def count(self, names: Sequence[str]) -> int:
        table = self.first_layers
        first = set(table.values()) if isinstance(table, dict) else {_pair(table)[0]}
        return next((i for i, one in enumerate(names) if one not in first), len(names))


class EveryNthConfig(CountConfig):
    """The n of every n-th layer that is of another variant: `{every_nth: full, at: decoder}`."""

    kind: Literal["every_nth"] = "every_nth"
    every_nth: str | tuple[str, str]
    """Their variant; or theirs and that of the others, which is `base` unless given."""

    def names(self, number: int, before: Sequence[str]) -> list[str]:
        nth, others = _pair(self.every_nth)
        return [nth if number and (i + 1) % number == 0 else others for i in range(len(before))]

    def count(self, names: Sequence[str]) -> int:
        nth, _ = _pair(self.every_nth)
        return next((i + 1 for i, one in enumerate(names) if one == nth), 0)


class LayerNumbersConfig(FieldConfig):
    """A list with the numbers of the layers that differ: `{layer_numbers: {base: dense}, at: decoder}`."""

    kind: Literal["layer_numbers"] = "layer_numbers"
    layer_numbers: dict[str, str]
    """Their variant by the one that an earlier field gave them."""
    at: str
    """The path of the stack."""

    def read(self, name: str, file: Reading) -> None:
        numbers, layers = file.value(name) or [], file.layers(self.at)
        if layers is None:
            return
        if not isinstance(numbers, list) or any(type(one) is not int or one < 0 for one in numbers):
            raise Invalid("", f"{quoted(str(numbers))} is not a list with numbers of layers")
        file.arrange(self.at, _refined(layers, numbers, self.layer_numbers))

    def write(self, name: str, file: Writing) -> None:
        differ = self.layer_numbers.values()
        file.put(name, [i for i, one in enumerate(file.layers(self.at)) if one in differ])


class PerLayerConfig(FieldConfig):
    """A list with a number for each layer, the same for all layers of a variant."""

    kind: Literal["per_layer"] = "per_layer"
    per_layer: dict[str, str | dict[str, str]]
    """The path of each variant's number; or, where a 0 stands for another variant, `{0: nope, rest: path}`."""
    at: str
    """The path of the stack."""

    @property
    def paths(self) -> dict[str, str]:
        """The path of each variant's number."""
        return {name: one if isinstance(one, str) else one[REST] for name, one in self.per_layer.items()}

    @property
    def zeros(self) -> dict[str, str]:
        """The variants that layers of other variants become where their number is 0."""
        return {name: one["0"] for name, one in self.per_layer.items() if not isinstance(one, str)}

    def check(self) -> None:
        """Refuse a variant without a path."""
        super().check()
        for variant, one in self.per_layer.items():
            if not isinstance(one, str) and one.keys() != {"0", REST}:
                raise Invalid(f"per_layer.{variant}", "write a path, or `{0: variant, rest: path}`")

    def read(self, name: str, file: Reading) -> None:
        numbers = file.value(name)
        names = None if numbers is None else file.layers(self.at)
        if names is None:
            return
        sound = isinstance(numbers, list) and all(type(number) in (int, float) for number in numbers)
        if not sound or len(numbers) != len(names):
            raise Invalid("", f"needs a list with a number for each of the {len(names)} layers")
        if self.zeros:
            pairs = zip(names, numbers, strict=True)
            names = [self.zeros.get(one, one) if number == 0 else one for one, number in pairs]
            file.arrange(self.at, names)
        for variant, path in self.paths.items():
            here = {number for one, number in zip(names, numbers, strict=True) if one == variant}
            if len(here) > 1:
                said = listing(map(str, sorted(here)))
                raise Invalid("", f"layers of variant {quoted(variant)} must not differ here: {said}")
            for number in here:
                file.put(path, number)

    def write(self, name: str, file: Writing) -> None:
        names, paths, zeros = file.layers(self.at), self.paths, set(self.zeros.values())
        if unknown := [one for one in names if one not in zeros and one not in paths]:
            raise Invalid("", f"the family has no number for layers of variant {quoted(unknown[0])}")
        numbers = {one: 0 if one in zeros else file.value(paths[one]) for one in set(names)}
        file.put(name, [numbers[one] for one in names])


def _pair(variants: str | tuple[str, str]) -> tuple[str, str]:
    return (variants, BASE) if isinstance(variants, str) else variants


def _refined(before: Sequence[str], numbers: Container[int], table: Mapping[str, str]) -> list[str]:
    """The variants of layers, of which those with these numbers are changed as the table says."""
    return [table.get(one, one) if i in numbers else one for i, one in enumerate(before)]


def _unrefined(names: Sequence[str], table: Mapping[str, str]) -> list[str]:
    back = {new: old for old, new in table.items()}
    return [back.get(one, one) for one in names]


def _variant(variant: str | Mapping[str, str], layer: int, before: str) -> str:
    """The variant of a layer type at that place, if an earlier field gave the layer another one."""
    if isinstance(variant, str):
        return variant
    return next(variant[key] for key in (str(layer), before, REST) if key in variant)


def spelt_out(value: Any) -> Any:
    """A list in full: `[[[a, b], 12]]` is a, b, a, b ... 24 in all; other values are as they are."""
    listed = isinstance(value, list) and all(isinstance(one, list) and len(one) == 2 for one in value)
    if not listed or not all(isinstance(cycle, list) for cycle, _ in value):
        return value
    return [one for cycle, times in value for _ in range(times) for one in cycle]


def _cycled(types: Sequence[Any], n: int) -> list[Any]:
    """The types of `n` layers: the list repeated as often as needed."""
    return [types[i % len(types)] for i in range(n)] if types else []
