"""Arbitrary files as specs: read or rejected, quickly, and never with a traceback."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfkit.errors import Source, SpecError
from tfkit.spec.source import parse, parse_value, plain_data

from ..sampling import some
from ..time_limit import cheaply
from .texts import GOOD, failure


def bomb(levels: int, width: int = 9, item: str = "[{}]") -> str:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} " + item.format(", ".join([f"*a{n - 1}"] * width)) for n in range(1, levels)]
    return "\n".join(lines) + "\n"


HOSTILE = {
    "billion_laughs": (bomb(10), "more than 50,000 keys and values"),
    "merge_bomb": (bomb(10, item="{{<<: [{}]}}"), "more than 50,000 keys and values"),
    "many_merges": (
        "a: {<<: [" + ", ".join(f"{{k{n}: 1}}" for n in range(30_000)) + "]}",
        "more than 50,000",
    ),
    "deep_aliases": (bomb(45, width=1), "nested more than 40"),
    "deep_aliases_deep_inside": (bomb(25, width=1, item="[[{}], 1]"), "nested more than 40"),
    "brackets": ("[" * 100_000, "nested more than 40"),
    "braces": ("{a: " * 100_000, "nested more than 40"),
    "dashes": ("- " * 100_000, "nested more than 40"),
    "questions": ("? " * 100_000, "nested more than 40"),
    "plain_text": (("word " * (1 << 20))[: 1 << 20], "the file must be a mapping"),
    "many_values": ("b: 1\na: [" + "1," * 500_000 + "]", "more than 50,000 keys and values"),
    "many_errors": ("a: 1\n" * 200_000, "duplicate key"),
    "long_number": ("a: " + "1" * 1_000_000, "must have at most"),
    "long_fraction": ("a: 1." + "1" * 1_000_000, "must fit into a float64"),
}


@pytest.mark.parametrize("name", some(HOSTILE, 4))
def test_hostile_texts_are_refused_cheaply(name: str) -> None:
    text, message = HOSTILE[name]
    with cheaply():
        error = failure(lambda: parse(text, "s"))
        rendered = str(error)
    assert message in error.diagnostics[0].message
    assert len(error.diagnostics) <= 50
    assert max(map(len, rendered.split("\n"))) <= 110


@pytest.mark.slow
def test_limits_are_generous_enough() -> None:
    assert len(plain_data(parse("a: [" + "1," * 49_997 + "]", "s"))["a"]) == 49_997
    failure(lambda: parse("a: [" + "1," * 49_999 + "]", "s"))
    parse("a: " + "[" * 39 + "]" * 39, "s")
    failure(lambda: parse("a: " + "[" * 40 + "]" * 40, "s"))


def test_reading_stops_after_fifty_errors() -> None:
    diagnostics = failure(lambda: parse("a: 1\n" * 100, "s")).diagnostics
    assert len(diagnostics) == 50
    assert diagnostics[-1].notes[-1] == "reading stopped after 50 errors"


SNIPPETS = st.one_of(
    st.text(max_size=4),
    st.sampled_from(
        [
            *"{}[]:,-?!&*#|>'\"%@`~\t\n\r\\",
            ": ",
            "- ",
            "<<: ",
            "*stack",
            "&a ",
            "!!str ",
            "---\n",
            "010",
            "\n  ",
        ]
    ),
)


EDITS = st.lists(st.tuples(st.integers(0, len(GOOD)), st.integers(0, 6), SNIPPETS), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=6, derandomize=True, deadline=None, database=None)
@given(EDITS, st.booleans())
def test_a_damaged_spec_is_read_or_refused(edits: list[tuple[int, int, str]], as_value: bool) -> None:
    read_or_refuse(edits, as_value)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, database=None)
@given(EDITS, st.booleans())
def test_any_damaged_spec_is_read_or_refused(edits: list[tuple[int, int, str]], as_value: bool) -> None:
    read_or_refuse(edits, as_value)


def read_or_refuse(edits: list[tuple[int, int, str]], as_value: bool) -> None:
    text = GOOD
    for start, length, snippet in edits:
        text = text[:start] + snippet + text[start + length :]
    try:
        node = parse_value(Source("s", text), 0) if as_value else parse(text, "s")
    except SpecError as refusal:
        check(refusal, text)
    else:
        plain_data(node)


def check(error: SpecError, text: str) -> None:
    """Each diagnostic has a place within the text, and all can be printed."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    assert all(line.isprintable() for line in str(error).split("\n"))
    for diagnostic in error.diagnostics:
        assert diagnostic.span is not None
        assert diagnostic.span.line <= len(lines)
        assert diagnostic.span.column <= len(lines[diagnostic.span.line - 1]) + 1
