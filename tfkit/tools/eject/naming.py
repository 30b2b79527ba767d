"""Names for classes and their arguments, where the model does not give them."""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence, Set

from tfkit.graph.expand import Graph
from tfkit.tools.eject.config import CONFIG
from tfkit.tools.eject.ejected_class import Class

FILES_OWN = frozenset({"Config", "F", "NamedTuple", "OrderedDict", "Tensor", "dataclass", "nn", "torch"})
"""Names that every file uses itself."""
AXES = {"0": "width", "1": "d_out", "2": "d_in"}
"""Names of the axes of a parameter, including the axes of stacked matrices."""


def argument_name(slot: str, values: tuple[str, ...], taken: set[str]) -> str:
    """Choose a name for an argument: the name of its numbers if they have one, else the name of the slot."""
    words = {value.removeprefix(f"{CONFIG}.") for value in values}
    place = [AXES.get(part.partition("@")[2], part) for part in slot.split(".") if not part.isdigit()]
    short = {"in_features": "d_in", "out_features": "d_out", "embedding_dim": "width", "num_embeddings": "rows"}
    name = short.get(place[-1], place[-1])
    if all(word.isidentifier() for word in words):
        common = set.intersection(*({"_".join(w.split("_")[n:]) for n in range(w.count("_") + 1)} for w in words))
        name = max(common, key=len, default=name)
    candidates = [name, "_".join((*place[:-1], name))]
    return next((candidate for candidate in candidates if candidate not in taken), f"{candidates[-1]}_{len(taken)}")


def name_apart(classes: Sequence[Class], places: Mapping[Class, list[str]], graph: Graph, taken: Set[str]) -> None:
    """Give classes that share a name different ones: by node, by the variant of layers, or by number.

    A name that a function or an import has taken gets an underscore after it.
    """
    _by_place(classes, places, graph)
    seen = {*taken, *FILES_OWN, *keyword.kwlist}
    for ejected in classes:
        while ejected.name in seen:
            ejected.name += "_"
        seen.add(ejected.name)


def _by_place(classes: Sequence[Class], places: Mapping[Class, list[str]], graph: Graph) -> None:
    groups: dict[str, list[Class]] = {}
    for ejected in classes:
        groups.setdefault(ejected.name, []).append(ejected)
    for name, group in groups.items():
        if len(group) == 1:
            continue
        for word in (lambda path: path.partition(".")[0], lambda path: _variant(path, graph)):
            words = [{word(path) for path in places[ejected]} for ejected in group]
            if all(len(prefixes) == 1 for prefixes in words) and len(set.union(*words)) == len(group):
                for ejected, (prefix,) in zip(group, words, strict=True):
                    ejected.name = _title(prefix).removesuffix(name) + name
                break
        else:
            for number, ejected in enumerate(group[1:], 2):
                ejected.name = f"{name}{number}"


def _variant(path: str, graph: Graph) -> str:
    """Return the name of the variant of the layers around a module."""
    node, *words = path.split(".")
    stack = graph.node(node).stack
    return stack.layers[int(words[1])].name if stack is not None and words[:1] == ["layers"] and words[1:] else ""


def _title(words: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in words.split("_"))
