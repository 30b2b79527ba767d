from __future__ import annotations

import copy
import pickle
from itertools import product

import pytest

from tfkit.errors import Diagnostic, Invalid, Source, Span, SpecError, closest_name, listing, quoted

from .time_limit import cheaply

SPEC = Source("specs/tiny.yaml", "tfkit: 1\n" * 8 + "    attention: {kind: gqqa, n_heads: 8}\n" + "x: 1\n" * 2)


def excerpt(text: str, column: int, length: int = 1, line: int = 1) -> list[str]:
    """The source line and the caret line, as rendered."""
    return Diagnostic("wrong", Span(Source("s", text), line, column, length)).render().split("\n")[3:5]


def test_the_shape_of_the_design() -> None:
    diagnostic = Diagnostic(
        "unknown attention kind `gqqa`",
        Span(SPEC, 9, 23, 4),
        path="graph.decoder.attention.kind",
        notes=("known kinds: gqa, mha, mla (from tfkit-mla 0.1)",),
        help="a kind with a similar name exists: `gqa`",
    )
    assert diagnostic.render() == (
        "error: unknown attention kind `gqqa`\n"
        "  --> specs/tiny.yaml:9:23  (graph.decoder.attention.kind)\n"
        "   |\n"
        " 9 |     attention: {kind: gqqa, n_heads: 8}\n"
        "   |                       ^^^^\n"
        "   = known kinds: gqa, mha, mla (from tfkit-mla 0.1)\n"
        "   = help: a kind with a similar name exists: `gqa`"
    )


def test_the_gutter_is_as_wide_as_the_line_number() -> None:
    lines = Diagnostic("wrong", Span(SPEC, 11, 1), notes=("a note",)).render().split("\n")
    assert lines[1:] == ["   --> specs/tiny.yaml:11:1", "    |", " 11 | x: 1", "    | ^", "    = a note"]


def test_without_a_position() -> None:
    assert Diagnostic("wrong").render() == "error: wrong"
    assert Diagnostic("wrong", path="graph.a", help="do").render() == ("error: wrong\n  --> (graph.a)\n   = help: do")


@pytest.mark.parametrize(
    ("text", "column", "length", "line", "carets"),
    [
        ("ab: cd", 5, 99, " 1 | ab: cd", "   |     ^^"),
        ("ab:", 4, 1, " 1 | ab:", "   |    ^"),
        ("ab:", 40, 3, " 1 | ab:", "   |    ^"),
        ("", 1, 1, " 1 |", "   | ^"),
        ("\ta: b", 2, 1, " 1 |     a: b", "   |     ^"),
        ("a:\t\tb", 3, 2, " 1 | a:        b", "   |   ^^^^^^^^"),
        ("a: \x1b[2J b", 9, 1, r" 1 | a: \x1b[2J b", "   |            ^"),
        ("a: \u202eb", 5, 1, r" 1 | a: \u202eb", "   |          ^"),
        ("漢字: b", 5, 1, " 1 | 漢字: b", "   |       ^"),
        ("漢字: b", 1, 2, " 1 | 漢字: b", "   | ^^^^"),
        ("e\u0301: b", 5, 1, " 1 | e\u0301: b", "   |    ^"),
        ("a\rb: x\r\nc", 4, 1, " 1 | a", "   |  ^"),
    ],
)
def test_carets_stand_below_what_they_mean(text: str, column: int, length: int, line: str, carets: str) -> None:
    assert excerpt(text, column, length) == [line, carets]


def test_a_line_that_does_not_exist_is_empty() -> None:
    assert excerpt("a: 1", 1, line=7) == [" 7 |", "   | ^"]


@pytest.mark.parametrize("char", ["x", "漢", "\x07", "\t", "\U000e0001"])
def test_long_lines_are_cut_around_the_span(char: str) -> None:
    for column, length in product([1, 40, 500, 950, 1000, 1001], [1, 30, 400]):
        text = char * (column - 1) + "S" + char * (1000 - column)
        line, carets = excerpt(text, column, length)
        wide = line.count("漢")
        assert len(line) + wide <= 100
        assert len(carets) <= 100
        if column <= 1000:
            at = carets.index("^")
            assert line.replace("漢", "漢_")[at] == "S", (column, length)


def test_cuts_are_marked() -> None:
    assert [excerpt("x" * 1000, column)[0][5:].replace("x", "") for column in (1, 500, 1000)] == [
        "...",
        "." * 6,
        "...",
    ]
    assert [len(excerpt("x" * 1000, column)[0]) for column in (1, 500, 1000)] == [97, 100, 97]
    assert excerpt("x" * 95, 1)[0] == " 1 | " + "x" * 95


@pytest.mark.parametrize("width", range(90, 99))
def test_the_caret_after_a_line_that_just_fits(width: int) -> None:
    assert max(len(line) for line in excerpt("x" * width, width + 1)) <= 100


def test_nothing_quoted_reaches_the_terminal_raw() -> None:
    evil = "\x1b]0;x\x07\n\r\u202e\ud800"
    text = str(
        SpecError(Diagnostic(evil, Span(Source(evil, evil), 1, 1), evil, (evil,), evil), Diagnostic(evil, path=evil))
    )
    assert all(line.isprintable() for line in text.split("\n"))
    text.encode()


