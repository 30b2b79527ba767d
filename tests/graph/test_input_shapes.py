"""The longest sequence that a model takes, and the largest id."""

from __future__ import annotations

import pytest

import tfkit
from tfkit.graph.input_shapes import max_len, rows_of

SPEC = """
tfkit: 1
name: t
d_model: 8
inputs: [a, b]
graph:
  one: {{block: embedding, input: a, vocab_size: 11{first}}}
  two: {{block: embedding, input: b, vocab_size: 7{second}}}
  both: {{block: concat, inputs: [one, two]}}
"""


@pytest.mark.parametrize(
    ("first", "second", "limit"), [(9, 5, 5), (5, 9, 5), (None, 6, 6), (6, None, 6), (None, None, None)]
)
def test_the_least_of_all_parts_is_the_limit(first: int | None, second: int | None, limit: int | None) -> None:
    lengths = {"first": first, "second": second}
    said = {name: "" if n is None else f", position: learned, max_len: {n}" for name, n in lengths.items()}
    graph = tfkit.loads(SPEC.format(**said))
    assert max_len(graph) == limit
    assert (rows_of(graph, "a"), rows_of(graph, "b")) == (11, 7)
