"""The partial evaluator alone: from a module to the remaining code of its forward."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tfkit.errors import SpecError
from tfkit.tools.eject.inline import draw_in
from tfkit.tools.eject.specialise import Specialiser
from tfkit.tools.eject.values import ANY_VALUE, Items, Maybe, may_be_none


class Settings(nn.Module):
    """Attributes of every kind that a configuration decides."""

    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no, self.none, self.zero, self.one = True, False, None, 0, 1
        self.size, self.rate, self.sizes = 7, 0.5, [4, 4]
        self.linear = nn.Linear(2, 2)
        self.missing: nn.Module | None = None
        self.bias: nn.Parameter | None = None
        self.weight = nn.Parameter(torch.ones(2))
        self.layers = nn.ModuleList([nn.ReLU(), nn.Tanh()])


def specialised(module: nn.Module) -> Specialiser:
    specialiser = Specialiser(module)
    specialiser.run()
    return specialiser


def left_of(cls: type[nn.Module]) -> str:
    """The forward of a module, once everything that its attributes decide is decided."""
    module = cls()
    body = specialised(module).functions[module, "forward"].body
    return "\n".join(ast.unparse(ast.fix_missing_locations(step)) for step in body)


class Branches(Settings):
    def forward(self, x: Tensor) -> Tensor:
        if self.yes:
            x = x + 1
        if self.no:
            x = x + 2
        if self.none is not None:
            x = x + 3
        if self.zero:
            x = x + 4
        elif self.one:
            x = x + 5
        return x


class Numbers(Settings):
    def forward(self, x: Tensor) -> Tensor:
        if self.size > 5:
            x = x * self.size
        if self.rate == 0.25:
            x = x * 2
        if self.sizes[0] == 4:
            x = x + self.rate
        return x


class Parts(Settings):
    def forward(self, x: Tensor) -> Tensor:
        if self.missing is not None:
            x = self.missing(x)
        if self.linear is not None:
            x = self.linear(x)
        bias = self.bias
        x = x if bias is None else x + bias
        if self.weight is not None:
            x = x * self.weight
        return x


class Depends(Settings):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return x
        if self.training:
            x = x + 1
        if x.size(0) > 2:
            x = x * mask
        return x


class Both(Settings):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.yes and mask is not None:
            x = x * mask
        if self.no or x.size(0) > 2:
            x = x + 1
        if self.no and x.size(0) > 3:
            x = x + 2
        if not self.yes:
            x = x + 3
        return x


class Narrowed(Settings):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            if mask is None:
                x = x + 1
            x = x * mask
        return x


class Ternary(Settings):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + 1 if self.yes else x + 2
        y = None if self.yes else x
        if y is not None:
            x = x + y
        return x if mask is None else x * mask


class Called(Settings):
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.same(x), True, 2.0)

    def same(self, x: Tensor) -> Tensor:
        return x

    def scaled(self, x: Tensor, really: bool, by: float) -> Tensor:
        if really:
            x = x * by
        return x


class Loops(Settings):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def double(x: Tensor) -> None:
    x.mul_(2)


def check(x: Tensor) -> None:
    assert x.dim() > 0


class Effects(Settings):
    def forward(self, x: Tensor) -> Tensor:
        double(x)
        check(x)
        return x


class Plus(Settings):
    def forward(self, x: Tensor) -> Tensor:
        n = x.size(0) + self.zero
        return x[: n - self.zero]


class Undecided(Settings):
    def forward(self, x: Tensor) -> Tensor:
        first, rest = x.unbind()
        shape = (*x.shape, 1)
        if 0 < self.size < 9:
            first = {"a": first}["a"] + rest.view(*shape[:2])
        if self.rate > 0.1 and f"{self.size} of {x.dim()}" == f"{self.one}":
            raise ValueError(f"{self.no} is {self.one:02d}") from None
        return first


@cache
def is_installed(library: str) -> bool:
    return find_spec(library) is not None


class Installed(Settings):
    """Whether a library can be imported is no matter of the machine that writes the file."""

    def forward(self, x: Tensor) -> Tensor:
        if is_installed("torch") or is_installed("fla"):
            x = x + 1
        return x


class Unpacked(Settings):
    """A tuple, or what a function returns: each part may be None."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = (x, None) if x.size(0) > 2 else x.chunk(2)
        c, _ = [None, x]
        if b is None or c is None:
            return a
        return b


