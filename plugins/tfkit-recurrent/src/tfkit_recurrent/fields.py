"""Fields of config.json in hybrid models: derived widths, bounds, and periods of layers."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, Literal

import tfkit
from tfkit import FieldConfig, Reading, Writing

INFINITY = {"__float__": "Infinity"}
"""Representation of infinity in a config.json of transformers."""


class AdjustedWidthConfig(FieldConfig):
    """The width of an FFN before LFM2's adjustment: two thirds, times a factor, rounded up to a multiple."""

    kind: Literal["adjusted_width"] = "adjusted_width"
    adjusted_width: str
    """The path of the width after the adjustment."""
    older: str
    """The older name of the field, which is read first."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return (self.adjusted_width,)

    def read(self, name: str, file: Reading) -> None:
        width = file.present(self.older).get("", file.value(name))
        file.used([self.older])
        settings = {"auto_adjust_ff_dim": True, "multiple_of": 256, "ffn_dim_multiplier": 1.0} | file.present("block_")
        if settings["auto_adjust_ff_dim"]:
            multiple, factor = settings["multiple_of"], settings["ffn_dim_multiplier"]
            for key, number in ((name, width), ("block_multiple_of", multiple), ("block_ffn_dim_multiplier", factor)):
                if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
                    raise tfkit.Invalid("", f"`{key}` must be a positive number; got {number}")
            width = multiple * -(-int(factor * int(2 * width / 3)) // multiple)
        file.put(self.adjusted_width, width)

    def write(self, name: str, file: Writing) -> None:
        file.put(name, file.value(self.adjusted_width))


class BoundsConfig(FieldConfig):
    """A list of a minimum and a maximum: `{bounds: [path, path]}`; infinity is null in the spec."""

    kind: Literal["bounds"] = "bounds"
    bounds: tuple[str, str]
    """The paths of the minimum and of the maximum."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return self.bounds

    def read(self, name: str, file: Reading) -> None:
        bounds = file.value(name)
        if bounds is None:
            bounds = [0.0, INFINITY]
        if not isinstance(bounds, list) or len(bounds) != 2:
            raise tfkit.Invalid("", "the bounds must be a list of two numbers")
        smallest, largest = bounds
        for path, value in zip(self.bounds, (smallest, None if _is_infinite(largest) else largest), strict=True):
            if file.reaches(path):
                file.put(path, value)

    def write(self, name: str, file: Writing) -> None:
        smallest, largest = (file.value(path) for path in self.bounds)
        if not isinstance(smallest, int | float):
            return
        file.put(name, [smallest, INFINITY if largest is None else largest])


def _is_infinite(value: Any) -> bool:
    return value in (INFINITY, "Infinity", float("inf"))


class PeriodConfig(FieldConfig):
    """The period of layers of a different variant: `{period: {base: full}, offset: attn_layer_offset, at: decoder}`."""

    kind: Literal["period"] = "period"
    period: dict[str, str]
    """The variant of these layers, by the variant that an earlier field set or that the remaining layers have."""
    offset: str
    """The field with the number of the first of these layers."""
    at: str
    """The path of the stack."""

    def read(self, name: str, file: Reading) -> None:
        period, offset, layers = file.value(name), file.value(self.offset), file.layers(self.at)
        file.used([self.offset])
        if layers is None:
            return
        if type(period) is not int or type(offset) is not int or not 0 <= offset < period:
            message = f"`{name}` must be a number above `{self.offset}`, {offset}; got {period}"
            raise tfkit.Invalid("", message)
        names = [self.period[layer] if number % period == offset else layer for number, layer in enumerate(layers)]
        file.arrange(self.at, names)

    def write(self, name: str, file: Writing) -> None:
        layers, differing = file.layers(self.at), set(self.period.values())
        numbers = [(period, offset) for period in range(1, len(layers) + 2) for offset in range(period)]
        for period, offset in [(file.default(name), file.default(self.offset)), *numbers]:
            if all((number % period == offset) == (layer in differing) for number, layer in enumerate(layers)):
                file.put(name, period)
                file.put(self.offset, offset)
                return
        raise tfkit.Invalid("", f"no value of `{name}` expresses the variants of the layers")


