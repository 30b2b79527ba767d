"""Every pair of kinds and options: the model computes what the reference computes."""

from __future__ import annotations

import pytest

from tfkit.testing import example_inputs
from tfkit.tools.check.components import Row

from ..components.test_matrix import CHOSEN, ROWS, load, name_of, rest, spec_of
from .agreement import check_agreement


@pytest.mark.parametrize("row", rest(CHOSEN, ROWS), ids=name_of)
def test_every_pair_means_what_the_reference_says(row: Row) -> None:
    graph = load(spec_of(row))
    length = 15 if row["position"].startswith("t5") else 20  # at 16, the last bit of a logarithm decides on the bucket
    check_agreement(
        graph,
        example_inputs(graph, length=length),  # more than the scaled positions were trained for
        example_inputs(graph, length=9, padding="left"),
        example_inputs(graph, length=9, padding="right"),
        example_inputs(graph, length=6, padding="rows"),
    )
