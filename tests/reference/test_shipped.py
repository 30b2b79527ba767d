"""The small relative of every shipped spec computes what the reference says."""

from __future__ import annotations

import pytest

from tfkit.component import Component
from tfkit.graph.expand import Graph
from tfkit.reference import BUILT_IN, UnknownKind
from tfkit.testing import example_inputs

from ..small_specs import covering_first, reduced
from .agreement import check_agreement

SLOTS = {*BUILT_IN, "router"}


def foreign(graph: Graph) -> set[tuple[str, str]]:
    """Slot and kind of each component that plugins bring."""
    kinds = {(part.slot, part.kind_name()) for _, part in graph.configs(Component) if part.slot in SLOTS}
    return {(slot, kind) for slot, kind in kinds if kind not in BUILT_IN.get(slot, {})}


@pytest.mark.parametrize("name", covering_first(36))
def test_a_shipped_spec_means_what_the_reference_says(name: str) -> None:
    graph = reduced(name)
    calls = [example_inputs(graph, length=8, padding=padding) for padding in ("none", "left", "right")]
    optional = {name for name, signal in graph.inputs.items() if signal.optional}
    calls.append({name: x for name, x in calls[1].items() if name.removesuffix("_mask") not in optional})
    if unknown := foreign(graph):
        with pytest.raises(UnknownKind) as caught:
            check_agreement(graph, *calls)
        assert (caught.value.slot, caught.value.kind) in unknown
    else:
        check_agreement(graph, *calls)
