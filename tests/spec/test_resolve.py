"""The resolver alone: from a config class and a text to values with origins, or errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from pydantic.fields import FieldInfo

import tfkit
from tfkit.component import Component, Config, Make, Shared, slot
from tfkit.errors import Invalid
from tfkit.plugin.manager import Plugins
from tfkit.plugin.registry import Registry
from tfkit.spec.annotations import allowed_values
from tfkit.spec.resolve import INVALID, Resolver, Scoped
from tfkit.spec.source import parse


class Shape(Component):
    """A slot of this test."""

    slot = "shape"

    def build(self, make: Make) -> None:
        raise NotImplementedError


class SquareConfig(Shape):
    """All sides alike."""

    kind: Literal["square"] = "square"
    side: Shared[int]
    rounded: bool = False


class BoxConfig(Shape):
    """Two sides."""

    kind: Literal["box"] = "box"
    side: Shared[int]
    other: int = 1

    def check(self) -> None:
        super().check()
        if self.other > self.side:
            raise Invalid("other", f"other ({self.other}) must be at most side ({self.side})")


class Drawing(Config):
    """What is resolved here."""

    side: Shared[int] = 5
    first: Shape = slot("square")
    second: Shape | None = None
    several: tuple[Shape, ...] = ()
    named: dict[str, Shape] | None = None
    factor: float = 1.0


def plugins() -> Plugins:
    registry = Registry()
    registry.add(SquareConfig, "a plugin")
    registry.add(BoxConfig, "a plugin")
    return Plugins(registry, ())


def resolved(text: str, shared: str = "") -> tuple[Any, Resolver]:
    """The drawing of a text, with the values that stand around it."""
    resolver = Resolver(plugins())
    scope: dict[str, Scoped] = {}
    if shared:
        scope |= {name: Scoped(node, (name,), scope) for name, node in parse(shared, "around").items.items()}  # type: ignore[union-attr]
    node: Any = parse(text, "spec.yaml")
    return resolver.config(Drawing, node, ("drawing",), scope), resolver


def complaints(text: str, shared: str = "") -> dict[str, str]:
    actual, resolver = resolved(text, shared)
    assert actual is INVALID
    return {diagnostic.path: diagnostic.message for diagnostic in resolver.diagnostics}


def test_defaults_bare_words_and_mappings() -> None:
    text = "side: 5\nsecond: box\nseveral: [square, {kind: box, other: 3}]\nnamed: {a: {kind: square, side: 9}}"
    actual, resolver = resolved(text)
    assert resolver.diagnostics == []
    assert actual == Drawing(
        side=5,
        first=SquareConfig(side=5),
        second=BoxConfig(side=5),
        several=(SquareConfig(side=5), BoxConfig(side=5, other=3)),
        named={"a": SquareConfig(side=9)},
    )


def test_a_part_inherits_from_what_is_around_it_and_the_nearest_wins() -> None:
    actual, resolver = resolved("side: 7\nfirst: square\nsecond: {kind: box, side: 3}", "side: 11")
    assert (actual.side, actual.first.side, actual.second.side) == (7, 7, 3)
    origins = resolver.provenance.origins
    assert origins["drawing", "side"].how == "given"
    assert origins["drawing", "first", "side"].how == "inherited"
    assert resolver.provenance.written(("drawing", "first", "side")) == ("drawing", "side")
    assert origins["drawing", "second", "side"].how == "given"
    assert origins["drawing", "second", "other"].how == "default"


def test_a_value_inside_an_inherited_config_was_written_where_it_is_inherited_from() -> None:
    text = "d_condition: 0\nnorm: adaptive\ngraph: {norm: {block: norm, input: x}}"
    with pytest.raises(tfkit.SpecError) as caught:
        tfkit.loads(f"tfkit: 1\nname: m\ninputs: {{x: {{type: features, width: 8}}}}\n{text}")
    assert [(error.path, error.span.line) for error in caught.value.diagnostics if error.span] == [("d_condition", 4)]


def test_what_nobody_takes_is_not_used() -> None:
    _, resolver = resolved("first: square", "side: 11")
    assert resolver.used == {("side",)}
    _, resolver = resolved("side: 2\nfirst: square", "side: 11")
    assert ("side",) not in resolver.used


def test_arithmetic_over_what_is_around() -> None:
    actual, resolver = resolved("side: 8\nsecond: {kind: box, other: side // 2}\nfactor: 1 / 4")
    assert resolver.diagnostics == []
    assert (actual.second.other, actual.factor) == (4, 0.25)


@pytest.mark.parametrize("word", ["null", "none", "false"])
def test_an_optional_slot_may_be_empty(word: str) -> None:
    actual, resolver = resolved(f"side: 1\nsecond: {word}")
    assert resolver.diagnostics == []
    assert actual.second is None


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("side: 1\nfrist: square", "drawing.frist", "unknown key `frist`"),
        ("side: 1\nfirst: circle", "drawing.first.kind", "unknown shape kind `circle`"),
        ("side: 1\nfirst: {kind: box, rounded: true}", "drawing.first.rounded", "rounded"),
        ("side: 1\nfirst: 3", "drawing.first", "3"),
        ("side: 1\nseveral: square", "drawing.several", "list"),
        ("side: 1\nnamed: [square]", "drawing.named", "names"),
        ("side: wide", "drawing.side", "wide"),
        ("side: true", "drawing.side", "true"),
        ("side: 1.5", "drawing.side", "1.5"),
        ("side: 1\nfirst: {kind: box, other: 2}", "drawing.first.other", "other (2) must be at most side (1)"),
        ("side: 1\nfactor: sid * 2", "drawing.factor", "sid"),
    ],
)
def test_a_mistake_is_told_with_its_path(text: str, path: str, message: str) -> None:
    ((where, excerpt),) = complaints(text).items()
    assert where == path
    assert message in excerpt


def test_each_mistake_is_told_once_and_all_of_them() -> None:
    actual = complaints("side: wide\nfirst: circle\nsecond: {kind: box, other: many, more: 1}")
    assert len(actual) == 4


def test_relations_are_not_judged_where_a_value_is_broken() -> None:
    actual = complaints("side: wide\nsecond: {kind: box, other: 99}")
    assert len(actual) == 1


def test_a_key_that_is_missing_is_told() -> None:
    class Strict(Config):
        side: int

    resolver = Resolver(plugins())
    node: Any = parse("{}", "spec.yaml")
    assert resolver.config(Strict, node, ("strict",), {}) is INVALID
    (only,) = resolver.diagnostics
    assert "side" in only.message


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({"ge": 0.0}, "a number of at least 0.0"),
        ({"le": 0.0}, "a number of at most 0.0"),
        ({"gt": 0.0, "lt": 1.0}, "a number above 0.0 and below 1.0"),
        ({"gt": -1.0, "le": 0.0}, "a number above -1.0 and of at most 0.0"),
        ({"lt": 0.0}, "a number below 0.0"),
        ({"ge": -2.0, "le": 0.0}, "a number from -2.0 to 0.0"),
        ({"gt": 0}, "an integer of at least 1"),
        ({"gt": -1, "le": 7}, "an integer from 0 to 7"),
    ],
)
def test_an_error_states_the_bounds_of_a_number(bounds: dict[str, float], text: str) -> None:
    """Also a bound of 0."""
    kind = type(next(iter(bounds.values())))
    assert allowed_values(FieldInfo.from_annotation(Annotated[kind, Field(**bounds)]), nested=0) == [text]
