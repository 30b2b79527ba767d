"""The registry: components that it accepts, errors for those that it rejects, and its queries."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Literal, Optional

import pytest

from tfkit.component import (
    AttentionPositionConfig,
    Component,
    Config,
    Dim,
    FFNConfig,
    InputPositionConfig,
    Make,
    MaskConfig,
    NormConfig,
    PositionConfig,
    Shared,
)
from tfkit.errors import SpecError
from tfkit.plugin.registry import Registered, Registry, check_config, field_docs


class LongConfig(FFNConfig):
    kind: Literal["long"] = "long"

    def build(self, make: Make) -> Any: ...


class AlsoLongConfig(FFNConfig):
    kind: Literal["long"] = "long"

    def build(self, make: Make) -> Any: ...


class ShortConfig(FFNConfig):
    kind: Literal["short"] = "short"

    def build(self, make: Make) -> Any: ...


class PlainNormConfig(NormConfig):
    kind: Literal["plain"] = "plain"

    def build(self, make: Make, width: int) -> Any: ...


class AddedConfig(InputPositionConfig):
    kind: Literal["added"] = "added"

    def build(self, make: Make, width: int) -> Any: ...


class InnerConfig(AttentionPositionConfig):
    kind: Literal["plain"] = "plain"

    def build(self, make: Make) -> Any: ...


class PartConfig(Config):
    part: Shared[Dim]


class SharingConfig(Component):
    """A slot of a plugin's own; the marker stands in every place that a field can have it."""

    slot = "sharing"

    direct: Shared[Dim]
    tree: Shared[NormConfig]
    optional_inside: Shared[NormConfig | None] = None
    optional_outside: Optional[Shared[NormConfig]] = None  # noqa: UP045
    union: Shared[bool] | PartConfig = True
    many: tuple[PartConfig, ...] = ()
    private: Dim = 1


class SharerConfig(SharingConfig):
    kind: Literal["sharer"] = "sharer"

    def build(self, make: Make) -> Any: ...


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    for config in (LongConfig, ShortConfig, PlainNormConfig, AddedConfig, InnerConfig):
        registry.add(config, "built in")
    return registry


def test_answers(registry: Registry) -> None:
    assert registry.slots() == ["ffn", "norm", "position"]
    assert list(registry.kinds("ffn")) == ["long", "short"]
    assert registry.kinds("router") == {}
    assert registry.find("ffn", "long") == Registered(LongConfig, "built in")
    assert registry.find("ffn", "plain") is None
    assert registry.find("router", "plain") is None
    assert registry.slots_of("plain") == ["norm", "position"]
    assert registry.slots_of("nothing") == []


def test_kinds_of_a_base(registry: Registry) -> None:
    assert list(registry.kinds("position")) == ["added", "plain"]
    assert list(registry.kinds("position", InputPositionConfig)) == ["added"]
    assert list(registry.kinds("position", AttentionPositionConfig)) == ["plain"]


def test_registries_are_apart(registry: Registry) -> None:
    assert Registry().slots() == []


def test_file(registry: Registry) -> None:
    component = registry.find("ffn", "long")
    assert component is not None
    assert component.file == __file__
    typed_at_a_prompt = type("Typed", (), {"__module__": "nowhere"})
    assert Registered(typed_at_a_prompt, "x").file == "nowhere"  # type: ignore[arg-type]


def test_shared_names(registry: Registry) -> None:
    assert registry.shared_names() == {"d_model"}
    registry.add(SharerConfig, "tfkit-sharer 1.0")
    names = {"direct", "tree", "optional_inside", "optional_outside", "union", "part"}
    assert registry.shared_names() == {"d_model"} | names


def test_duplicate_names_both(registry: Registry) -> None:
    with pytest.raises(SpecError) as caught:
        registry.add(AlsoLongConfig, "tfkit-long 0.1.0")
    assert str(caught.value) == inspect.cleandoc(f"""
        error: kind `long` of slot `ffn` is registered twice
           = built in: `LongConfig`, {__file__}:{inspect.getsourcelines(LongConfig)[1]}
           = tfkit-long 0.1.0: `AlsoLongConfig`, {__file__}:{inspect.getsourcelines(AlsoLongConfig)[1]}
           = help: rename one of the two, or switch one plugin off by its name: TFKIT_DISABLE=<name>
    """)
    assert registry.find("ffn", "long") == Registered(LongConfig, "built in")


def test_the_same_class_twice_is_a_duplicate(registry: Registry) -> None:
    with pytest.raises(SpecError, match="registered twice"):
        registry.add(LongConfig, "built in")


