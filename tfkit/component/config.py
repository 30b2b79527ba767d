"""The base classes of configs, the markers of fields, and the contract of `build`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")
FieldPath: TypeAlias = tuple[str, ...]
"""The names of the fields that lead to a value inside a config."""


@dataclass(frozen=True)
class SharedMarker:
    """Marker of a field that inherits its value from the enclosing configs if it is not set."""


@dataclass(frozen=True)
class WireMarker:
    """Marker of a field that names a node or an input of the graph.

    `value` is what the wire takes: the node's output, the weight of its token table, or its module. With `mask`, the
    module's `forward` takes the padding mask of that output as the next argument. With `static`, the value is static:
    complete when decoding begins.
    """

    value: Literal["output", "table", "module"] = "output"
    mask: bool = False
    static: bool = False


@dataclass(frozen=True)
class ImmaterialMarker:
    """Marker of a field that does not change the meaning of trained weights, such as dropout."""


@dataclass(frozen=True)
class ContentMarker:
    """Marker of a path to a file or folder. Its contents, not its location, are part of the semantics of a run."""


@dataclass(frozen=True)
class ChangeableMarker:
    """Marker of a number that may change during a run."""


@dataclass(frozen=True)
class PatchMarker:
    """Marker of a field with named patches. Each is merged into the config around the config with the field."""


def marker(field: FieldInfo, of: type[T]) -> T | None:
    """Return the marker of a field, at any depth of its annotation."""
    return next((part for part in _parts(field) if isinstance(part, of)), None)


@cache
def _parts(field: FieldInfo) -> tuple[Any, ...]:
    """Return the metadata and the types in a field's annotation, at any depth.

    The result is cached, because every read and write of a config asks for it field by field.
    """
    parts: list[Any] = []
    pending: list[Any] = [*field.metadata, field.annotation]
    while pending:
        part = pending.pop()
        parts.append(part)
        pending += [*getattr(part, "__metadata__", ()), *get_args(part)]
    return tuple(parts)


Shared = Annotated[T, SharedMarker()]
"""`Shared[Dim]`: a field that inherits its value from the enclosing configs if it is not set."""
Immaterial = Annotated[T, ImmaterialMarker()]
"""`Immaterial[float]`: a field that does not change the meaning of trained weights, such as dropout."""
Changeable = Annotated[T, ChangeableMarker()]
"""`Changeable[float]`: a number that may change by step in a run, without new weights.

Modules of a model must keep it unchanged, as attributes: `self.dropout = config.dropout`. tfkit finds the attributes by
building the model with two values, and rejects a run in which anything else of the modules depends on the number.
"""
ContentPath = Annotated[str, ImmaterialMarker(), ContentMarker()]
"""The path of a file or a folder whose content decides the results of a run, such as a teacher in a loss.

A relative path starts at the folder of the run's file. `build` gets an absolute path.
"""
Wire = Annotated[str, WireMarker()]
"""The name of a node or an input whose value the node takes."""
MaskedWire = Annotated[str, WireMarker(mask=True)]
"""A `Wire` with the padding mask of its value, which is the next argument of `forward`."""
MemoryWire = Annotated[str, WireMarker(mask=True, static=True)]
"""A `MaskedWire` to a value that is complete when decoding begins, such as an encoder's output."""
LengthsWire = Annotated[str, WireMarker(static=True)]
"""A `Wire` to an input of type `lengths`."""
VectorWire = Annotated[str, WireMarker(static=True)]
"""A `Wire` to a vector that is complete when decoding begins."""
TableWire = Annotated[str, WireMarker(value="table")]
"""The name of an embedding whose token table the node uses."""

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

    The kind is looked up when a spec is read, so a default may come from any plugin. A slot that must be filled is a
    field without a default; a slot that may stay empty is a field with the default None.
    """
    return Field(json_schema_extra={"default_kind": default})


def optional_slot(implied: str) -> Any:
    """Declare a slot that may stay empty. A mapping without a kind has the kind `implied`."""
    return Field(default=None, json_schema_extra={"implied_kind": implied})


class Config(BaseModel):
    """A mapping of a spec: frozen, strict, without unknown keys."""

    word_key: ClassVar[str | None] = None
    """The key whose value may be written in place of the mapping; None if only a mapping is valid."""
    derived: ClassVar[Mapping[str, str]] = {}
    """Arithmetic for the value of a field that is not set: `{"d_head": "d_model // n_heads"}`."""
    training_only: ClassVar[Mapping[str, Any]] = {}
    """Fields that act only in training, each with the value at which it has no effect: `{"sampled": False}`. With these
    values, and without dropout, a module computes the same in train mode as in eval mode."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise `Invalid` if fields contradict each other. Overriding methods call `super().check()`."""

    def in_words(self) -> str | None:
        """Describe this config in a sentence, for `tfkit show --prose`; None means the docstring's first sentence."""
        return None

    def material(self) -> Mapping[str, Any]:
        """Return the values that decide the meaning of trained weights, by name: all fields that are not `Immaterial`.

        tfkit stores them with the weights, and rejects weights with different values. A config that can express a
        computation in several ways returns the same values for each of them.
        """
        fields = type(self).model_fields
        return {name: getattr(self, name) for name, info in fields.items() if marker(info, ImmaterialMarker) is None}


