"""Fields of config.json in Gemma 3n and 4: layers that share keys, sizes of some layers, and layer features."""

from __future__ import annotations

from typing import Literal

import tfkit
from tfkit import FieldConfig, Reading, Writing


class SharedLayersConfig(FieldConfig):
    """The number of layers at the end that take keys and values of earlier layers with the same type."""

    kind: Literal["shared_layers"] = "shared_layers"
    shared_layers: dict[str, str]
    """The variant of these layers, by the variant of an earlier field, which has a `kv_name` if layers take it."""
    last: str | None = None
    """The variant of the last layer before this field, for any type in the file."""
    at: str
    """The path of the stack."""

    def read(self, name: str, file: Reading) -> None:
        number, layers = file.value(name), file.layers(self.at)
        if layers is None:
            return
        first = len(layers) - number if type(number) is int else -1
        if not 0 < first <= len(layers):
            message = f"`{name}` must be an integer from 0 to {len(layers) - 1}; got {number}"
            raise tfkit.Invalid("", message)
        names = [*layers[:-1], self.last or layers[-1]]
        if missing := set(names[first:]) - set(names[:first]):
            message = f"the last {number} layers take keys of earlier layers of their type"
            raise tfkit.Invalid("", f"{message}, but no layer before them is of variant `{min(missing)}`")
        names[first:] = [self.shared_layers[variant] for variant in names[first:]]
        file.arrange(self.at, names)
        for variant, shared in self.shared_layers.items():
            wire = file.variants(self.at)[shared]["attention"]["kv_from"]
            file.put(_attention(self.at, variant) + ".kv_name", wire if shared in names else None)

    def write(self, name: str, file: Writing) -> None:
        layers, shared = file.layers(self.at), self.shared_layers.values()
        file.put(name, sum(variant in shared for variant in layers))


def _attention(stack: str, variant: str) -> str:
    """Return the path of the attention of a variant."""
    return f"{stack}.attention" if variant == "base" else f"{stack}.layers.variants.{variant}.attention"


class DoubledConfig(FieldConfig):
    """True if some layers have twice the width of the others: `{doubled: [path, path], of: decoder.ffn.d_ff}`."""

    kind: Literal["doubled"] = "doubled"
    doubled: tuple[str, ...]
    """The path of the width in each variant with these layers."""
    of: str
    """The path of the width in the other layers."""

    def read(self, name: str, file: Reading) -> None:
        width, doubles = file.at(self.of), file.value(name)
        if type(doubles) is not bool:
            raise tfkit.Invalid("", f"`{name}` must be true or false; got `{doubles}`")
        for path in filter(file.reaches, self.doubled):
            file.put(path, 2 * width if doubles and type(width) is int else width)

    def write(self, name: str, file: Writing) -> None:
        width = file.value(self.of)
        widths = {number for path in self.doubled if type(number := file.value(path)) is int}
        if not widths <= {width} and widths != {2 * width}:
            raise tfkit.Invalid("", f"the widths of layers that share keys must be {width}, or all {2 * width}")
        file.put(name, widths == {2 * width})


class LayerSizesConfig(FieldConfig):
    """A mapping with different sizes for some layers, by number. It precedes the field for all of these layers."""

    kind: Literal["layer_sizes"] = "layer_sizes"
    layer_sizes: dict[str, tuple[str, ...]]
    """The paths of each size in the variants of these layers."""
    variants: tuple[str, ...]
    """The variants."""
    at: str
    """The path of the stack."""

    def read(self, name: str, file: Reading) -> None:
        sizes, layers = file.present(name).get(""), file.layers(self.at)
        if sizes is None or layers is None:
            return
        numbers = [str(i) for i, variant in enumerate(layers) if variant in self.variants]
        unknown = sorted(sizes.keys() - set(numbers)) if isinstance(sizes, dict) else []
        if not isinstance(sizes, dict) or unknown:
            which = f"layer {unknown[0]}" if unknown else f"`{sizes}`"
            raise tfkit.Invalid("", f"only layers with full attention can have other sizes; got {which}")
        for number, layer in sizes.items():
            if not isinstance(layer, dict):
                raise tfkit.Invalid("", f"the sizes of layer {number} must be a mapping; got `{layer}`")
            if further := sorted(layer.keys() - self.layer_sizes.keys()):
                raise tfkit.Invalid("", f"`{further[0]}` must be equal in all layers")
        for size, paths in self.layer_sizes.items():
            values = {sizes.get(number, {}).get(size, file.value(size)) for number in numbers}
            if len(values) > 1:
                raise tfkit.Invalid("", f"`{size}` must be equal in layers with full attention; got {sorted(values)}")
            for path in filter(file.reaches, paths):
                file.put(path, values.copy().pop())

    def write(self, name: str, file: Writing) -> None:
        """Write nothing: one field has the size for all of these layers."""


class FeatureWidthConfig(FieldConfig):
    """The width of the features of a layer, which are in one table for all layers."""

    kind: Literal["feature_width"] = "feature_width"
    feature_width: str
    """The path of the table."""
    layers: str
    """The field with the number of layers."""

    def read(self, name: str, file: Reading) -> None:
        width, n_layers = file.value(name), file.value(self.layers)
        if type(width) is not int or width < 1:
            message = f"`{name}` must be a positive integer: the family has features in each layer; got {width}"
            raise tfkit.Invalid("", message)
        file.put("d_features", width)
        if type(n_layers) is int:
            file.put(self.feature_width, {"d_model": n_layers * width, "scale": width**0.5})

    def write(self, name: str, file: Writing) -> None:
        file.put(name, file.value("d_features"))


class EqualConfig(FieldConfig):
    """A number, or a list of one number for each layer, all equal: `{equal: decoder.ffn.d_ff}`."""

    kind: Literal["equal"] = "equal"
    equal: str
    """The path of the number."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return (self.equal,)

    def read(self, name: str, file: Reading) -> None:
        value = file.value(name)
        numbers = value if isinstance(value, list) else [value]
        if any(type(number) is not int for number in numbers) or len(set(numbers)) != 1:
            raise tfkit.Invalid("", f"`{name}` must be an integer, or equal integers; got {value}")
        file.put(self.equal, numbers[0])

    def write(self, name: str, file: Writing) -> None:
        file.put(name, file.value(self.equal))


class SparsityConfig(FieldConfig):
    """A list with a fraction for each layer: `{sparsity: decoder.ffn.sparsity, at: decoder}`."""

    kind: Literal["sparsity"] = "sparsity"
    sparsity: str
    """The path of the fractions of the first layers."""
    at: str
    """The path of the stack."""

    def read(self, name: str, file: Reading) -> None:
        layers, fractions = file.layers(self.at), file.value(name)
        if layers is None:
            return
        if fractions is None:
            fractions = [0.95] * 10 if len(layers) > 10 else []
        elif not isinstance(fractions, list) or len(fractions) != len(layers):
            raise tfkit.Invalid("", f"`{name}` must be a list with a fraction for each of the {len(layers)} layers")
        n_sparse = max((i + 1 for i, fraction in enumerate(fractions) if fraction), default=0)
        file.put(self.sparsity, fractions[:n_sparse])

    def write(self, name: str, file: Writing) -> None:
        n_layers, fractions = len(file.layers(self.at)), list(file.value(self.sparsity))
        file.put(name, (fractions + [0.0] * n_layers)[:n_layers])
