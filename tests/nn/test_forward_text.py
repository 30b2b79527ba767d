"""`tfkit.nn.forward_text`: its code is readable, and runs the steps in order."""

from __future__ import annotations

import keyword
import math
import operator
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tfkit.nn.forward_text import GRAPH, LAYER, WIDTH, Operation, Style, Value, forward_text

STYLES = [LAYER, GRAPH, Style(calls=1, stream="x"), Style(calls=9, stream=None)]


def written(steps: Mapping[Value, Operation], style: Style = LAYER) -> tuple[str, Callable[..., Any]]:
    """The text, and the function that it is."""
    names: dict[str, Any] = {}
    text = forward_text(steps, names, style)
    exec(compile(text, "<test>", "exec", dont_inherit=True), names)
    return text, names["forward"]


def steps_of(*steps: Operation) -> dict[Value, Operation]:
    """Steps whose values are `%0`, `%1` and so on."""
    return {Value(f"%{number}"): step for number, step in enumerate(steps)}


def body(*steps: Operation, style: Style = LAYER) -> list[str]:
    """The lines below the signature for steps that follow an input x, `%0`."""
    text, _ = written(steps_of(Operation("placeholder", "x", "x", annotation=Tensor), *steps), style)
    return [line.removeprefix("    ") for line in text.splitlines()[1:]]


def call(name: str, *args: Any, **kwargs: Any) -> Operation:
    return Operation("call_module", name, name, args, kwargs)


def apply(name: str, function: Any, *args: Any, **kwargs: Any) -> Operation:
    return Operation("call_function", name, function, args, kwargs)


def result(output: Any) -> Operation:
    return Operation("output", "output", "output", (output,))


X, V1, V2, V3, V4 = (Value(f"%{number}") for number in range(5))


def test_a_value_that_is_read_once_stands_where_it_is_read() -> None:
    steps = [call("norm", X), call("ffn", V1), apply("sum", operator.add, X, V2), result(V3)]
    assert body(*steps) == ["return x + self.ffn(self.norm(x))"]


def test_a_residual_stream_is_read_line_by_line() -> None:
    first = [call("norm", X), call("ffn", V1), apply("sum", operator.add, X, V2)]
    second = [call("norm_2", V3), call("ffn_2", V4), apply("sum_2", operator.add, V3, Value("%5"))]
    assert body(*first, *second, result(Value("%6"))) == [
        "x = x + self.ffn(self.norm(x))",
        "return x + self.ffn_2(self.norm_2(x))",
    ]


def test_it_has_a_name_where_something_else_runs_before() -> None:
    steps = [call("first", X), call("second", X), apply("both", torch.cat, [V2, V1]), result(V3)]
    assert body(*steps) == ["first = self.first(x)", "return torch.cat([self.second(x), first])"]


def test_the_stream_is_called_x_until_its_last_reader() -> None:
    steps = [call("norm", X), call("a", V1), call("b", V1), apply("c", torch.cat, [X, V2, V3]), result(V4)]
    assert body(*steps) == ["norm = self.norm(x)", "return torch.cat([x, self.a(norm), self.b(norm)])"]
    steps = [call("norm", X), call("a", V1), call("b", V1), apply("c", torch.cat, [V2, V3]), result(V4)]
    assert body(*steps) == ["x = self.norm(x)", "return torch.cat([self.a(x), self.b(x)])"]
    assert body(*steps, style=GRAPH)[0] == "norm = self.norm(x)"


def test_no_line_is_longer_or_deeper_than_a_person_reads() -> None:
    chain = [call(f"a_step_with_a_long_name_{n}", Value(f"%{n}")) for n in range(3)]
    lines = body(*chain, result(V3), style=Style(calls=9, stream="x"))
    assert len(lines) == 1
    assert len(lines[0]) < WIDTH
    chain += [call(f"a_step_with_a_long_name_{n}", Value(f"%{n}")) for n in range(3, 9)]
    lines = body(*chain, result(Value("%9")), style=Style(calls=9, stream="x"))
    assert len(lines) > 1
    assert max(map(len, lines)) < WIDTH
    assert body(*chain[:3], result(V3), style=GRAPH) == [
        "a_step_with_a_long_name_1 = self.a_step_with_a_long_name_1(self.a_step_with_a_long_name_0(x))",
        "return self.a_step_with_a_long_name_2(a_step_with_a_long_name_1)",
    ]