def test_a_slot_has_one_base_class(registry: Registry) -> None:
    class OtherFFNConfig(Component):
        slot = "ffn"

    class OtherConfig(OtherFFNConfig):
        kind: Literal["other"] = "other"

        def build(self, make: Make) -> Any: ...

    with pytest.raises(SpecError, match="slot `ffn` has two base classes"):
        registry.add(OtherConfig, "tfkit-other 1.0")
    assert registry.find("ffn", "other") is None


class NoKind(NormConfig):
    def build(self, make: Make, width: int) -> Any: ...


class TextKind(NoKind):
    kind: str = "text"


class TwoKinds(NoKind):
    kind: Literal["one", "two"] = "one"


class IntKind(NoKind):
    kind: Literal[1] = 1


class NoDefault(NoKind):
    kind: Literal["none"]


class OtherDefault(NoKind):
    kind: Literal["one"] = "two"  # type: ignore[assignment]


class OddWord(NoKind):
    kind: Literal["Odd-Word"] = "Odd-Word"


class NoBuild(NormConfig):
    kind: Literal["no_build"] = "no_build"


class NowhereConfig(PositionConfig):
    kind: Literal["nowhere"] = "nowhere"


class NoSlot(Component):
    kind: Literal["no_slot"] = "no_slot"


class OwnSlot(Component):
    slot = "ffn"
    kind: Literal["own_slot"] = "own_slot"


class MovedSlot(FFNConfig):
    slot: ClassVar[str] = "norm"
    kind: Literal["moved"] = "moved"


class TwoSlots(PlainNormConfig, FFNConfig):
    kind: Literal["two_slots"] = "two_slots"  # type: ignore[assignment]


class Unresolved(NoKind):
    kind: Literal["unresolved"] = "unresolved"
    width: Missing  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (3, "register() must be called with a subclass of tfkit.Component; got `int`"),
        (Registry, "register() must be called with a subclass of tfkit.Component; got `Registry`"),
        (
            PlainNormConfig(),
            "register() must be called with a subclass of tfkit.Component; got `PlainNormConfig`: "
            "pass the class instead of an object",
        ),
        (NoKind, '`NoKind` has no field `kind`: write `kind: Literal["name"] = "name"`'),
        (TextKind, '`TextKind.kind` must be a Literal of one name: write `kind: Literal["name"] = "name"`'),
        (TwoKinds, '`TwoKinds.kind` must be a Literal of one name: write `kind: Literal["name"] = "name"`'),
        (IntKind, '`IntKind.kind` must be a Literal of one name: write `kind: Literal["name"] = "name"`'),
        (NoDefault, "`NoDefault.kind`: its Literal 'none' must equal its default; got nothing"),
        (OtherDefault, "`OtherDefault.kind`: its Literal 'one' must equal its default; got 'two'"),
        (OddWord, "`OddWord.kind`: 'Odd-Word' is not a lower-case word such as `double_gelu`"),
        (NoBuild, "`NoBuild` does not define `build`"),
        (NowhereConfig, "`NowhereConfig` does not define `build`"),
        (NoSlot, "`NoSlot` needs the base class of a slot, such as tfkit.FFNConfig"),
        (OwnSlot, "`OwnSlot` needs the base class of a slot, such as tfkit.FFNConfig"),
        (MovedSlot, "`MovedSlot` must have a single slot; got ffn, norm"),
        (TwoSlots, "`TwoSlots` must have a single slot; got ffn, norm"),
        (Unresolved, "the annotations of `Unresolved` do not resolve: name 'Missing' is not defined"),
    ],
)
def test_refused(config: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        check_config(config)
    assert str(caught.value) == message
    with pytest.raises(TypeError):
        Registry().add(config, "built in")


class Base(Config):
    first: int
    """The first,
    on two lines."""
    second: int = 2
    """The second."""
    third: int = 3


class Derived(Base):
    second: int = 5
    """Another second."""
    fourth: int = 4

    class Inner(Config):
        first: int
        """Inside."""


def test_texts_of_a_class():
    assert field_docs(Base) == {"first": "The first,\non two lines.", "second": "The second."}


def test_texts_are_inherited_and_replaced():
    assert field_docs(Derived) == {"first": "The first,\non two lines.", "second": "Another second."}


def test_classes_inside_others():
    class Local(Config):
        here: int
        """Within a function."""

    assert field_docs(Derived.Inner) == {"first": "Inside."}
    assert field_docs(Local) == {"here": "Within a function."}


def test_the_contract_s_own():
    assert field_docs(MaskConfig)["right"] == "Number of keys after the query's position."
    assert field_docs(FFNConfig)["d_model"] == "Width of the residual stream."


def test_a_class_without_source_has_none():
    names = {"Config": Config, "__name__": "no_such_module"}
    exec("class Bare(Config):\n    size: int\n    'How large.'", names)
    assert field_docs(names["Bare"]) == {}
