"""The longest sequence that a model takes, and the largest id."""

from __future__ import annotations

import pytest
import torch

import tfkit
from tfkit.graph.input_shapes import max_len, rows_of
from tfkit.testing import check_model, example_inputs

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


VECTOR = """
tfkit: 1
name: t
d_model: 8
inputs: {v: {type: vector, width: 5}}
graph:
  wide: {block: linear}
  classes: {block: classifier, n_classes: 3}
"""


def test_a_vector_has_a_width_and_no_positions() -> None:
    model = tfkit.build(tfkit.loads(VECTOR))
    assert model(torch.randn(2, 5)).shape == (2, 3)
    assert example_inputs(tfkit.loads(VECTOR), batch=2)["v"].shape == (2, 5)
    check_model(tfkit.loads(VECTOR), only=["meaning", "script", "types"])
    with pytest.raises(ValueError, match=r"`v` must be a vector \[b, width\]"):
        model(torch.ones(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="must be of width 5"):
        model(torch.randn(2, 4))
    for change, message in {
        "{type: vector}": "a vector needs a `width`",
        "{type: vector, width: 5, length: 3}": "a vector has no positions",
        "{type: vector, width: 5, optional: true}": "cannot be optional",
    }.items():
        with pytest.raises(tfkit.SpecError, match=message):
            tfkit.loads(VECTOR, sets=[f"inputs.v={change}"])
