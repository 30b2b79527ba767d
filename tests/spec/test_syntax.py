"""Errors of invalid syntax."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tfkit.errors import SpecError
from tfkit.spec.source import parse

ERRORS = {
    "unclosed_bracket": "a: [1, 2\nb: 3\n",
    "unclosed_bracket_at_the_end": "a: [1, 2",
    "unclosed_brace": "a: {x: 1\nb: 3\n",
    "unclosed_brace_at_the_end": "a: {x: 1, ",
    "extra_bracket": "a: [1]]\n",
    "extra_brace": "a: {b: 1}}\n",
    "wrong_bracket": "a: [1}\n",
    "missing_comma": "a: {b: 1 c: 2}\n",
    "extra_comma": "a: [,]\n",
    "unclosed_single_quote": "a: 'foo\nb: 1\n",
    "unclosed_double_quote": 'a: 1\nb: "foo\n',
    "unknown_escape": 'a: "fo\\qo"\n',
    "two_colons": "a: b: c\n",
    "no_space_after_colon": "d_model:512\n",
    "no_space_after_colon_first": "d_model:512\nn_layers: 1\n",
    "no_space_after_colon_later": "a: 1\nd_model:512\nb: 2\n",
    "no_space_after_colon_in_braces": "a: {b:1, c: 2}\n",
    "key_without_value": "a: 1\nfoo\n",
    "outdent": "a:\n  b: 1\n c: 2\n",
    "indent": "a: 1\n  b: 2\n",
    "tab": "a:\n\tb: 1\n",
    "tab_after_value": "a:\n  b: 1\n\tc: 2\n",
    "odd_start": "a: @foo\n",
    "item_among_keys": "a: 1\n- b\n",
    "item_after_key": "a: - b\n",
    "key_among_items": "- b\na: 1\n",
    "text_after_quote": "a: 'x' y\n",
    "text_after_bar": "a: |x\n  foo\n",
    "nameless_alias": "a: *\n",
    "nameless_anchor": "a: & 1\n",
    "undefined_alias": "a: &stack 1\nb: *stak\nc: *other\n",
    "recursive_alias": "a: &x [1, {b: *x}]\n",
    "tags": "a: &x !!python/object:os.system [1]\nb: !foo {x: 1}\nc: !!str 3\nd: ! 4\n",
    "unknown_tag_handle": "a: !e!foo 1\n",
    "directive": "%YAML 1.1\n---\na: 1\n",
    "duplicate_key": "a: 1\nb: {c: 1, 'c': 2}\na: 3\n",
    "duplicate_merge": "a: &a {}\nb: {<<: *a, <<: *a}\n",
    "merge_of_no_mapping": "a: &x 3\nb: {<<: *x, c: 1}\nd: {<<: [{}, [1]]}\n",
    "keys_that_are_not_text": "1: x\n[a]: b\n~: c\ntrue: d\n? {a: b}\n: c\n",
    "numbers": "a: 010\nb: -07\nc: 089\nd: 1234567890123456789\ne: 1e999\nf: 1e-999\n",
    "infinities": "a: .inf\nb: -.Inf\nc: .NaN\n",
    "second_document": "a: 1\n---\nb: 2\n",
    "empty": "# nothing\n",
    "null": "---\n~\n",
    "list": "- a\n- b\n",
    "text": "hello, world\n",
    "escape_sequence": "a: \x1b[31mred\n",
    "nul_character": "a: \0b\n",
    "line_separator": "a: b\u2028c: d\n",
    "mixed": "a: !x 1\na: 010\nb: [\n",
}
JARGON = (
    "block mapping",
    "flow",
    "scalar",
    "token",
    "stream",
    "sequence",
    "node",
    "simple key",
    "document start",
)


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize("name", ERRORS)
def test_error_texts(name: str, golden: Callable[[str, str], None]) -> None:
    with pytest.raises(SpecError) as caught:
        parse(ERRORS[name], "specs/tiny.yaml")
    text = str(caught.value)
    assert not [word for word in JARGON if word in text]
    golden(f"source/{name}", text)