def test_a_long_call_has_its_arguments_on_lines_of_their_own() -> None:
    few, many = {f"number_{n}": X for n in range(9)}, {f"number_{n}": X for n in range(12)}
    lines = body(call("ffn", **few), result(V1))
    assert [lines[0], lines[-1]] == ["return self.ffn(", ")"]
    assert len(lines) == 3
    lines = body(call("ffn", **many), result(V1))
    assert lines[1] == "    number_0=x,"
    assert len(lines) == 14


def test_a_weight_does_not_keep_a_call_from_its_line() -> None:
    weight = Operation("get_attr", "table_weight", "table.weight")
    steps = [call("a", X), call("b", V1), weight, call("c", V2, tie=V3), result(V4)]
    assert body(*steps, style=GRAPH) == ["b = self.b(self.a(x))", "return self.c(b, tie=self.table.weight)"]


def test_what_nothing_reads_runs_all_the_same() -> None:
    assert body(call("a", X), call("b", X), result(V2)) == ["self.a(x)", "return self.b(x)"]
    assert body(apply("a", operator.getitem, X, 1), call("b", X), result(V2)) == ["return self.b(x)"]


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (apply("y", operator.mul, X, 0.5), "x * 0.5"),
        (apply("y", operator.sub, 1, X), "1 - x"),
        (apply("y", operator.getitem, X, 0), "x[0]"),
        (apply("y", operator.getitem, X, (slice(None), slice(None, -1), ..., None)), "x[:, :-1, ..., None]"),
        (apply("y", operator.getitem, X, slice(0, 8, 2)), "x[0:8:2]"),
        (apply("y", operator.getitem, {"a": X}, "a"), '{"a": x}["a"]'),
        (apply("y", torch.add, X, X, alpha=0.2), "torch.add(x, x, alpha=0.2)"),
        (apply("y", F.embedding, X, X), "F.embedding(x, x)"),
        (apply("y", operator.neg, X), "operator.neg(x)"),
        (apply("y", math.sqrt, X), "sqrt(x)"),
        (apply("y", torch.zeros, (2,), dtype=torch.int64), "torch.zeros((2,), dtype=torch.int64)"),
        (apply("y", torch.clamp, X, -math.inf), 'torch.clamp(x, float("-inf"))'),
        (apply("y", print, X, "it's", 'a "b"', "c"), 'print(x, "it\'s", \'a "b"\', "c")'),
        (Operation("call_method", "y", "sum", (X,), {"dim": 1}), "x.sum(dim=1)"),
        (Operation("call_module", "y", "layers.0.if", (X,)), 'getattr(getattr(self.layers, "0"), "if")(x)'),
    ],
)
def test_operators_functions_and_constants(step: Operation, text: str) -> None:
    assert body(step, result(V1)) == [f"return {text}"]


@pytest.mark.parametrize(
    ("inner", "outer", "text"),
    [
        (operator.add, operator.mul, "(x + 2) * 3"),
        (operator.mul, operator.add, "x * 2 + 3"),
        (operator.sub, operator.getitem, "(x - 2)[3]"),
    ],
)
def test_brackets_stand_where_they_matter(inner: Any, outer: Any, text: str) -> None:
    assert body(apply("a", inner, X, 2), apply("b", outer, V1, 3), result(V2)) == [f"return {text}"]


def test_the_right_operand_of_a_difference() -> None:
    steps = [apply("a", operator.sub, 3, X), apply("b", operator.sub, 2, V1), result(V2)]
    assert body(*steps) == ["return 2 - (3 - x)"]


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (Tensor, "x: Tensor"),
        (Tensor | None, "x: Tensor | None"),
        (dict[str, list[Tensor]], "x: dict[str, list[Tensor]]"),
        (Pair, "x: Pair"),
        (tuple[Tensor, ...], "x: Annotation"),
        (None, "x"),
    ],
)
def test_annotations(annotation: Any, text: str) -> None:
    steps = steps_of(Operation("placeholder", "x", "x", annotation=annotation), result(Pair(X, [X, (X,)])))
    code, forward = written(steps)
    assert code.splitlines() == [f"def forward(self, {text}):", "    return Pair(x, [x, (x,)])"]
    assert forward.__annotations__.get("x") == annotation
    assert forward(None, 5) == Pair(5, [5, (5,)])