class BlockTypesConfig(FieldConfig):
    """A list with the type of each layer that also gives the number of layers."""

    kind: Literal["block_types"] = "block_types"
    block_types: dict[str, str]
    """The variant for each type."""
    older: str
    """The older name of the field, which is a text with a letter for each layer."""
    letters: dict[str, str]
    """The type for each letter of this text."""
    at: str
    """The path of the stack."""

    @property
    def lists(self) -> str:
        return self.at

    def read(self, name: str, file: Reading) -> None:
        letters = file.present(self.older).get("")
        file.used([self.older])
        types = file.present(name).get("")
        if types is None and isinstance(letters, str):
            types = [self.letters.get(letter, letter) for letter in letters]
        types = file.value(name) if types is None else types
        if not isinstance(types, list) or not types:
            raise tfkit.Invalid("", "the types of the layers must be a list with a word for each layer")
        if unknown := [kind for kind in types if kind not in self.block_types]:
            raise tfkit.Invalid("", f"unknown layer type `{unknown[0]}`", notes=[f"allowed: {list(self.block_types)}"])
        file.put(f"{self.at}.n_layers", len(types))
        file.arrange(self.at, [self.block_types[kind] for kind in types])

    def write(self, name: str, file: Writing) -> None:
        types = {variant: kind for kind, variant in reversed(self.block_types.items())}
        file.put(name, [types[variant] for variant in file.layers(self.at)])


class DeltaLayersConfig(FieldConfig):
    """Kimi's mapping with the numbers of the attention layers, counted from 1; `layer_types` takes precedence."""

    kind: Literal["delta_layers"] = "delta_layers"
    delta_layers: tuple[str, str]
    """The variant of layers with attention, and the variant of the other layers."""
    sizes: dict[str, str]
    """The fields of the sizes in the mapping, by their names in it."""
    at: str
    """The path of the stack."""

    def read(self, name: str, file: Reading) -> None:
        entries, layers = file.present(name).get("", {}), file.layers(self.at)
        for size, twin in self.sizes.items():
            if entries.get(size, file.value(twin)) != file.value(twin):
                message = f"`{size}` is {entries[size]}, but `{twin}` is {file.value(twin)}"
                raise tfkit.Invalid("", message, help=f"add `{twin}`, or change it")
        if layers is None or file.value("layer_types") is not None:
            return
        full, linear = self.delta_layers
        numbers = entries.get("full_attn_layers", range(5, len(layers) + 1, 4))
        file.arrange(self.at, [full if i + 1 in numbers else linear for i in range(len(layers))])

    def write(self, name: str, file: Writing) -> None:
        """Write nothing, because other fields contain the types of the layers and the sizes."""


class ExpertCountConfig(FieldConfig):
    """The number of experts of an FFN; 0 for a dense FFN, as in the first spec of the family."""

    kind: Literal["expert_count"] = "expert_count"
    expert_count: str
    """The path of the FFN."""
    dense: dict[str, str]
    """The field with each size of the dense FFN, by the path of the size in the FFN."""
    experts: dict[str, Any]
    """The FFN with experts, without sizes."""
    sizes: dict[str, str]
    """The field with each size of the FFN with experts, by the path of the size in the FFN."""

    def read(self, name: str, file: Reading) -> None:
        count = file.value(name)
        if type(count) is not int or count < 0:
            raise tfkit.Invalid("", f"`{name}` must be an integer of at least 0; got {count}")
        if count:
            file.put(self.expert_count, {**self.experts, "n_experts": count})
        for path, field in (self.sizes if count else self.dense).items():
            file.put(f"{self.expert_count}.{path}", file.value(field))
        file.used([*self.dense.values(), *self.sizes.values()])

    def write(self, name: str, file: Writing) -> None:
        count = file.value(f"{self.expert_count}.n_experts")
        count = count if type(count) is int else 0
        file.put(name, count)
        for path, field in (self.sizes if count else self.dense).items():
            file.put(field, file.value(f"{self.expert_count}.{path}"))


class OptionalValueConfig(FieldConfig):
    """A value of the spec, and the number to write if the spec lacks it: `{optional_value: path, otherwise: 1}`."""

    kind: Literal["optional_value"] = "optional_value"
    optional_value: str
    """The path of the value."""
    otherwise: int
    """The number that the class in transformers accepts when the value is not used."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return (self.optional_value,)

    def read(self, name: str, file: Reading) -> None:
        file.solve(self.optional_value, file.value(name))

    def write(self, name: str, file: Writing) -> None:
        value = file.value(self.optional_value)
        file.put(name, value if type(value) is int else self.otherwise)


class ListedConfig(FieldConfig):
    """A list of numbers at several places: `{listed: [decoder.mixer.factors.gate, decoder.mixer.factors.x]}`."""

    kind: Literal["listed"] = "listed"
    listed: tuple[str, ...]
    """The path of each number. Null instead of a list represents factors of 1."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return self.listed

    def read(self, name: str, file: Reading) -> None:
        numbers = file.value(name)
        if numbers is None:
            numbers = [1.0] * len(self.listed)
        if not isinstance(numbers, list) or len(numbers) != len(self.listed):
            raise tfkit.Invalid("", f"`{name}` must be a list of {len(self.listed)} numbers")
        for path, number in zip(self.listed, numbers, strict=True):
            _put(file, path, number)

    def write(self, name: str, file: Writing) -> None:
        file.put(name, [_value(file, path) for path in self.listed])


