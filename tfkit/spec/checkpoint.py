"""The `checkpoint` section of a spec: what a published checkpoint calls its tensors, and its config.json the rest."""

from __future__ import annotations

from typing import Any

from tfkit.component import Config, Dim
from tfkit.errors import Invalid


class TensorConfig(Config):
    """Where tensors of the model stand in the file."""

    word_key = "file"

    file: str | tuple[str, ...]
    """Their names in the file. `{i}` is the number that stands there in the model's name; a hole that the model's name
    does not have numbers what the model holds in one tensor, such as experts. `[q k v]` is one name for each word."""
    pattern: str | None = None
    """How the file's tensors become the model's, see `tfkit/checkpoint/pattern.py`; as they are unless given."""
    sizes: dict[str, Dim] | None = None
    """Sizes of the pattern's names that follow neither from the tensors nor from the component."""

    def check(self) -> None:
        """Refuse sizes of nothing."""
        super().check()
        if self.sizes is not None and self.pattern is None:
            raise Invalid("sizes", "`sizes` has no effect: there is no `pattern`")


class FieldConfig(Config):
    """What a field of config.json says about the spec, in both directions."""

    word_key = "set"

    set: str | tuple[str, ...] | None = None
    """Path of the value in the spec, or several that share it."""
    read: str | None = None
    """The spec's value, where it is not the field's: arithmetic over `value` and the other fields."""
    write: str | None = None
    """The field's value, the other way round: arithmetic over `value` and the other fields."""
    if_null: str | None = None
    """What null stands for: arithmetic over the other fields."""
    null_if: str | None = None
    """The value that says nothing, so that the spec has null: arithmetic over the other fields."""
    also: dict[str, Any] | None = None
    """What else the spec has where the value is not null: paths and their values."""
    cases: dict[str, dict[str, Any]] | None = None
    """What each value that the field may have changes in the spec: paths and their values. Beside `set`, only special
    values have a case."""
    rope: str | dict[str, str | tuple[str, ...]] | None = None
    """Path of the rotary position that the field describes; or, for each type of layer, one or several."""
    layers: dict[str, str | dict[str, str]] | None = None
    """The variant of a layer for each type that the field, a list, may name, or one for some layers of that type and
    one for the rest (`{0: first, rest: base}`), or one for each variant that a list before this one gave a layer
    (`{base: dense, full: dense_full}`); `set` is the path of the stack."""
    first: str | None = None
    """The variant of the first layers, whose number the field gives; `set` is the path of the stack."""
    every: str | None = None
    """The variant of each n-th layer, where the field gives n; `set` is the path of the stack."""
    others: str | None = None
    """The variant of the layers that `first` or `every` leaves; `base` unless given."""
    each: dict[str, str] | None = None
    """The path of each variant's number, where the field is a list with one for each layer; `set` is the path of the
    stack."""
    zero: dict[str, str] | None = None
    """The variants that the layers of others become where their number is 0."""
    variants: dict[str, dict[str, Any]] | None = None
    """What variants of a layer change that the family has and its own spec does not use."""
    when: dict[str, Any] | None = None
    """Values of other fields without which this one says nothing."""
    default: Any = None
    """The field's value where config.json leaves it out; without one it must be there."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of `set`, one or several."""
        return (self.set,) if isinstance(self.set, str) else self.set or ()

    def check(self) -> None:
        """Refuse rules that say nothing, or two things."""
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
    """A published checkpoint of the model: its family, the names of its tensors, the fields of its config.json."""

    model_type: str
    """The family, as config.json names it."""
    architecture: str
    """The class in transformers that has this graph."""
    prefix: str = ""
    """What names in the file begin with, unless the file has the model without its head. Below, a name that begins with
    a dot goes on after it."""
    tensors: dict[str, TensorConfig]
    """The model's tensors, or the modules that hold them, by their path with `{i}` for numbers, and where each stands
    in the file. A part that the model does not have is passed over; of two entries that name the same one, that with
    more names counts where the model has all of them: `ffn.[gate up]` before `ffn.up`."""
    older: dict[str, str] | None = None
    """How names of tensors end in older files, and how they end here: `{LayerNorm.gamma: LayerNorm.weight}`."""
    copies: dict[str, str] | None = None
    """Tensors of the file that repeat another one, and that one's name."""
    ignore: dict[str, str] | None = None
    """Tensors of the file that the model does not need, with the reason; `*` stands for anything."""
    zeros: dict[str, str] | None = None
    """Tensors of the file for which the model has no place because they are zero, with the reason; other values are
    refused."""
    constants: dict[str, float] | None = None
    """Single numbers of the file that are the same in all models of the family: written, and checked when read.
    `{i}` stands for every number that other names of the file have there."""
    config: dict[str, FieldConfig | None] | None = None
    """The fields of config.json; null takes one away that the spec below has."""
    only: dict[str, Any] | None = None
    """Fields of config.json that have one value in all models of the family that this spec can say."""
    written: dict[str, Any] | None = None
    """Fields of config.json that are written so and not read: where what they are without it fits not every model."""
    unused: tuple[str, ...] | None = None
    """Fields of config.json that say nothing about the model."""

    def in_file(self, name: str) -> str:
        """A name of the section as it stands in the file."""
        return self.prefix + name[1:] if name.startswith(".") else name

    @property
    def fields(self) -> dict[str, FieldConfig]:
        """The fields that the family has."""
        return {name: rule for name, rule in (self.config or {}).items() if rule is not None}