def test_defaults_and_what_is_returned() -> None:
    inputs = [
        Operation("placeholder", "x", "x", annotation=Tensor),
        Operation("placeholder", "y", "y", (None,), {}, Tensor | None),
    ]
    step = Operation("output", "output", "output", ((X, V1),), {}, tuple[Tensor, Tensor | None])
    code, forward = written(steps_of(*inputs, step))
    assert code == (
        "def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:\n    return x, y\n"
    )
    assert forward(None, 1) == (1, None)
    edited = Operation("output", "output", "output", ((X, V1),), {}, Tensor)
    assert "->" not in written(steps_of(*inputs, edited))[0]


# ---- whatever the steps are, they run in their order ----

NAMES = ["x", "y", "f", "g", "Tensor", "torch", "x_1", "f_1", "self", "print", "lambda"]
LOG: list[Any] = []


class Number:
    """A number that changes whenever something is done with it, and tells of it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __repr__(self) -> str:
        return str(self.value)


def function(name: str, factor: int) -> Callable[..., Number]:
    """A function of that name, unlike all others, that changes what it is given."""

    def act(*args: Any, **kwargs: Any) -> Number:
        arguments = [*args, *kwargs.values()]
        LOG.append((factor, repr(arguments)))
        for argument in arguments:
            if isinstance(argument, Number):
                argument.value = argument.value * 3 + factor
        return Number(sum(argument.value for argument in arguments if isinstance(argument, Number)) % 1009 + factor)

    act.__name__ = name
    return act


FUNCTIONS = [function(name, factor) for factor, name in enumerate([*NAMES, *NAMES], 1)]


class Owner:
    """What the forward is a method of."""

    def __init__(self) -> None:
        self.weight = Number(7)

    child = staticmethod(function("child", 99))


def program(draw: random.Random) -> dict[Value, Operation]:
    """Some steps that read each other."""
    inputs = draw.sample([name for name in NAMES if name != "self" and not keyword.iskeyword(name)], 2)
    steps = steps_of(*(Operation("placeholder", name, name, (None,) * index) for index, name in enumerate(inputs)))
    fresh: list[Value] = []
    for number in range(2, draw.randint(4, 12)):
        names = list(steps)
        args = [fresh.pop() if fresh and draw.random() < 0.7 else draw.choice(names) for _ in range(draw.randint(1, 3))]
        args = args[::-1] if draw.random() < 0.7 else args
        name = draw.choice(NAMES)
        ways = [apply(name, draw.choice(FUNCTIONS), *args), apply(name, draw.choice(FUNCTIONS), args[0], k=args[-1])]
        ways += [Operation("call_module", name, "child", tuple(args)), Operation("get_attr", name, "weight")]
        steps[value := Value(f"%{number}")] = draw.choices(ways, [4, 2, 2, 1])[0]
        fresh.append(value)
    last = list(steps)
    steps[Value("%out")] = result(tuple(draw.choices(last, k=2)) if draw.random() < 0.5 else last[-1])
    return steps


def interpreted(steps: Mapping[Value, Operation], owner: Owner, inputs: list[Number]) -> Any:
    """What the steps give, one after the other."""
    values: dict[Value, Any] = {}
    options = iter(inputs)
    for value, step in steps.items():
        args = [values[item] for item in step.args] if step.op.startswith("call") else []
        kwargs = {name: values[item] for name, item in step.kwargs.items()}
        if step.op == "placeholder":
            values[value] = next(options)
        elif step.op == "get_attr":
            values[value] = owner.weight
        elif step.op == "output":
            (output,) = step.args
            return tuple(values[item] for item in output) if isinstance(output, tuple) else values[output]
        else:
            values[value] = (owner.child if step.op == "call_module" else step.target)(*args, **kwargs)
    raise AssertionError


@pytest.mark.parametrize("style", STYLES)
def test_steps_run_in_their_order_whatever_they_are_called(style: Style) -> None:
    for seed in range(400):
        steps = program(random.Random(seed))
        text, forward = written(steps, style)
        LOG.clear()
        expected, log = repr(interpreted(steps, Owner(), [Number(1), Number(2)])), list(LOG)
        LOG.clear()
        actual = repr(forward(Owner(), Number(1), Number(2)))
        assert (actual, LOG) == (expected, log), f"seed {seed}:\n{text}"
