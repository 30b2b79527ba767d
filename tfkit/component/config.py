"""The parts of every config: strict mappings, fields that are shared or filled, and the contract to build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


@dataclass(frozen=True)
class SharedMarker:
    """Marker of a field that takes its value from the enclosing configs unless given."""


@dataclass(frozen=True)
class WireMarker:
    """Marker of a field that names a node or an input of the graph.

    `value` is the value on the wire: the node's output, or the weight of its token table. With `mask`, the padding mask
    of that output comes with it, as the next argument of the module's `forward`. With `whole`, the value is complete
    when a sequence begins, even if the sequence itself is read step by step.
    """

    value: Literal["output", "table"] = "output"
    mask: bool = False
    whole: bool = False


@dataclass(frozen=True)
class ImmaterialMarker:
    """Marker of a field that does not change the meaning of trained weights, such as dropout."""


@dataclass(frozen=True)
class ContentMarker:
    """Marker of a path. What it leads to is part of the meaning of a run, wherever it lies."""


@dataclass(frozen=True)
class PatchMarker:
    """Marker of a mapping of patches: each is merged into the mapping around the one that has the marked field."""


def marker(field: FieldInfo, of: type[T]) -> T | None:
    """Return the marker of a field, at any depth of its annotation."""
    return next((part for part in _parts(field) if isinstance(part, of)), None)


@cache
def _parts(field: FieldInfo) -> tuple[Any, ...]:
    """Return the parts of a field's annotation at any depth.

    Cached, because configs are read and written field by field.
    """
    parts: list[Any] = []
    pending: list[Any] = [*field.metadata, field.annotation]
    while pending:
        part = pending.pop()
        parts.append(part)
        pending += [*getattr(part, "__metadata__", ()), *get_args(part)]
    return tuple(parts)


Shared = Annotated[T, SharedMarker()]
"""`Shared[Dim]`: a field that takes its value from the enclosing configs unless given."""
Immaterial = Annotated[T, ImmaterialMarker()]
"""`Immaterial[float]`: a field that does not change the meaning of trained weights, such as dropout."""
ContentPath = Annotated[str, ImmaterialMarker(), ContentMarker()]
"""The path of a file or a folder whose content decides the results of a run, such as a teacher in a loss.

A relative path starts at the folder of the run's file. `build` gets an absolute one.
"""
Wire = Annotated[str, WireMarker()]
"""The name of a node or an input to read."""
MaskedWire = Annotated[str, WireMarker(mask=True)]
"""A `Wire` with the padding mask of that output, the next argument of `forward`."""
MemoryWire = Annotated[str, WireMarker(mask=True, whole=True)]
"""A `MaskedWire` to a value that is complete when a sequence begins, such as an encoder's output."""
LengthsWire = Annotated[str, WireMarker(whole=True)]
"""A `Wire` to an input of type `lengths`."""
VectorWire = Annotated[str, WireMarker(whole=True)]
"""A `Wire` to a vector that is complete when a sequence begins."""
TableWire = Annotated[str, WireMarker(value="table")]
"""The name of an embedding, to read its token table."""

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
"""Implementation of attention: torch's fused kernels, every step written out, or FlexAttention. Results are equal."""


def slot(default: str) -> Any:
    """Declare a field that holds a component, by default of kind `default`.

    The kind is looked up when a spec is read, so that a default may come from any plugin. A field that must be filled
    has no default, and one that may stay empty has the default None.
    """
    return Field(json_schema_extra={"default_kind": default})


def optional_slot(implied: str) -> Any:
    """Declare a field that may stay empty; a mapping without a kind is of the kind `implied`."""
    return Field(default=None, json_schema_extra={"implied_kind": implied})


class Config(BaseModel):
    """A mapping of a spec: frozen, strict, without unknown keys."""

    word_key: ClassVar[str | None] = None
    """The key that a bare word stands for; None if only a mapping is valid."""
    derived: ClassVar[Mapping[str, str]] = {}
    """Arithmetic for the value of a field that is not given: `{"d_head": "d_model // n_heads"}`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise `Invalid` when the fields contradict each other. Overriding methods call `super().check()`."""

    def in_words(self) -> str | None:
        """Describe this config in a sentence for `tfkit explain`; None stands for the docstring's first sentence."""
        return None

    def material(self) -> Mapping[str, Any]:
        """Return the values that decide the meaning of trained weights, by name: all fields that are not `Immaterial`.

        They are stored with the weights that tfkit writes, and weights with others are refused. A config that can
        state one thing in several ways returns one of them.
        """
        fields = type(self).model_fields
        return {name: getattr(self, name) for name, info in fields.items() if marker(info, ImmaterialMarker) is None}


class Component(Config):
    """A config that fills a slot. Subclasses set `kind: Literal["name"] = "name"` and write `build`."""

    word_key: ClassVar[str | None] = "kind"
    slot: ClassVar[str]
    role: ClassVar[str] = "has a place of its own"
    """The place in the model where it acts, for slots with components that act in different places."""
    takes_condition: ClassVar[bool] = False
    """True if its module uses `context.condition`, so that its stack needs a `condition`."""
    takes_features: ClassVar[bool] = False
    """True if its module uses `context.features`, so that its stack needs `layer_features`."""
    drawn_apart: ClassVar[bool] = False
    """True if a picture shows the modules inside it one by one, such as a router and its experts."""

    @property
    def pattern_sizes(self) -> Mapping[str, int]:
        """Sizes by their letters in the patterns of weight maps: `h` heads, `d` the width of a head."""
        return {}

    @classmethod
    def kind_name(cls) -> str:
        """Return the name under which a spec requests this component."""
        return str(cls.model_fields[str(cls.word_key)].default)


def parts(path: tuple[str, ...], part: object) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield a config and everything inside it, each with its path."""
    yield path, part
    inside: Mapping[str, object] = {}
    if isinstance(part, Config):
        inside = {name: getattr(part, name) for name in type(part).model_fields}
    elif isinstance(part, Mapping):
        inside = part
    elif isinstance(part, tuple):
        inside = {str(index): item for index, item in enumerate(part)}
    for name, item in inside.items():
        yield from parts((*path, name), item)


def kinds_in(module: ModuleType) -> Iterator[type[Component]]:
    """Yield the kinds that a module defines. Base classes and imported kinds are left out."""
    for value in vars(module).values():
        is_own = isinstance(value, type) and issubclass(value, Component) and value.__module__ == module.__name__
        if is_own and value.word_key in value.model_fields:
            yield value


class Make(Protocol):
    """The first argument of `build`: calls the `build` of a child's config, and records the child's slot and kind."""

    attention_backend: AttentionBackend
    """The implementation of attention, for kinds that support several."""
    recompute: bool
    """If true, a layer keeps only its arguments for the backward, in which it runs a second time."""
    layer: int | None
    """The number of the layer of a stack that is being built, from 0; None outside of layers."""

    def __call__(self, config: Component, /, *args: Any, **arguments: Any) -> nn.Module:
        """Build `config`; further arguments are passed to its slot's `build`."""
