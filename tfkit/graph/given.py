"""A model as users pass it: a loaded graph, or the spec to load it from."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from tfkit.graph.expand import AnySource, Graph, load

AnySpec: TypeAlias = Annotated[
    Graph | AnySource, "a spec: its name, its path, a mapping, or what `tfkit.load` returned"
]


def as_graph(spec: AnySpec) -> Graph:
    """The graph itself, or the loaded one; raises SpecError as `load` does."""
    return spec if isinstance(spec, Graph) else load(spec)