LEFT = {
    Undecided: (
        "first, rest = x.unbind()\nshape = (*x.shape, 1)\n"
        "if 0 < self.size < 9:\n"
        "    first = {'a': first}['a'] + rest.view(*shape[:2])\n"
        "if f'{self.size} of {x.dim()}' == '1':\n    raise ValueError('False is 01') from None\nreturn first"
    ),
    Branches: "return x + 1 + 5",
    Numbers: "return x * self.size + self.rate",
    Parts: "return self.linear(x) * self.weight",
    Depends: (
        "if mask is None:\n    return x\nif self.training:\n    x = x + 1\n"
        "if x.size(0) > 2:\n    x = x * mask\nreturn x"
    ),
    Both: "if mask is not None:\n    x = x * mask\nif x.size(0) > 2:\n    x = x + 1\nreturn x",
    Narrowed: "if mask is not None:\n    x = x * mask\nreturn x",
    Ternary: "x = x + 1\nreturn x if mask is None else x * mask",
    Called: "return self.scaled(x)",
    Loops: "for layer in self.layers:\n    x = layer(x)\nreturn x",
    Effects: "double(x)\nreturn x",
    Plus: "return x[:x.size(0)]",
    Installed: "if is_installed('torch') or is_installed('fla'):\n    x = x + 1\nreturn x",
    Unpacked: (
        "a, b = (x, None) if x.size(0) > 2 else x.chunk(2)\nc, _ = [None, x]\n"
        "if b is None or c is None:\n    return a\nreturn b"
    ),
}


@pytest.mark.parametrize("cls", LEFT, ids=lambda cls: cls.__name__)
def test_what_is_decided_falls_away(cls: type[nn.Module]) -> None:
    assert left_of(cls) == LEFT[cls]


def test_an_argument_that_is_the_same_constant_everywhere_is_none() -> None:
    module = Called()
    specialiser = specialised(module)
    scaled = specialiser.functions[module, "scaled"]
    assert scaled.parameters == ["x"]
    assert [ast.unparse(step) for step in scaled.body] == ["return x * 2.0"]


class Twice(Settings):
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, 2.0) + self.scaled(x, 3.0)

    def scaled(self, x: Tensor, by: float) -> Tensor:
        return x * by


def test_one_that_differs_between_calls_stays() -> None:
    module = Twice()
    assert specialised(module).functions[module, "scaled"].parameters == ["x", "by"]
    assert left_of(Twice) == "return self.scaled(x, 2.0) + self.scaled(x, 3.0)"


class State(NamedTuple):
    mask: Tensor | None
    table: Tensor | None
    n: int


class Reads(nn.Module):
    def forward(self, x: Tensor, state: State) -> Tensor:
        if state.table is not None:
            x = x * state.table
        if state.mask is not None:
            x = x + state.mask
        return x


class Makes(Settings):
    def __init__(self) -> None:
        super().__init__()
        self.child = Reads()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.child(x, State(mask, None, 3))


def test_of_a_named_tuple_only_what_is_not_constant_is_left() -> None:
    module = Makes()
    specialiser = specialised(module)
    assert specialiser.records.alone(State) == "mask"
    body = specialiser.functions[module.child, "forward"].body
    assert "table" not in "\n".join(map(ast.unparse, body))


class Alone(Settings):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Reads(), Reads()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x, of_mask(mask))
        return self.second(x, State(mask, x, 3))


def of_mask(mask: Tensor) -> State:
    return State(mask, None, 3)


def test_a_named_tuple_that_is_written_as_its_only_field_stays_a_named_tuple() -> None:
    module = Alone()
    specialiser = specialised(module)
    assert specialiser.records.left(State) == ["mask", "table"]
    body = specialiser.functions[module.first, "forward"].body
    assert "\n".join(map(ast.unparse, body)) == "return x + state.mask"


