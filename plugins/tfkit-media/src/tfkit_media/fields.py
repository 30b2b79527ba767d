"""Fields of config.json in models of images and sound: sizes with one or two sides, lists, and derived widths."""

from __future__ import annotations

import math
from typing import Literal

import tfkit
from tfkit import FieldConfig, Reading, Writing


class SidesConfig(FieldConfig):
    """A number, or a list of rows and columns: `{sides: [inputs.image.height, inputs.image.width]}`."""

    kind: Literal["sides"] = "sides"
    sides: tuple[str, str]
    """The paths of rows and columns; equal paths if both must be equal."""
    grid: str | None = None
    """The path of positions in attention, with rows and columns of patches."""
    mask: str | None = None
    """The path of a mask by windows of patches, with columns of patches."""
    patch: str | None = None
    """The field with the size of these patches."""
    square: bool = False
    """If true, both sides must be equal."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return self.sides

    def read(self, name: str, file: Reading) -> None:
        value = file.value(name)
        sides = value if isinstance(value, list) else [value, value]
        if len(sides) != 2 or not all(type(side) is int for side in sides):
            raise tfkit.Invalid("", f"`{name}` must be an integer, or a list of two; got {value}")
        if (self.square or self.sides[0] == self.sides[1]) and sides[0] != sides[1]:
            raise tfkit.Invalid("", f"`{name}` must have equal sides; got {value}")
        for path, side in zip(self.sides, sides, strict=True):
            file.put(path, side)
        if self.grid is not None and self.patch is not None and file.reaches(f"{self.grid}.rows"):
            size = file.value(self.patch)
            for axis, side in zip(("rows", "columns"), sides, strict=True):
                file.put(f"{self.grid}.{axis}", side // (size[0] if isinstance(size, list) else size))
            if self.mask is not None:
                file.put(f"{self.mask}.columns", file.at(f"{self.grid}.columns"))

    def write(self, name: str, file: Writing) -> None:
        rows, columns = (file.value(path) for path in self.sides)
        file.put(name, rows if rows == columns else [rows, columns])


class MultiplesConfig(FieldConfig):
    """A number at several paths, times a factor at each: `{multiples: {d_model: 1, logits.d_model: 2}}`."""

    kind: Literal["multiples"] = "multiples"
    multiples: dict[str, int]
    """The factor for each path."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return tuple(self.multiples)

    def read(self, name: str, file: Reading) -> None:
        value = file.value(name)
        if type(value) is not int:
            raise tfkit.Invalid("", f"`{name}` must be an integer; got {value}")
        for path, factor in self.multiples.items():
            if file.reaches(path):
                file.put(path, value * factor)

    def write(self, name: str, file: Writing) -> None:
        values = {path: file.value(path) for path in self.multiples}
        numbers = {path: value for path, value in values.items() if isinstance(value, int)}
        number = next((value // self.multiples[path] for path, value in numbers.items()), None)
        for path, value in numbers.items():
            if number is not None and value != number * self.multiples[path]:
                message = f"`{path}` must be {self.multiples[path]} times `{name}`, {number}; got {value}"
                raise tfkit.Invalid("", message)
        file.put(name, number)


class FeatureLayerConfig(FieldConfig):
    """The layer of an encoder whose output is read, counted from its end if it is negative.

    `{feature_layer: image_encoder.n_layers, layers: vision_config.num_hidden_layers}`: later layers are omitted.
    """

    kind: Literal["feature_layer"] = "feature_layer"
    feature_layer: str
    """The path of the number of layers."""
    layers: str
    """The field with the number of layers of the full encoder."""

    def read(self, name: str, file: Reading) -> None:
        value, layers = file.value(name), file.value(self.layers)
        number = value[0] if isinstance(value, list) and len(value) == 1 else value
        if type(number) is not int or type(layers) is not int:
            raise tfkit.Invalid("", f"`{name}` must be an integer; got {value}")
        output = layers + 1 + number if number < 0 else number
        if not 0 < output <= layers:
            message = f"`{name}` must be the output of one of {layers} layers; got {number}"
            raise tfkit.Invalid("", message)
        file.put(self.feature_layer, output)

    def write(self, name: str, file: Writing) -> None:
        file.put(name, -1)


class MergedConfig(FieldConfig):
    """The number of vectors of a square image whose patches are merged.

    `{merged: merged_patches.size, image: vision_config.image_size, patch: vision_config.patch_size}`.
    """

    kind: Literal["merged"] = "merged"
    merged: str
    """The path of the rows of patches in a square."""
    image: str
    """The field with the rows of the image."""
    patch: str
    """The field with the rows of a patch."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return (self.merged,)

    def read(self, name: str, file: Reading) -> None:
        vectors, image, patch = file.value(name), file.value(self.image), file.value(self.patch)
        if type(vectors) is not int or type(image) is not int or type(patch) is not int or vectors < 1 or patch < 1:
            raise tfkit.Invalid("", f"`{name}` must be a number of vectors; got {vectors}")
        rows, side = image // patch, math.isqrt(vectors)
        if side * side != vectors or rows % side:
            message = f"`{name}` must be the square of a divisor of {rows}, the rows of patches; got {vectors}"
            raise tfkit.Invalid("", message)
        file.put(self.merged, rows // side)

    def write(self, name: str, file: Writing) -> None:
        size, image, patch = (file.value(path) for path in (self.merged, "inputs.images.height", "patches.size"))
        file.put(name, (image // patch // size) ** 2)


class WidthOrConfig(FieldConfig):
    """A width, by default the value of another field: `{width_or: text_vector.d_model, field: hidden_size}`."""

    kind: Literal["width_or"] = "width_or"
    width_or: str
    """The path of the width."""
    field: str
    """The field whose value is the default."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return (self.width_or,)

    def read(self, name: str, file: Reading) -> None:
        file.put(self.width_or, file.present(name).get("", file.value(self.field)))

    def write(self, name: str, file: Writing) -> None:
        file.put(name, file.value(self.width_or))


class RatioConfig(FieldConfig):
    """The width of an FFN divided by d_model. A gated FFN has two thirds of this, rounded up to a multiple of 8."""

    kind: Literal["ratio"] = "ratio"
    ratio: str
    """The path of the width."""
    of: str
    """The field that is multiplied."""
    gated: str
    """The field that is true for a gated FFN."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return (self.ratio,)

    def _width(self, product: int, gated: bool) -> int:
        return 8 * -(-int(product * 2 / 3) // 8) if gated else product

    def read(self, name: str, file: Reading) -> None:
        ratio, width = file.value(name), file.value(self.of)
        if type(ratio) not in (int, float):
            raise tfkit.Invalid("", f"`{name}` must be a number; got {ratio}")
        file.put(self.ratio, self._width(int(width * ratio), bool(file.value(self.gated))))

    def write(self, name: str, file: Writing) -> None:
        d_ff, width = file.value(self.ratio), file.value("d_model")
        gated = file.says("encoder.ffn", "swiglu")
        ratio = next((n for n in range(1, 65) if self._width(n * width, gated) == d_ff), None)
        if ratio is None:
            raise tfkit.Invalid("", f"no `{name}` gives the width {d_ff} for a d_model of {width}")
        file.put(name, ratio)


class SquaresConfig(FieldConfig):
    """The rows of patches in a square, whose vectors are concatenated.

    `{squares: merged_patches.size, width: image_hidden.d_model, of: vision_config.hidden_size}`.
    """

    kind: Literal["squares"] = "squares"
    squares: str
    """The path of the rows."""
    width: str
    """The path of the width of a square, `of` times the number of its patches."""
    of: str
    """The field with the width of a patch."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return (self.squares,)

    def read(self, name: str, file: Reading) -> None:
        size, width = file.value(name), file.value(self.of)
        if type(size) is not int or type(width) is not int:
            raise tfkit.Invalid("", f"`{name}` must be an integer; got {size}")
        file.put(self.squares, size)
        file.put(self.width, size**2 * width)

    def write(self, name: str, file: Writing) -> None:
        file.put(name, file.value(self.squares))


class WindowsConfig(FieldConfig):
    """The pixels in a row of a window, which contains only full squares of patches.

    `{windows: image_encoder.attention.mask.rule.size, patch: vision_config.patch_size,
    square: vision_config.spatial_merge_size}`.
    """

    kind: Literal["windows"] = "windows"
    windows: str
    """The path of the rows of patches in a window."""
    patch: str
    """The field with the rows of a patch, in pixels."""
    square: str
    """The field with the rows of patches in a square."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return (self.windows,)

    def read(self, name: str, file: Reading) -> None:
        pixels, patch, square = file.value(name), file.value(self.patch), file.value(self.square)
        if not all(type(number) is int and number > 0 for number in (pixels, patch, square)):
            raise tfkit.Invalid("", f"`{name}` must be a positive integer; got {pixels}")
        if pixels // square // patch == 0:
            message = f"`{name}` must contain a square of {square} x {square} patches of {patch} pixels; got {pixels}"
            raise tfkit.Invalid("", message)
        if file.reaches(self.windows):
            file.put(self.windows, pixels // square // patch * square)

    def write(self, name: str, file: Writing) -> None:
        size, patch = file.value(self.windows), file.value("patches.size")
        if not isinstance(size, int):
            raise tfkit.Invalid("", f"`{self.windows}` is missing: a config.json of this family states windows")
        file.put(name, size * patch)


class AxialRopeConfig(FieldConfig):
    """The base of rotary positions of a grid, `rope_parameters` or, in older files, `rope_theta` next to it.

    `{axial_rope: image_encoder.attention.position.theta}`.
    """

    kind: Literal["axial_rope"] = "axial_rope"
    axial_rope: str
    """The path of the base."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return (self.axial_rope,)

    def read(self, name: str, file: Reading) -> None:
        around = name[: name.rfind(".") + 1]
        older = f"{around}rope_theta"
        file.used([older])
        parameters = file.value(name) or {}
        theta = file.present(around).get("rope_theta", 10000.0)
        entries = {"rope_theta": theta, "rope_type": "axial"}
        if not isinstance(parameters, dict) or not parameters.keys() <= entries.keys():
            raise tfkit.Invalid("", f"`{name}` must be a mapping with `rope_theta`; got {parameters}")
        entries |= parameters
        if entries["rope_type"] != "axial":
            raise tfkit.Invalid("", f"`{name}.rope_type` must be `axial`; got `{entries['rope_type']}`")
        if type(entries["rope_theta"]) not in (int, float):
            raise tfkit.Invalid("", f"`{name}.rope_theta` must be a number; got {entries['rope_theta']}")
        file.put(self.axial_rope, entries["rope_theta"])

    def write(self, name: str, file: Writing) -> None:
        file.put(name, {"rope_theta": file.value(self.axial_rope), "rope_type": "axial"})


class StackedConfig(FieldConfig):
    """The width of an FFN that is also the width of stacked frames.

    `{stacked: stacked_frames.size, d_ff: sound_encoder.ffn.d_ff, of: audio_config.hidden_size}`.
    """

    kind: Literal["stacked"] = "stacked"
    stacked: str
    """The path of the number of frames."""
    d_ff: str
    """The path of the width of the FFN."""
    of: str
    """The field with the width of a frame."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return (self.d_ff,)

    def read(self, name: str, file: Reading) -> None:
        value, width = file.value(name), file.value(self.of)
        if type(value) is not int or type(width) is not int or width < 1 or value % width:
            raise tfkit.Invalid("", f"`{name}` must be a multiple of `{self.of}`, {width}; got {value}")
        file.put(self.d_ff, value)
        file.put(self.stacked, value // width)

    def write(self, name: str, file: Writing) -> None:
        file.put(name, file.value(self.d_ff))


class RepeatedConfig(FieldConfig):
    """A list that repeats one number: `{repeated: stem.d_model, times: stem.sizes}`, after the field of `times`."""

    kind: Literal["repeated"] = "repeated"
    repeated: str
    """The path of the number."""
    times: str
    """The path of a list of the same length."""

    @property
    def expressions(self) -> tuple[str, ...]:
        return (self.repeated,)

    def read(self, name: str, file: Reading) -> None:
        numbers, other = file.value(name), file.at(self.times)
        if not isinstance(numbers, list) or not numbers or any(number != numbers[0] for number in numbers):
            raise tfkit.Invalid("", f"`{name}` must be a list of equal numbers; got {numbers}")
        if not isinstance(other, list) or len(other) != len(numbers):
            raise tfkit.Invalid("", f"`{name}` must have as many numbers as `{self.times}`, {other}; got {numbers}")
        file.put(self.repeated, numbers[0])

    def write(self, name: str, file: Writing) -> None:
        file.put(name, [file.value(self.repeated)] * len(file.value(self.times)))
