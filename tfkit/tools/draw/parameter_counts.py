"""The weights of a model by module, each given to one box."""

from __future__ import annotations

from collections.abc import Mapping

from tfkit.building.builder import build
from tfkit.component import Component
from tfkit.graph.expand import Graph
from tfkit.tools.common.ownership import owners_of
from tfkit.tools.params.count import count_params


class ParameterCounts:
    """Counts the parameters of a model: all of them, and those not in any box yet."""

    def __init__(self, graph: Graph) -> None:
        counted = count_params(graph, by="module")
        model = build(graph, device="meta")
        self.total = counted.total
        self.components: Mapping[str, Component] = model.meta["components"]
        self._left = {row.name: row.parameters for row in counted.rows}
        self._names = tuple(self._left)
        self._labels = {path: part.label for path, part in owners_of(model).items()}

    def take(self, path: str) -> int:
        """Return the parameters of a module and of everything in it, and remove them from the counts."""
        inside = [name for name in self._left if name == path or name.startswith(f"{path}.")]
        return sum(self._left.pop(name) for name in inside)

    def label(self, path: str) -> str:
        """Return the name of a module's component: the class of a norm, else its slot."""
        return self._labels.get(path, "")

    def children(self, path: str) -> list[str]:
        """Return the names of the modules with weights directly inside a module, in order."""
        inside = [name[len(path) + 1 :] for name in self._names if name.startswith(f"{path}.")]
        return list(dict.fromkeys(name.partition(".")[0] for name in inside))