class StepScaleConfig(FieldConfig):
    """A factor of a sublayer's addition: `{step_scale: decoder.sublayers.0}`."""

    kind: Literal["step_scale"] = "step_scale"
    step_scale: str | tuple[str, ...]
    """The path of the sublayer in the list of its stack or variant, or of several that share the factor."""
    factor: Literal["scale", "scale_onto"] = "scale"
    """The factor: of the output, or of the value that it is added to."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the sublayers."""
        return (self.step_scale,) if isinstance(self.step_scale, str) else self.step_scale

    def read(self, name: str, file: Reading) -> None:
        for path in self.paths:
            _put(file, path, file.value(name), self.factor)

    def write(self, name: str, file: Writing) -> None:
        factors = [_value(file, path, self.factor) for path in self.paths]
        present = [factor for factor in factors if factor is not None]
        if any(factor != present[0] for factor in present):
            raise tfkit.Invalid("", f"the factors of the sublayers must be equal; got {present}")
        if present:
            file.put(name, present[0])


class HasNormConfig(FieldConfig):
    """True for an RMSNorm with the `eps` of the field `rms_norm_eps`: `{has_norm: decoder.mixer.output_norm}`."""

    kind: Literal["has_norm"] = "has_norm"
    has_norm: str
    """The path of the norm."""

    def read(self, name: str, file: Reading) -> None:
        value = file.value(name)
        if not isinstance(value, bool | None):
            raise tfkit.Invalid("", f"`{name}` must be true or false; got `{value}`")
        file.put(self.has_norm, {"kind": "rmsnorm", "eps": file.value("rms_norm_eps")} if value else None)

    def write(self, name: str, file: Writing) -> None:
        file.put(name, file.value(self.has_norm) is not None)


class KeyFactorConfig(FieldConfig):
    """A factor of the keys, which multiplies the scale of the scores: `{key_factor: decoder.attention}`."""

    kind: Literal["key_factor"] = "key_factor"
    key_factor: str
    """The path of the attention."""

    def read(self, name: str, file: Reading) -> None:
        factor, width = file.compute(name), file.at(f"{self.key_factor}.d_head")
        if isinstance(width, int) and width > 0:  # otherwise an error of the field that gives it
            file.put(f"{self.key_factor}.scale", factor * width**-0.5)

    def write(self, name: str, file: Writing) -> None:
        scale, width = file.value(f"{self.key_factor}.scale"), file.value(f"{self.key_factor}.d_head")
        if scale is None:
            file.put(name, 1.0)
            return
        factor = float(scale * width**0.5)
        rounded = float(f"{factor:.12g}")  # the product may miss the factor by its last bit
        file.put(name, rounded if rounded * width**-0.5 == scale else factor)


def _put(file: Reading, path: str, number: Any, factor: str = "scale") -> None:
    """Set a value of the spec; the path of a sublayer stands for its factor."""
    stack, _, index = path.partition(".sublayers.")
    if not index:
        file.put(path, number)
        return
    listed = file.at(f"{stack}.sublayers")
    if listed is None:  # of a variant that no layer has
        return
    steps = [dict(step) if isinstance(step, Mapping) else {"sublayer": step} for step in listed]
    steps[int(index)]["residual"] = {**(steps[int(index)].get("residual") or {}), factor: number}
    file.put(f"{stack}.sublayers", steps)


def _value(file: Writing, path: str, factor: str = "scale") -> Any:
    stack, _, index = path.partition(".sublayers.")
    if not index:
        return file.value(path)
    steps = file.value(f"{stack}.sublayers")
    if not isinstance(steps, tuple):  # of a variant that no layer has
        return None
    residual = steps[int(index)].residual
    return 1.0 if residual is None else getattr(residual, factor)


class RescaleConfig(FieldConfig):
    """The number of layers after which RWKV halves its residual stream: `{rescale: decoder}`; 0 for never.

    Before the k-th halving, the outputs of sublayers are divided by 2 ** (k - 1), so that only the norms notice: their
    `eps` weighs more. The class does so at inference only, and does not change the weights in the file.
    """

    kind: Literal["rescale"] = "rescale"
    rescale: str
    """The path of the stack, whose layers have a mixer and an FFN."""

    def read(self, name: str, file: Reading) -> None:
        interval, layers = file.value(name), file.layers(self.rescale)
        if type(interval) is not int:
            raise tfkit.Invalid("", f"`{name}` must be an integer; got {interval}")
        if layers is None:
            return
        names = []
        for divisor, halves in _divisors(interval, len(layers)):
            names.append(f"halving_{divisor}" if halves else "base" if divisor == 1 else f"divided_{divisor}")
            if names[-1] == "base":
                continue
            changes: dict[str, Any] = {"residual": {"scale": 1 / divisor}} if divisor > 1 else {}
            if halves:
                residual = {"scale": 0.5 / divisor, "scale_onto": 0.5}
                changes["sublayers"] = ["mixer", {"sublayer": "ffn", "residual": residual}]
            file.put(f"{self.rescale}.layers.variants.{names[-1]}", changes)
        file.arrange(self.rescale, names)

    def write(self, name: str, file: Writing) -> None:
        block = file.value(self.rescale)
        assert isinstance(block, tfkit.BlockConfig)
        stack = block.stack()
        assert stack is not None
        factors = [[(step.addition.scale, step.addition.scale_onto) for step in layer.steps] for layer in stack.layers]
        depth = len(factors)
        for interval in (file.default(name), *range(depth + 1)):
            layers = [(1 / divisor, 0.5 if halves else 1.0) for divisor, halves in _divisors(interval, depth)]
            if factors == [[(scale, 1.0), (scale * onto, onto)] for scale, onto in layers]:
                file.put(name, interval)
                return
        raise tfkit.Invalid("", f"no value of `{name}` expresses the factors of the residuals")


