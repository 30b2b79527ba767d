"""A model as users pass it: a loaded graph, or the spec to load it from."""

from __future__ import annotations

import os
from typing import Annotated, TypeAlias

from tfkit.graph.expand import Graph, load

AnySpec: TypeAlias = Annotated[
    Graph | str | os.PathLike[str], "a spec: its name, its path, or what `tfkit.load` returned"
]


def as_graph(spec: AnySpec) -> Graph:
    """The graph itself, or the loaded one; raises SpecError as `load` does."""
    return spec if isinstance(spec, Graph) else load(spec)
