"""Fields that select the variants of a stack's layers: lists of types, and numbers of layers."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal

from tfkit.component import FieldConfig, Reading, Writing, case_of, value_of
from tfkit.errors import Invalid, listing, quoted

BASE, REMAINDER = "base", "rest"


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
        """Raise `Invalid` for a type with variants for only some of its layers."""
        super().check()
        for type, variant in self.layer_types.items():
            if not isinstance(variant, str) and REMAINDER not in variant:
                message = "`rest` is missing: the variant of the remaining layers of that type"
                raise Invalid(f"layer_types.{type}", message)

    def read(self, name: str, file: Reading) -> None:
        value = file.value(name)
        before = None if value is None else file.layers(self.at)  # without a list, a number gives them
        if before is None:
            return
        if not isinstance(value, list):
            raise Invalid("", f"the value must be a list of layer types; got {quoted(str(value))}")
        listed = [case_of(kind) for kind in spelt_out(value)]
        if not listed:
            message = "the list of layer types is empty" if file.present(name) else f"{quoted(name)} is missing"
            raise Invalid("", message, help="name the type of each layer")
        types = self.layer_types
        if unknown := [kind for kind in listed if kind not in types]:
            raise Invalid("", f"unknown layer type {quoted(unknown[0])}", notes=[f"allowed: {listing(types)}"])
        names = _cycled(listed, len(before))
        file.arrange(self.at, [_variant(types[kind], i, before[i]) for i, kind in enumerate(names)])

    def pass_over(self, name: str, file: Reading) -> None:
        listed, usual = spelt_out(file.present(name).get("")), next(iter(self.layer_types))
        unusual = [kind for kind in listed if kind != usual] if isinstance(listed, list) else []
        if unusual:
            message = f"{quoted(name)} has {quoted(case_of(unusual[0]))}, but other fields make all layers identical"
            raise Invalid(
                "", message, help="make the two fields agree: transformers classes differ in which field they use"
            )

    def write(self, name: str, file: Writing) -> None:
        names, default = file.layers(self.at), file.default(name)
        types: dict[str, str] = {}
        for type, variants in reversed(self.layer_types.items()):
            types |= dict.fromkeys([variants] if isinstance(variants, str) else variants.values(), type)
        if unknown := [name for name in names if name not in types]:
            raise Invalid("", f"the family has no type for layers of variant {quoted(unknown[0])}")
        values = [value_of(types[name]) for name in names]
        written = [[values, 1]] if default and isinstance(default[0], tuple) else values
        if written != _cycled(default or [], len(written)):
            file.put(name, written)


class CountConfig(FieldConfig):
    """Base class of kinds whose field is a number of layers."""

    at: str
    """The path of the stack."""

    @property
    def refines(self) -> bool:
        """True if the variant of a layer depends on the variant that an earlier field set."""
        return False

    def names(self, number: int, before: Sequence[str]) -> list[str]:
        """Return the variant of each layer if the field is `number`. Earlier fields set the variants `before`."""
        raise NotImplementedError

    def before(self, names: Sequence[str]) -> list[str]:
        """Return the variants that this field turns into `names`."""
        return [BASE] * len(names)

    def count(self, names: Sequence[str]) -> int:
        """Return the number that these layers suggest. `names` then shows if it reproduces them."""
        raise NotImplementedError

    def read(self, name: str, file: Reading) -> None:
        number = file.value(name) or 0
        skipped = file.listed(self.at) and not self.refines  # a list gives each layer
        layers = None if skipped else file.layers(self.at)
        if layers is None:
            return
        if type(number) is not int or number < 0:
            raise Invalid("", f"the value must be a number of layers; got {quoted(str(number))}")
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
    """Their variant; or their variant and the variant of the remaining layers, `base` by default; or the new variant
    by the variant that an earlier field gave, `{base: dense, full: dense_full}`. Other layers stay unchanged."""

    @property
    def refines(self) -> bool:
        return isinstance(self.first_layers, dict)

    def names(self, number: int, before: Sequence[str]) -> list[str]:
        if isinstance(self.first_layers, dict):
            return _refined(before, range(number), self.first_layers)
        first, rest = _pair(self.first_layers)
        return [first if i < number else rest for i in range(len(before))]

    def before(self, names: Sequence[str]) -> list[str]:
        if not isinstance(self.first_layers, dict):
            return super().before(names)
        former = {new: old for old, new in self.first_layers.items()}
        return [former.get(variant, variant) for variant in names]

    def count(self, names: Sequence[str]) -> int:
        table = self.first_layers
        first = set(table.values()) if isinstance(table, dict) else {_pair(table)[0]}
        return next((i for i, variant in enumerate(names) if variant not in first), len(names))


class EveryNthConfig(CountConfig):
    """The n of every n-th layer that is of another variant: `{every_nth: full, at: decoder}`."""

    kind: Literal["every_nth"] = "every_nth"
    every_nth: str | tuple[str, str]
    """Their variant; or their variant and the variant of the remaining layers, `base` by default."""
    offset: int = -1
    """Index of a layer from which they are counted in both directions; by default, -1: the first of them is the n-th
    layer."""

    def names(self, number: int, before: Sequence[str]) -> list[str]:
        nth, rest = _pair(self.every_nth)
        return [nth if number and (i - self.offset) % number == 0 else rest for i in range(len(before))]

    def count(self, names: Sequence[str]) -> int:
        indices = [i for i, variant in enumerate(names) if variant == _pair(self.every_nth)[0]]
        if self.offset < 0:
            return indices[0] - self.offset if indices else 0
        # With a single such layer, any number of layers that reaches beyond the last expresses it.
        return indices[1] - indices[0] if len(indices) > 1 else len(indices) * len(names)


class LayerNumbersConfig(FieldConfig):
    """A list with the numbers of the layers that differ: `{layer_numbers: {base: dense}, at: decoder}`."""

    kind: Literal["layer_numbers"] = "layer_numbers"
    layer_numbers: dict[str, str]
    """The variant of a layer, by the variant that an earlier field gave it."""
    at: str
    """The path of the stack."""

    def read(self, name: str, file: Reading) -> None:
        numbers, layers = file.value(name) or [], file.layers(self.at)
        if layers is None:
            return
        if not isinstance(numbers, list) or any(type(number) is not int or number < 0 for number in numbers):
            raise Invalid("", f"the value must be a list of layer numbers; got {quoted(str(numbers))}")
        file.arrange(self.at, _refined(layers, numbers, self.layer_numbers))

    def write(self, name: str, file: Writing) -> None:
        differ = self.layer_numbers.values()
        file.put(name, [i for i, variant in enumerate(file.layers(self.at)) if variant in differ])


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
        return {name: entry if isinstance(entry, str) else entry[REMAINDER] for name, entry in self.per_layer.items()}

    @property
    def zeros(self) -> dict[str, str]:
        """The variants that layers of other variants become where their number is 0."""
        return {name: entry["0"] for name, entry in self.per_layer.items() if not isinstance(entry, str)}

    def check(self) -> None:
        """Raise `Invalid` for a variant without a path."""
        super().check()
        for variant, entry in self.per_layer.items():
            if not isinstance(entry, str) and entry.keys() != {"0", REMAINDER}:
                raise Invalid(f"per_layer.{variant}", "the value must be a path, or `{0: variant, rest: path}`")

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
            names = [self.zeros.get(layer, layer) if number == 0 else layer for layer, number in pairs]
            file.arrange(self.at, names)
        for variant, path in self.paths.items():
            here = {number for layer, number in zip(names, numbers, strict=True) if layer == variant}
            if len(here) > 1:
                differing = listing(map(str, sorted(here)))
                raise Invalid("", f"layers of variant {quoted(variant)} must not differ here: {differing}")
            for number in here:
                file.put(path, number)

    def write(self, name: str, file: Writing) -> None:
        names, paths, zeros = file.layers(self.at), self.paths, set(self.zeros.values())
        if unknown := [layer for layer in names if layer not in zeros and layer not in paths]:
            raise Invalid("", f"the family has no number for layers of variant {quoted(unknown[0])}")
        numbers = {layer: 0 if layer in zeros else file.value(paths[layer]) for layer in set(names)}
        file.put(name, [numbers[layer] for layer in names])


def _pair(variants: str | tuple[str, str]) -> tuple[str, str]:
    return (variants, BASE) if isinstance(variants, str) else variants


def _refined(before: Sequence[str], numbers: Container[int], table: Mapping[str, str]) -> list[str]:
    """Return the variants of layers. The table changes the variants of the layers with these numbers."""
    return [table.get(variant, variant) if i in numbers else variant for i, variant in enumerate(before)]


def _variant(variant: str | Mapping[str, str], layer: int, before: str) -> str:
    """Return the variant of a layer of a type, which may depend on the variant that an earlier field set."""
    if isinstance(variant, str):
        return variant
    return next(variant[key] for key in (str(layer), before, REMAINDER) if key in variant)


def spelt_out(value: Any) -> Any:
    """Expand a list with counts: `[[[a, b], 12]]` is a, b, a, b ..., 24 items in total. Other values are unchanged."""
    listed = isinstance(value, list) and all(isinstance(item, list) and len(item) == 2 for item in value)
    if not listed or not all(isinstance(cycle, list) for cycle, _ in value):
        return value
    return [item for cycle, times in value for _ in range(times) for item in cycle]


def _cycled(types: Sequence[Any], n: int) -> list[Any]:
    """Repeat a list of layer types to the length `n`."""
    return [types[i % len(types)] for i in range(n)] if types else []
