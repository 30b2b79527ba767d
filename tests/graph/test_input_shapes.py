"""The maximum length of a model's inputs, and the largest id."""

from __future__ import annotations

import pytest
import torch

import tfkit
from tfkit.component import Signal
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import fixed_length, input_shapes, length_of, max_len, rows_of
from tfkit.testing import check_model

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
    text = {name: "" if n is None else f", position: learned, max_len: {n}" for name, n in lengths.items()}
    graph = tfkit.loads(SPEC.format(**text))
    assert max_len(graph) == limit
    assert (rows_of(graph, "a"), rows_of(graph, "b")) == (11, 7)


VECTOR = """
tfkit: 1
name: t
d_model: 8
inputs: {speaker: {type: vector, width: 5}}
graph:
  dense: linear
  classes: {block: classifier, n_classes: 3}
"""


def test_a_vector_goes_in() -> None:
    model = tfkit.build(tfkit.loads(VECTOR))
    graph: Graph = model.meta["graph"]
    assert input_shapes(graph, batch=2, length=7) == {"speaker": (2, 5)}
    assert fixed_length(graph) is None
    assert model(torch.zeros(2, 5)).shape == (2, 3)
    assert tfkit.cost(graph)
    check_model(tfkit.loads(VECTOR), only=["meaning", "script", "types"])
    with pytest.raises(ValueError, match=r"`speaker` must be vectors \[b, width\]; got torch.int64 \[2, 5\]"):
        model(torch.zeros(2, 5).long())
    with pytest.raises(ValueError, match="`speaker` must be of width 5"):
        model(torch.zeros(2, 6))


@pytest.mark.parametrize(
    ("first", "second", "longest"),
    [(", length: 5", ", length: 9", 9), (", length: 9", ", length: 5", 9), (", length: 5", "", None)],
)
def test_the_fixed_length_is_that_of_the_longest_input(first: str, second: str, longest: int | None) -> None:
    inputs = f"inputs: {{a: {{type: tokens{first}}}, b: {{type: tokens{second}}}}}"
    graph = tfkit.loads(SPEC.format(first="", second="").replace("inputs: [a, b]", inputs))
    assert fixed_length(graph) == longest
    assert length_of(graph, None) == longest
    if longest is not None:
        with pytest.raises(
            tfkit.SpecError, match=r"length \(5\) has no effect: the input of `t` always has 9 positions"
        ):
            length_of(graph, 5)


def test_an_image_has_three_sizes() -> None:
    signal = Signal("image", 20, rows=12, channels=3)
    assert (str(signal), signal.in_words()) == ("image of 3 x 12 x 20", "an image of 3 x 12 x 20")