class ReadsField(Settings):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.masked(x, self.mask_of(State(mask, None, 3)))

    def mask_of(self, state: State) -> Tensor | None:
        return state.mask

    def masked(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x if mask is None else x + mask


def test_the_only_field_of_a_named_tuple_may_be_none_if_a_function_returns_it() -> None:
    module = ReadsField()
    body = specialised(module).functions[module, "masked"].body
    assert "\n".join(map(ast.unparse, body)) == "return x if mask is None else x + mask"


class Unbinds(Settings):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.halves(x)
        return first * second

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.unbind()
        return self.linear(first), second


class Shifts(Settings):
    def forward(self, x: Tensor) -> Tensor:
        first = self.linear(x).sum()
        first, second = self.halves(x, first)
        return first * second

    def halves(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.unbind()
        return first + shift, second


def test_a_method_is_inlined_if_it_assigns_only_names_that_its_call_assigns_and_does_not_read() -> None:
    bodies = {}
    for cls in (Unbinds, Shifts):
        module = cls()
        specialiser = specialised(module)
        draw_in(specialiser.functions, specialiser.read)
        body = specialiser.functions[module, "forward"].body
        bodies[cls] = "\n".join(ast.unparse(ast.fix_missing_locations(step)) for step in body)
    assert bodies[Unbinds] == "first, second = x.unbind()\nreturn self.linear(first) * second"
    assert bodies[Shifts].startswith("first = self.linear(x).sum()\nfirst, second = self.halves(x, first)\n")


def test_a_list_or_none_may_be_none() -> None:
    tensors = Items(ANY_VALUE)
    assert may_be_none(Maybe(tensors))
    assert not may_be_none(tensors)


class Rescales(Settings):
    def forward(self, x: Tensor) -> Tensor:
        y = self.rescaled(x)
        return (y + x) * y

    def rescaled(self, x: Tensor) -> Tensor:
        x, scale = x * 2, self.weight
        return x * scale


def test_a_method_that_assigns_a_parameter_is_not_inlined_if_the_argument_is_used_later() -> None:
    specialiser = specialised(module := Rescales())
    draw_in(specialiser.functions, {})
    assert (module, "rescaled") in specialiser.functions


class Alike(Settings):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled(True), Scaled(False)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Scaled(nn.Module):
    def __init__(self, on: bool) -> None:
        super().__init__()
        self.on = on

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.on else x


def test_modules_that_differ_have_a_forward_each() -> None:
    module = Alike()
    specialiser = specialised(module)
    texts = [ast.unparse(specialiser.functions[layer, "forward"].body[0]) for layer in module.layers]
    assert texts == ["return 2 * x", "return x"]


class Accumulated(Settings):
    def forward(self, x: Tensor) -> Tensor:
        return total(x, None) + doubled(x, None)


def total(x: Tensor, state: Tensor | None) -> Tensor:
    for row in x.unbind():
        state = row if state is None else state + row
    assert state is not None
    return state


def doubled(x: Tensor, factor: int | None) -> Tensor:
    factor = x.size(0)
    return x * factor


def test_a_constant_argument_that_is_assigned_later_keeps_its_first_value() -> None:
    functions = specialised(Accumulated()).functions
    texts = {name: ast.unparse(function.body[0]) for (_, name), function in functions.items() if name != "forward"}
    assert texts == {total: "state = None", doubled: "return x * x.size(0)"}


class While(Settings):
    def forward(self, x: Tensor) -> Tensor:
        while x.sum() > 1:
            x = x / 2
        return x


class Lambda(Settings):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda y: 2 * y)(x)


class Starred(Settings):
    def forward(self, x: Tensor) -> Tensor:
        return self.add(*x.unbind())

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class Unknown(Settings):
    def forward(self, x: Tensor) -> Tensor:
        return x + nowhere  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (While, "a `while`"),
        (Lambda, "a `lambda`"),
        (Starred, "a `*` or a `**` in the call of a module or of a function"),
        (Unknown, "nothing says what `nowhere` is"),
    ],
)
def test_what_cannot_be_written_out_names_its_class(cls: type[nn.Module], why: str) -> None:
    with pytest.raises(SpecError) as caught:
        left_of(cls)
    (only,) = caught.value.diagnostics
    assert only.message == f"`{cls.__name__}` (test_specialise.py) cannot be ejected: forward: {why}"


class Half(nn.Module):
    """Half of its input, or nothing."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor | None:
        return None if self.scale is None else x * self.scale


class Halves(nn.Module):
    """Modules of which only some return a value."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Half(None), Half(0.5)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            half = part(x)
            if half is not None:
                x = x + half
        return x


def test_a_call_of_several_modules_has_the_results_of_all() -> None:
    assert "if half is not None:" in left_of(Halves)
