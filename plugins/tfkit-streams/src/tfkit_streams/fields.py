"""Fields of config.json in Gemma 3n and 4: layers that share keys, sizes of some layers, layer features, experts."""

from __future__ import annotations

from typing import Any, Literal

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


def _is_set(name: str, file: Reading) -> bool:
    """Return the value of a field that must be true or false."""
    value = file.value(name)
    if type(value) is not bool:
        raise tfkit.Invalid("", f"`{name}` must be true or false; got `{value}`")
    return value


class KeysAsValuesConfig(FieldConfig):
    """True if the values of the layers of a variant are their keys: `{keys_as_values: full, at: decoder}`.

    Otherwise, these layers have the number of key-value heads of the other layers, unless a later field sets it.
    """

    kind: Literal["keys_as_values"] = "keys_as_values"
    keys_as_values: str
    """The variant."""
    at: str
    """The path of the stack."""

    def read(self, name: str, file: Reading) -> None:
        attention, is_set = _attention(self.at, self.keys_as_values), _is_set(name, file)
        if is_set or file.at(f"{attention}.values") is not None:
            file.put(f"{attention}.values", "keys" if is_set else None)
        if file.at(f"{attention}.n_kv_heads") is not None:
            file.put(f"{attention}.n_kv_heads", file.at(f"{self.at}.attention.n_kv_heads"))

    def write(self, name: str, file: Writing) -> None:
        file.put(name, file.says(f"{_attention(self.at, self.keys_as_values)}.values", "keys"))


class DoubledConfig(FieldConfig):
    """True if some layers have FFNs of twice the width: `{doubled: [path, path], of: decoder.ffn}`."""

    kind: Literal["doubled"] = "doubled"
    doubled: tuple[str, ...]
    """The paths of the FFNs of these layers."""
    of: str
    """The path of the FFN of the other layers."""

    def read(self, name: str, file: Reading) -> None:
        width, doubles = file.at(f"{self.of}.d_ff"), _is_set(name, file)
        for path in filter(file.reaches, (f"{ffn}.d_ff" for ffn in self.doubled)):
            file.put(path, 2 * width if doubles and type(width) is int else width)

    def write(self, name: str, file: Writing) -> None:
        width = _dense_width(file, self.of)
        widths = {number for ffn in self.doubled if type(number := _dense_width(file, ffn)) is int}
        if not widths <= {width} and widths != {2 * width}:
            raise tfkit.Invalid("", f"the widths of layers that share keys must be {width}, or all {2 * width}")
        file.put(name, widths == {2 * width})


class DenseWidthConfig(FieldConfig):
    """The width of an FFN, or of the shared experts that it becomes with `mixture`: `{dense_width: decoder.ffn}`."""

    kind: Literal["dense_width"] = "dense_width"
    dense_width: str
    """The path of the FFN."""

    def read(self, name: str, file: Reading) -> None:
        width = file.value(name)
        if type(width) is not int:
            raise tfkit.Invalid("", f"`{name}` must be an integer; got `{width}`")
        file.put(f"{self.dense_width}.d_ff", width)

    def write(self, name: str, file: Writing) -> None:
        file.put(name, _dense_width(file, self.dense_width))


def _dense_width(file: Writing, ffn: str) -> Any:
    """Return the width of an FFN; of a mixture of experts, the width of its shared experts."""
    shared = file.value(f"{ffn}.shared.d_ff")
    return shared if isinstance(shared, int) else file.value(f"{ffn}.d_ff")


