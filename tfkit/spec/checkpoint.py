"""The `checkpoint` section of a spec: its tensors and fields as a published checkpoint names them."""

from __future__ import annotations

from typing import Any

from tfkit.component import Config, Dim
from tfkit.errors import Invalid


class TensorConfig(Config):
    """The place of some of the model's tensors in the file."""

    word_key = "file"

    file: str | tuple[str, ...]
    """Their names in the file. `{i}` is the number at that place in the model's name; a hole that the model's name does
    not have numbers what the model holds in one tensor, such as experts. `[q k v]` stands for one name per word."""
    pattern: str | None = None
    """The pattern from the file's tensors to the model's, see `tfkit/checkpoint/pattern.py`; unchanged unless given."""
    sizes: dict[str, Dim] | None = None
    """Sizes in the pattern that follow neither from the tensors nor from the component."""

    def check(self) -> None:
        """Refuse sizes without a pattern."""
        super().check()
        if self.sizes is not None and self.pattern is None:
            raise Invalid("sizes", "`sizes` has no effect: there is no `pattern`")


class FieldConfig(Config):
    """A field of config.json and its meaning in the spec, in both directions."""

    word_key = "set"

    set: str | tuple[str, ...] | None = None
    """Path of the value in the spec, or several that share it."""
    read: str | None = None
    """The spec's value where it differs from the field's: arithmetic over `value` and the other fields."""
    write: str | None = None
    """The field's value, for writing: arithmetic over `value` and the other fields."""
    if_null: str | None = None
    """The value that null stands for: arithmetic over the other fields."""
    null_if: str | None = None
    """The value that means null in the spec: arithmetic over the other fields."""
    also: dict[str, Any] | None = None
    """Further changes to the spec where the value is not null: paths and their values."""
    cases: dict[str, dict[str, Any]] | None = None
    """The changes to the spec for each value that the field may have: paths and their values. Beside `set`, only
    special values have a case."""
    rope: str | dict[str, str | tuple[str, ...]] | None = None
    """Path of the rotary position that the field describes; or, for each layer type, one or several."""
    layers: dict[str, str | dict[str, str]] | None = None
    """The layer variant for each type that the field, a list, may name; or one for some layers of that type and one for
    the rest (`{0: first, rest: base}`); or one for each variant that an earlier list gave a layer (`{base: dense, full:
    dense_full}`). `set` is the path of the stack."""
    first: str | None = None
    """The variant of the first layers, where the field gives their number; `set` is the path of the stack."""
    every: str | None = None
    """The variant of every n-th layer, where the field gives n; `set` is the path of the stack."""
    others: str | None = None
    """The variant of the layers not covered by `first` or `every`; `base` unless given."""
    each: dict[str, str] | None = None
    """The path of each variant's number, where the field is a list with one entry per layer; `set` is the path of the
    stack."""
    zero: dict[str, str] | None = None
    """The variants that layers of other variants become where their number is 0."""
    variants: dict[str, dict[str, Any]] | None = None
    """Changes made by layer variants that the family has but its own spec does not use."""
    when: dict[str, Any] | None = None
    """Values of other fields that this field depends on: without them it has no meaning."""
    default: Any = None
    """The field's value where config.json omits it; without a default the field is required."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths in `set`, one or several."""
        return (self.set,) if isinstance(self.set, str) else self.set or ()

    def check(self) -> None:
        """Refuse rules that are empty or contradict each other."""
        super().check()
        if self.cases is None and self.rope is None and self.set is None:
            raise Invalid("", "a field needs `set`, `cases` or `rope`", help="write the path of the spec's value")
        for type, variant in (self.layers or {}).items():
            if not isinstance(variant, str) and "rest" not in variant:
                raise Invalid(f"layers.{type}", "`rest` is missing: the variant of the other layers of that type")
        if self.zero is not None and self.each is None:
            raise Invalid("zero", "`zero` has no effect: the field has no number for `each` layer")
        for name in ("read", "write", "if_null", "null_if", "also"):
            special = self.set is None or (self.rope, self.layers, self.each) != (None, None, None)
            if getattr(self, name) is not None and special:
                raise Invalid(name, f"`{name}` has no effect: it changes what `set` sets")


class CheckpointConfig(Config):
    """A published checkpoint of the model: its family, its tensor names, the fields of its config.json."""

    model_type: str
    """The family, as config.json names it."""
    architecture: str
    """The class in transformers that implements this graph."""
    prefix: str = ""
    """The prefix of names in the file, omitted if the file has the model without its head. Below, a name that begins
    with a dot continues the prefix."""
    tensors: dict[str, TensorConfig]
    """The model's tensors, or the modules that hold them, by path with `{i}` for numbers, and the place of each in the
    file. Tensors that the model does not have are skipped; of two entries for the same tensor, the one with more names
    applies if the model has all of them: `ffn.[gate up]` before `ffn.up`."""
    older: dict[str, str] | None = None
    """Endings of tensor names in older files, and the current ones: `{LayerNorm.gamma: LayerNorm.weight}`."""
    copies: dict[str, str] | None = None
    """Tensors of the file that repeat another one, and the name of that one."""
    ignore: dict[str, str] | None = None
    """Tensors of the file that the model does not need, with the reason; `*` matches anything."""
    zeros: dict[str, str] | None = None
    """Tensors of the file that the model does not hold because they are zero, with the reason; other values are
    refused."""
    constants: dict[str, float] | None = None
    """Single numbers in the file that are the same in all models of the family: written, and checked when read. `{i}`
    stands for every number that other names of the file have there."""
    config: dict[str, FieldConfig | None] | None = None
    """The fields of config.json; null removes one that the parent spec has."""
    only: dict[str, Any] | None = None
    """Fields of config.json that have one value in every model of the family that this spec can describe."""
    written: dict[str, Any] | None = None
    """Fields of config.json that are written with this value and not read: their defaults do not fit every model."""
    unused: tuple[str, ...] | None = None
    """Fields of config.json that do not affect the model."""

    def in_file(self, name: str) -> str:
        """A name of this section as it appears in the file."""
        return self.prefix + name[1:] if name.startswith(".") else name

    @property
    def fields(self) -> dict[str, FieldConfig]:
        """The fields that the family has."""
        return {name: rule for name, rule in (self.config or {}).items() if rule is not None}