def test_the_span_of_a_range_stays_on_its_line() -> None:
    source = Source("s", "ab: cd  \r\nef: gh\nlast")
    assert source.span(0) == Span(source, 1, 1, 1)
    assert source.span(4, 6) == Span(source, 1, 5, 2)
    assert source.span(4, 15) == Span(source, 1, 5, 2)
    assert source.span(14, 16) == Span(source, 2, 5, 2)
    assert source.span(17, 99) == Span(source, 3, 1, 4)
    assert source.span(21) == Span(source, 3, 5, 1)
    assert [source.line(n) for n in range(5)] == ["", "ab: cd  ", "ef: gh", "last", ""]


def test_to_dict() -> None:
    assert Diagnostic("wrong", Span(SPEC, 9, 24, 4), "a.b", ("n",), "h").to_dict() == {
        "message": "wrong",
        "file": "specs/tiny.yaml",
        "line": 9,
        "column": 24,
        "path": "a.b",
        "notes": ["n"],
        "help": "h",
    }
    assert Diagnostic("wrong").to_dict()["line"] is None


def test_errors_come_in_file_order_with_a_count() -> None:
    other = Source("--set", "a=1")
    error = SpecError(
        Diagnostic("nowhere"),
        Diagnostic("third", Span(SPEC, 10, 1)),
        Diagnostic("fourth", Span(other, 1, 1)),
        Diagnostic("second", Span(SPEC, 9, 5)),
        Diagnostic("first", Span(SPEC, 9, 1)),
    )
    assert [d.message for d in error.diagnostics] == ["first", "second", "third", "fourth", "nowhere"]
    assert str(error).split("\n\n")[-1] == "error: 5 errors in specs/tiny.yaml, --set"
    assert str(SpecError(Diagnostic("a"), Diagnostic("b"))) == "error: a\n\nerror: b\n\nerror: 2 errors"
    assert str(SpecError(Diagnostic("a"))) == "error: a"


def test_repetitions_are_removed() -> None:
    here, there = Span(SPEC, 9, 1), Span(SPEC, 9, 2)
    distinct = [
        Diagnostic("wrong", here),
        Diagnostic("wrong", there),
        Diagnostic("other", here),
        Diagnostic("wrong too", here, path="a"),
        Diagnostic("missing", path="a"),
        Diagnostic("missing", path="b"),
    ]
    again = [Diagnostic("wrong", here, path="z"), Diagnostic("wrong three", here, path="a"), distinct[-1]]
    assert set(SpecError(*distinct, *again).diagnostics) == set(distinct)


def test_errors_survive_pickling() -> None:
    error = SpecError(Diagnostic("wrong", Span(SPEC, 9, 1)), Diagnostic("nowhere"))
    assert pickle.loads(pickle.dumps(error)).diagnostics == error.diagnostics
    invalid = copy.copy(Invalid("memory", "is missing", notes=["n"], help="h"))
    assert (invalid.field, invalid.message, invalid.notes, invalid.help) == (
        "memory",
        "is missing",
        ("n",),
        "h",
    )
    assert str(invalid) == "is missing"


@pytest.mark.parametrize(
    ("word", "candidates", "expected"),
    [
        ("gqqa", ["mha", "gqa", "mla"], "gqa"),
        ("n_head", ["d_head", "n_heads", "n_kv_heads"], "n_heads"),
        ("num_heads", ["d_model", "n_heads"], "n_heads"),
        ("heads", ["dropout", "n_heads"], "n_heads"),
        ("vocab", ["d_model", "vocab_size"], "vocab_size"),
        ("epsilon", ["bias", "eps"], "eps"),
        ("N-Heads", ["n_kv_heads", "n_heads"], "n_heads"),
        ("RMSNorm", ["layernorm", "rmsnorm"], "rmsnorm"),
        ("banana", ["mha", "gqa", "n_heads"], None),
        ("n", ["n_heads", "n_layers"], None),
        ("x", [], None),
        ("", ["a"], None),
    ],
)
def test_closest(word: str, candidates: list[str], expected: str | None) -> None:
    assert closest_name(word, candidates) == expected


def test_closest_is_cheap_for_absurd_words() -> None:
    with cheaply():
        assert closest_name("n_heads" * 100_000, ["n_heads"] * 1000) is None
        assert closest_name("n_heads", ["n_heads" * 10_000] * 100) is None


def test_listing() -> None:
    assert listing(["b", "a"]) == "b, a"
    assert listing(map(str, range(12))).endswith(", 11")
    assert listing(map(str, range(31)), limit=2) == "0, 1, ... (31 in all)"


def test_quoted() -> None:
    assert quoted("gqa") == "`gqa`"
    assert quoted("x" * 60) == f"`{'x' * 60}`"
    assert quoted("x" * 61) == f"`{'x' * 57}...`"
    assert len(quoted("\n" * 59)) == 62
    assert quoted("a\x1b") == r"`a\x1b`"