class WidthFactorConfig(FieldConfig):
    """A width as a factor of `hidden_size`: `{width_factor: decoder.mixer.d_key, heads: num_heads}`, rounded down."""

    kind: Literal["width_factor"] = "width_factor"
    width_factor: str
    """The path of the width."""
    heads: str | None = None
    """The field with the number of heads that share the width, if the path has the width of a head."""
    multiple: str | None = None
    """The field with a number; the width is rounded up to a multiple of it."""

    def read(self, name: str, file: Reading) -> None:
        used = [field for field in (self.heads, self.multiple) if field is not None]
        factor, width, *counts = (file.compute(field) for field in (name, "hidden_size", *used))
        file.used([field for field in used if field == self.multiple])
        if not all(0 < number < math.inf for number in (factor, width, *counts)):
            raise tfkit.Invalid("", f"`{name}`, `hidden_size` and {used} must be positive numbers")
        total = _multiple(width * factor, int(counts[-1]) if self.multiple is not None else None)
        heads = int(counts[0]) if self.heads is not None else 1
        if total % heads or not total:
            raise tfkit.Invalid("", f"`{name}` gives the width {total}, which {heads} heads cannot share")
        file.put(self.width_factor, total // heads)

    def write(self, name: str, file: Writing) -> None:
        total, width = file.value(self.width_factor), file.compute("hidden_size")
        total *= 1 if self.heads is None else int(file.compute(self.heads))
        multiples = [None] if self.multiple is None else [file.default(self.multiple), 1]
        ratio = total / width
        for multiple in multiples:
            for factor in (file.default(name), ratio, math.nextafter(ratio, math.inf)):
                if _multiple(width * factor, multiple) == total:
                    file.put(name, float(factor))
                    if self.multiple is not None:
                        file.put(self.multiple, multiple)
                    return
        raise tfkit.Invalid("", f"no value of `{name}` gives the width {total}")


def _multiple(width: float, multiple: int | None) -> int:
    """Round a width down to an integer; or up to a multiple."""
    return int(width) if multiple is None else int((width + multiple - 1) // multiple * multiple)


def _divisors(interval: int, n_layers: int) -> list[tuple[int, bool]]:
    """Return the divisor of the outputs of each layer, and whether the layer halves the stream after it."""
    if interval <= 0:
        return [(1, False)] * n_layers
    return [(2 ** (layer // interval), (layer + 1) % interval == 0) for layer in range(n_layers)]


class RoundedRootConfig(FieldConfig):
    """A width, and a scale that is its square root in bfloat16: `{rounded_root: embedding.scale, at: d_model}`."""

    kind: Literal["rounded_root"] = "rounded_root"
    rounded_root: str
    """The path of the scale."""
    at: str
    """The path of the width."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return (self.at,)

    def read(self, name: str, file: Reading) -> None:
        width = file.value(name)
        if type(width) is not int or width < 1:
            raise tfkit.Invalid("", f"`{name}` must be a positive integer; got {width}")
        file.put(self.at, width)
        if file.reaches(self.rounded_root):
            file.put(self.rounded_root, _rounded(width**0.5))

    def write(self, name: str, file: Writing) -> None:
        width = file.value(self.at)
        if not file.says(self.rounded_root, _rounded(width**0.5)):
            raise tfkit.Invalid("", f"`{self.rounded_root}` must be {_rounded(width**0.5)}, the root of the width")
        file.put(name, width)


def _rounded(number: float) -> float:
    """Round a number to bfloat16: the upper half of a float32."""
    (bits,) = struct.unpack("I", struct.pack("f", number))
    bits += 0x7FFF + (bits >> 16 & 1)
    (rounded,) = struct.unpack("f", struct.pack("I", bits & 0xFFFF0000))
    return float(rounded)
