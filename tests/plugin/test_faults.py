"""A plugin whose code fails is named, with what failed and where: no traceback, and no blame for the spec."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest
from pydantic import field_validator
from torch import nn

import tfkit
from tfkit.component import BlockConfig, FFNConfig, Make, Signal, Signals, Wire
from tfkit.plugin.manager import Plugins
from tfkit.plugin.registry import Registry

BUILT_IN = tfkit.load_plugins(entry_points=False)
HEAD = "tfkit: 1\nname: m\nd_model: 8\nvocab_size: 11\n"
STACK = (
    HEAD
    + """\
graph:
  embedding: {block: embedding}
  body: {block: encoder, n_layers: 1, ffn: FFN}
"""
)


def plugins(*configs: type[Any]) -> Plugins:
    registry = Registry()
    for slot in BUILT_IN.registry.slots():
        for one in BUILT_IN.registry.kinds(slot).values():
            registry.add(one.config, one.plugin)
    for config in configs:
        registry.add(config, "tfkit-odd 0.1")
    return Plugins(registry, ())


def refusal(text: str, *configs: type[Any]) -> tfkit.SpecError:
    with pytest.raises(tfkit.SpecError) as caught:
        tfkit.build(tfkit.loads(text, plugins=plugins(*configs)), device="meta")
    assert len(caught.value.diagnostics) == 1
    return caught.value


class Odd(FFNConfig):
    """Fails where it is told to."""

    kind: Literal["odd"] = "odd"
    where: str = ""
    wrong: ClassVar[Any] = TypeError("unsupported operand")
    number: int = 0

    @field_validator("number")
    @classmethod
    def _number(cls, number: int) -> int:
        if number == 1:
            raise KeyError("in a validator")
        if number == 2:
            raise ValueError("`number` is 2 for once")
        return number

    def check(self) -> None:
        super().check()
        if self.where == "check":
            raise self.wrong
        if self.where == "plain":
            raise ValueError("a plain ValueError is the plugin's own words")
        if self.where == "assert":
            raise AssertionError("cannot be")

    def build(self, make: Make) -> nn.Module:
        if self.where == "build":
            raise self.wrong
        if self.where == "nothing":
            return None  # type: ignore[return-value]
        return nn.Identity()


class OddBlock(BlockConfig):
    """Fails where it is told to."""

    block: Literal["odd"] = "odd"
    input: Wire | None = None
    where: str = ""

    def output(self, inputs: Signals) -> Signal:
        if self.where == "output":
            raise ZeroDivisionError
        return inputs["input"]  # type: ignore[no-any-return]

    def table(self) -> Signal | None:
        if self.where == "table":
            raise AttributeError("no such thing")
        return None

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        return nn.Identity()


def test_it_works_when_nothing_fails() -> None:
    text = STACK.replace("FFN", "odd") + "  last: {block: odd}\n"
    tfkit.build(tfkit.loads(text, plugins=plugins(Odd, OddBlock)), device="meta")


@pytest.mark.parametrize(
    ("ffn", "message", "cause"),
    [
        (
            "{kind: odd, where: check}",
            "ffn kind `odd` failed in the check of its config",
            "TypeError: unsupported operand",
        ),
        ("{kind: odd, number: 1}", "ffn kind `odd` failed in the check of its config", "KeyError: 'in a validator'"),
        ("{kind: odd, where: build}", "ffn kind `odd` failed in `build`", "TypeError: unsupported operand"),
        ("{kind: odd, where: nothing}", "ffn kind `odd` failed in `build`", "TypeError: it returned NoneType, not"),
    ],
)
def test_a_component_that_fails(ffn: str, message: str, cause: str) -> None:
    error = refusal(STACK.replace("FFN", ffn), Odd).diagnostics[0]
    assert error.message == message
    assert error.notes[0].startswith(cause)
    assert all(note.startswith(f"{__file__}:") for note in error.notes[1:])
    assert len(error.notes) == 1 + ("nothing" not in ffn)
    assert error.help == f"the fault is not in the spec but in the component, which is written in {__name__}"
    assert error.path.startswith("graph.body")
    assert error.span is not None
    assert error.span.line == 7


@pytest.mark.parametrize(
    ("where", "cause"), [("output", "ZeroDivisionError"), ("table", "AttributeError: no such thing")]
)
def test_a_block_that_fails(where: str, cause: str) -> None:
    text = STACK.replace("FFN", "{kind: relu, d_ff: 3}") + f"  last: {{block: odd, where: {where}}}\n"
    error = refusal(text, OddBlock).diagnostics[0]
    assert error.message == f"block `odd` failed in `{where}`"
    assert error.notes[0] == cause
    assert error.path == "graph.last"


@pytest.mark.parametrize(
    ("ffn", "message", "path"),
    [
        ("{kind: odd, where: plain}", "a plain ValueError is the plugin's own words", "graph.body.ffn"),
        ("{kind: odd, number: 2}", "`number`: `number` is 2 for once", "graph.body.ffn.number"),
    ],
)
def test_a_plain_value_error_is_for_the_user(ffn: str, message: str, path: str) -> None:
    error = refusal(STACK.replace("FFN", ffn), Odd).diagnostics[0]
    assert (error.message, error.path) == (message, path)


def test_one_mistake_hides_what_a_check_makes_of_it() -> None:
    """A check that fails because a value is wrong already is no second error."""
    error = refusal(STACK.replace("FFN", "{kind: odd, where: check, nmber: 1}"), Odd).diagnostics[0]
    assert error.message == "unknown key `nmber`"