class Component(Config):
    """A config that fills a slot. Subclasses set `kind: Literal["name"] = "name"` and write `build`."""

    word_key: ClassVar[str | None] = "kind"
    slot: ClassVar[str]
    role: ClassVar[str] = "has a place of its own"
    """A verb phrase for the effect of the component, for slots whose components act in different places of a model."""
    takes_condition: ClassVar[bool] = False
    """True if its module uses `context.condition`; its stack then needs a `condition`."""
    takes_features: ClassVar[bool] = False
    """True if its module uses `context.features`; its stack then needs `layer_features`."""
    drawn_apart: ClassVar[bool] = False
    """True if a picture shows its submodules separately, such as a router and its experts."""

    @property
    def pattern_sizes(self) -> Mapping[str, int]:
        """Sizes by their letters in the patterns of weight maps: `h` for heads, `d` for the width of a head."""
        return {}

    @classmethod
    def kind_name(cls) -> str:
        """Return the name of the kind in a spec."""
        return str(cls.model_fields[str(cls.word_key)].default)


def parts(path: tuple[str, ...], part: object) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield a config and all configs and values inside it, each with its path."""
    yield path, part
    inside: Iterable[tuple[str, object]] = ()
    if isinstance(part, Config):
        inside = ((name, getattr(part, name)) for name in type(part).model_fields)
    elif isinstance(part, Mapping):
        inside = part.items()
    elif isinstance(part, tuple):
        inside = ((str(index), item) for index, item in enumerate(part))
    for name, item in inside:
        if isinstance(item, Config | tuple | Mapping):
            yield from parts((*path, name), item)
        else:
            yield (*path, name), item


def leaf_values(value: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
    """Yield every value inside a config that is not a config, with its path."""
    entries = _config_entries(value)
    if entries is None:
        yield path, value
    else:
        for name, entry in entries.items():
            yield from leaf_values(entry, (*path, name))


def training_only_values(value: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
    """Yield the path of every field inside a config that acts only in training, with its value without an effect."""
    if isinstance(value, Config):
        yield from (((*path, name), neutral) for name, neutral in value.training_only.items())
    for name, entry in (_config_entries(value) or {}).items():
        yield from training_only_values(entry, (*path, name))


def with_values(value: Any, values: Mapping[FieldPath, Any], path: FieldPath = ()) -> Any:
    """Return a config with the values at some paths replaced; raise ValueError if a config rejects its new values."""
    entries = _config_entries(value)
    if path in values or entries is None:
        return values.get(path, value)
    changed = {name: with_values(entry, values, (*path, name)) for name, entry in entries.items()}
    if all(changed[name] is entry for name, entry in entries.items()):
        return value
    if isinstance(value, Config):  # some reject a field that is set, whatever its value
        was_set = {name for name in entries if name in value.model_fields_set or changed[name] is not entries[name]}
        return type(value).model_validate({name: changed[name] for name in was_set})
    return changed if isinstance(value, Mapping) else tuple(changed.values())


def _config_entries(value: Any) -> Mapping[str, Any] | None:
    """Return the entries of a config, or of a mapping or tuple that contains configs; None for other values."""
    if isinstance(value, Config):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping) and any(isinstance(entry, Config) for entry in value.values()):
        return value
    if isinstance(value, tuple) and any(isinstance(entry, Config) for entry in value):
        return {str(index): entry for index, entry in enumerate(value)}
    return None


def kinds_in(module: ModuleType) -> Iterator[type[Component]]:
    """Yield the kinds that a module defines. Base classes and imported kinds are left out."""
    for value in vars(module).values():
        is_defined_here = (
            isinstance(value, type) and issubclass(value, Component) and value.__module__ == module.__name__
        )
        if is_defined_here and value.word_key in value.model_fields:
            yield value


class Make(Protocol):
    """The first argument of `build`. It builds the config of a child, and records the child's slot and kind."""

    attention_backend: AttentionBackend
    """The implementation of attention, for kinds that support several."""
    recompute: bool
    """If true, a layer saves only its arguments for the backward pass, and runs again there."""
    layer: int | None
    """The number of the layer of a stack that is being built, from 0; None outside of layers."""
    n_layers: int | None
    """The number of layers of the stack whose layer is being built; None outside of layers."""

    def __call__(self, config: Component, /, *args: Any, **arguments: Any) -> nn.Module:
        """Build `config` and pass the remaining arguments to its `build`."""