class MixtureConfig(FieldConfig):
    """True if the FFN of each layer becomes the shared experts of a mixture, as in Gemma 4: `{mixture: decoder}`.

    Each branch has a norm before and after it, and the router takes the residual stream. Later fields set the numbers
    and the width of the experts.
    """

    kind: Literal["mixture"] = "mixture"
    mixture: str
    """The path of the stack."""

    def read(self, name: str, file: Reading) -> None:
        if not _is_set(name, file):
            return
        stack, norm = self.mixture, file.at("norm")
        variants = file.at(f"{stack}.layers.variants") or {}
        ffn = file.at(f"{stack}.ffn")
        for variant, changes in variants.items():
            if "ffn" in changes:
                file.put(f"{stack}.layers.variants.{variant}.ffn.shared.d_ff", changes["ffn"]["d_ff"])
        router = {"norm": norm, "logit_scale": "d_model ** -0.5", "renormalize": True, "expert_scale": True}
        shared = {"d_ff": ffn["d_ff"], "norm_in": norm, "norm_out": norm}
        mixture = {"activation": _activation(ffn), "norm_in": norm, "norm_out": norm, "router": router}
        file.put(f"{stack}.ffn", {"kind": "moe", **mixture, "shared": shared})
        steps = [step if isinstance(step, dict) else {"sublayer": step} for step in file.at(f"{stack}.sublayers")]
        file.put(
            f"{stack}.sublayers", [{**step, "norm_in": False} if step["sublayer"] == "ffn" else step for step in steps]
        )
        file.put("requires", ["tfkit-moe", "tfkit-streams"])

    def write(self, name: str, file: Writing) -> None:
        file.put(name, file.says(f"{self.mixture}.ffn", "moe"))


GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
"""Activations of the gated FFNs that have a separate name."""


def _activation(ffn: dict[str, Any]) -> Any:
    """Return the activation of a gated FFN."""
    approximate = {key: ffn[key] for key in ("approximate",) if key in ffn}
    return ffn["activation"] if "activation" in ffn else {"kind": GATES[ffn["kind"]], **approximate}


KV_HEADS = "num_key_value_heads"


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
            values = [sizes.get(number, {}).get(size, file.value(size)) for number in numbers]
            if any(value != values[0] for value in values):
                raise tfkit.Invalid("", f"`{size}` must be equal in layers with full attention; got {values}")
            if any(type(value) is not int for value in values):
                raise tfkit.Invalid("", f"`{size}` must be an integer; got `{values[0]}`")
            for path in filter(file.reaches, paths if numbers else ()):
                file.put(path, values[0])

    def write(self, name: str, file: Writing) -> None:
        """Write all sizes if no other field has the number of key-value heads: if values have a projection."""
        attention = _attention(self.at, self.variants[0])
        sizes = {size: file.value(paths[0]) for size, paths in self.layer_sizes.items()}
        differs = isinstance(sizes[KV_HEADS], int) and sizes[KV_HEADS] != file.compute(KV_HEADS)
        if differs and not file.says(f"{attention}.values", "keys"):
            file.put(name, {str(i): sizes for i, layer in enumerate(file.layers(self.at)) if layer in self.variants})


class FeatureWidthConfig(FieldConfig):
    """The width of the features of a layer, which are in one table for all layers."""

    kind: Literal["feature_width"] = "feature_width"
    feature_width: str
    """The path of the table."""
    layers: str
    """The field with the number of layers."""
    without: dict[str, Any] | None = None
    """Changes of the spec by path for models without features, which have the width 0; by default, the family has no
    such models."""

    def read(self, name: str, file: Reading) -> None:
        width, n_layers = file.value(name), file.value(self.layers)
        if self.without is not None and type(width) is int and width == 0:
            for path, changed in self.without.items():
                file.put(path, changed)
            return
        if type(width) is not int or width < 1:
            expected = "a positive integer: the family has" if self.without is None else "0, or the number of"
            raise tfkit.Invalid("", f"`{name}` must be {expected} features in each layer; got {width}")
        file.put("d_features", width)
        if type(n_layers) is int:
            file.put(self.feature_width, {"d_model": n_layers * width, "scale": width**0.5})

    def write(self, name: str, file: Writing) -> None:
        features = file.value("d_features")
        file.put(name, features if isinstance(features, int) else 0)


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
