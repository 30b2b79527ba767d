"""Invalid patterns, and tensors that do not fit a pattern."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tfkit.checkpoint.pattern import Pattern, PatternError


@pytest.mark.parametrize(
    ("text", "blamed", "message"),
    [
        ("", "", "found the end where a name, `1`, `(` or `[` is expected"),
        ("-> a", "->", "the block `1` is on the left side only"),
        ("a, -> a", "->", "the block `1` is on the left side only"),
        ("a () -> a", ")", "found `)` where a name, `1`, `(` or `[` is expected"),
        ("a b ", "", "found the end where a name, `1`, `(`, `[`, `,` or `->` is expected"),
        ("(a b] -> a", "]", "found `]` where a name, `1`, `(`, `[` or `)` is expected"),
        ("[a b -> a", "->", "found `->` where a name, `1`, `(`, `[` or `]` is expected"),
        ("a -> a) b", ")", "found `)` where a name, `1`, `(`, `[`, `,` or the end is expected"),
        ("a -> b -> c", "->", "found `->` where a name, `1`, `(`, `[`, `,` or the end is expected"),
        ("a ... -> ... a", "...", "found `...` where a name, `1`, `(`, `[`, `,` or `->` is expected"),
        ("\u00e9 -> a", "\u00e9", "found `\u00e9` where a name, `1`, `(` or `[` is expected"),
        ("h h -> h", "h h", "a name is twice in the block `h h`"),
        ("i ([a b] [b c]) -> i", "([a b] [b c])", "a name is twice in the block `b b`"),
        ("[a a] i -> a i", "[a a] i", "the block `a i` is on the left side twice"),
        ("a i -> a i, i a", "a i", "the block `a i` is on the right side twice"),
        ("1, 1 -> 1", "1", "the block `1` is on the left side twice"),
        ("a b -> b", "a b", "the block `a b` is on the left side only"),
        (" ".join(f"[a{i} b{i}]" for i in range(9)), None, "a tensor has at most 256 blocks"),
        (" ".join(f"n{i}" for i in range(65)), None, "a pattern must have at most 64 names; got 65"),
        ("1 " * 501, None, "a pattern must have at most 1000 characters; got 1002"),
    ],
)
def test_texts_that_are_no_pattern(text, blamed, message):
    with pytest.raises(PatternError) as caught:
        Pattern.parse(f"{text} -> i" if message.startswith("a tensor") else text)
    assert caught.value.message == message
    start, end = caught.value.columns
    assert blamed is None or text[start:end] == blamed


FUSED = "(h [q k] d) i -> [(h q d) (h k d)] i"


@pytest.mark.parametrize(
    ("text", "shapes", "sizes", "message"),
    [
        (FUSED, [], {}, "the pattern takes 1 tensors; got 0"),
        (FUSED, [(24,)], {}, "the tensor must have 2 axes; got 1, with shape 24"),
        ("1 -> 1 1", [()], {}, "the tensor must have 1 axes; got 0, with shape ()"),
        (FUSED, [(24, 5)], {"x": 2}, "the pattern has no name `x`"),
        (FUSED, [(24, 5)], {"q": 0}, "the size of `q` must be a positive integer; got `0`"),
        (FUSED, [(24, 5)], {"q": 2.0}, "the size of `q` must be a positive integer; got `2.0`"),
        (FUSED, [(24, 5)], {"q": True}, "the size of `q` must be a positive integer; got `True`"),
        (FUSED, [(24, 5)], {"q": 2, "k": 1}, "`(h [q k] d)` of size 24 does not determine `h`, `d`"),
        (
            "(h d) -> h d",
            [(7,)],
            {"d": 2},
            "`(h d)` is 7, which no size of `h` gives with d = 2, in a tensor of shape 7",
        ),
        (
            "(h d) -> h d",
            [(7,)],
            {"d": 2, "h": 3},
            "`(h d)` is 7 instead of 6 with h = 3, d = 2, in a tensor of shape 7",
        ),
        (
            "[a b] -> a, b",
            [(4,)],
            {"a": 4},
            "`[a b]` is 4, which no size of `b` gives with a = 4, in a tensor of shape 4",
        ),
        ("a i, b i -> [a b] i", [(2, 3), (2, 4)], {}, "`i` is 4 instead of 3, in a tensor of shape 2 x 4"),
        ("1 e -> e", [(2, 3)], {}, "`1` is 2 instead of 1, in a tensor of shape 2 x 3"),
    ],
)
def test_tensors_and_sizes_that_do_not_fit(text, shapes, sizes, message):
    for call in (
        Pattern.parse(text).shapes,
        lambda shapes, sizes: Pattern.parse(text).apply([torch.empty(s) for s in shapes], sizes),
    ):
        with pytest.raises(PatternError) as caught:
            call(shapes, sizes)
        assert caught.value.message == message


def test_kinds_are_not_mixed():
    with pytest.raises(PatternError) as caught:
        Pattern.parse("a, b -> [a b]").apply([torch.ones(2), torch.ones(2, dtype=torch.int8)], {})
    assert caught.value.message == "tensors of several kinds cannot be joined: torch.float32 on cpu, torch.int8 on cpu"


ONE_SIDE = """\
error: the block `h k d` is on the left side only
  --> pattern:1:4
   |
 1 | i, (h [q k] d) -> i, [(h q d) (h v d)]
   |    ^^^^^^^^^^^
   = blocks of the other side: `i`, `h q d`, `h v d`"""
TWO_TENSORS = """\
error: the pattern takes 1 tensors; got 2
  --> pattern:1:6
   |
 1 | i -> 1 i
   |      ^^^"""


def test_how_an_error_reads():
    with pytest.raises(ValueError, match="only") as caught:
        Pattern.parse("i, (h [q k] d) -> i, [(h q d) (h v d)]")
    assert str(caught.value) == ONE_SIDE
    with pytest.raises(ValueError, match="got 2") as caught:
        Pattern.parse("i -> 1 i").inverse().shapes([(3,), (4,)], {"i": 3})
    assert str(caught.value) == TWO_TENSORS
    with pytest.raises(PatternError) as caught:
        Pattern.parse("heads i -> i heads").shapes([(3, 4)], {"head": 3})
    assert caught.value.notes == ("names: `heads`, `i`",)
    assert caught.value.help == "a name of the pattern is similar: `heads`"


@settings(max_examples=100, deadline=None)
@given(st.text("ab1 ()[],->.\t\n\u00e92", max_size=30))
def test_any_text_is_a_pattern_or_a_pattern_error(text):
    try:
        Pattern.parse(text)
    except PatternError as error:
        assert str(error).startswith("error: ")  # noqa: PT017 - which texts fail is not known


@pytest.mark.parametrize(
    "text", ["(" * 499, "[" * 480 + "a", "(" * 400 + "a" + ")" * 400 + " -> a", "1 " * 490 + "-> 1"]
)
def test_deep_and_long_texts_are_read_without_recursion(text):
    if "->" not in text:
        with pytest.raises(PatternError, match="found the end"):
            Pattern.parse(text)
    else:
        Pattern.parse(text).inverse().shapes([(1,)], {})
