"""What every config is made of: strict mappings, fields that are shared or filled, and the contract to build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


@dataclass(frozen=True)
class SharedMarker:
    """Marks a field that takes its value from the enclosing parts of the spec when it is not given."""


@dataclass(frozen=True)
class WireMarker:
    """Marks a field that names a node or an input of the graph.

    `value` says what travels: the node's output, or the weight of its token table. `mask` says whether the padding mask
    of that output comes with it, as the next argument of the module's `forward`. `whole` says that what is read is
    there when a sequence begins, also where the sequence itself comes in pieces.
    """

    value: Literal["output", "table"] = "output"
    mask: bool = False
    whole: bool = False


@dataclass(frozen=True)
class ImmaterialMarker:
    """Marks a field whose change leaves the meaning of trained weights as it is, such as dropout."""


@dataclass(frozen=True)
class PatchMarker:
    """Marks a mapping whose values are patches: each is merged into the mapping that encloses the marked field's."""


def marker(field: FieldInfo, of: type[T]) -> T | None:
    """The marker of a field, wherever in its annotation it stands."""
    pending: list[Any] = [*field.metadata, field.annotation]
    while pending:
        part = pending.pop()
        if isinstance(part, of):
            return part
        pending += [*getattr(part, "__metadata__", ()), *get_args(part)]
    return None


Shared = Annotated[T, SharedMarker()]
"""`Shared[Dim]`: a field that takes its value from the enclosing parts of the spec when it is not given."""
Immaterial = Annotated[T, ImmaterialMarker()]
"""`Immaterial[float]`: a field that says nothing about what trained weights mean, such as dropout."""
Wire = Annotated[str, WireMarker()]
"""The name of a node or an input whose output is read."""
MaskedWire = Annotated[str, WireMarker(mask=True)]
"""A `Wire` with the padding mask of that output, the next argument of `forward`."""
MemoryWire = Annotated[str, WireMarker(mask=True, whole=True)]
"""A `MaskedWire` to what is there as a whole when a sequence begins, such as an encoder's output."""
LengthsWire = Annotated[str, WireMarker(whole=True)]
"""A `Wire` to an input of type `lengths`."""
TableWire = Annotated[str, WireMarker(value="table")]
"""The name of an embedding whose token table is read."""

Dim = Annotated[int, Field(gt=0, le=2**26)]
"""A width."""
Count = Annotated[int, Field(gt=0, le=4096)]
"""A number of layers, heads, experts."""
Extent = Annotated[int, Field(ge=0, le=2**31)]
"""A number of tokens."""
Probability = Annotated[float, Field(ge=0, lt=1)]
"""A rate of dropout."""
PositiveFloat = Annotated[float, Field(gt=0)]
"""A number above 0."""

AttentionBackend = Literal["sdpa", "eager", "flex"]
"""What computes attention: torch's fused kernels, steps written out one by one, or FlexAttention. No number changes."""


def slot(default: str) -> Any:
    """A field that the kind `default` fills when the spec does not say.

    The kind is looked up when a spec is read, so that a default may come from any plugin. A field that must be filled
    has no default, and one that may stay empty has the default None.
    """
    return Field(json_schema_extra={"default_kind": default})


def optional_slot(implied: str) -> Any:
    """A field that may stay empty, and where a mapping without a kind is of the kind `implied`."""
    return Field(default=None, json_schema_extra={"implied_kind": implied})


class Config(BaseModel):
    """A mapping of a spec: frozen, strict, without unknown keys."""

    word_key: ClassVar[str | None] = None
    """The key that a bare word stands for; None where only a mapping will do."""
    derived: ClassVar[Mapping[str, str]] = {}
    """What arithmetic takes for a field that is not given, itself arithmetic: `{"d_head": "d_model // n_heads"}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise `Invalid` when the fields contradict each other. Overriding methods call `super().check()`."""

    def in_words(self) -> str | None:
        """What this one does, in a sentence for `tfkit explain`; None where the docstring's first says just that."""
        return None

    def material(self) -> Mapping[str, Any]:
        """The values that decide what trained weights mean, by name: all fields that are not `Immaterial`.

        They are kept beside weights that tfkit writes, and weights with others are refused. A config that can say one
        thing in several ways returns one of them.
        """
        fields = type(self).model_fields
        return {name: getattr(self, name) for name, info in fields.items() if marker(info, ImmaterialMarker) is None}


class Component(Config):
    """A config that fills a slot. Subclasses set `kind: Literal["name"] = "name"` and write `build`."""

    word_key = "kind"
    slot: ClassVar[str]
    role: ClassVar[str] = "has a place of its own"
    """Where in the model it acts, for slots whose components act in different places."""

    @property
    def pattern_sizes(self) -> Mapping[str, int]:
        """Sizes by the letters that patterns of weight maps call them: `h` heads, `d` the width of one."""
        return {}

    @classmethod
    def kind_name(cls) -> str:
        """The name under which a spec asks for this component."""
        return str(cls.model_fields[str(cls.word_key)].default)


class Make(Protocol):
    """What `build` is given: calls the `build` of a child's config, and remembers what the child is."""

    attention_backend: AttentionBackend
    """What computes attention, where a kind has the choice."""
    recompute: bool
    """Whether a layer keeps only its arguments for the backward, and runs a second time then."""

    def __call__(self, config: Component, /, *args: Any, **given: Any) -> nn.Module:
        """Build `config`; the further arguments are those that its slot's `build` takes."""
