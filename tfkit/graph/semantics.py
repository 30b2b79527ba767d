"""Semantic values of trained weights: the values of a spec that determine what the weights compute, by path.

Two models whose tensors have the same names and shapes may compute different functions, because they differ in an
epsilon, a mask, or the type of positions. tfkit therefore stores these values in the metadata of every safetensors
file, and a reader can report the differences. Names of nodes and inputs, dropout and limits are not included.

All fields of a spec are included, also fields of plugins, except fields marked `Immaterial`. A value that is missing
from a file stands for the default of its field, so a new field with a default does not invalidate older files.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from pydantic.fields import FieldInfo

from tfkit.component import Component, Config, WireMarker, marker
from tfkit.errors import number_ranges
from tfkit.graph.expand import Graph, as_list
from tfkit.spec.annotations import slot_setting

Value: TypeAlias = "str | int | float | bool | list[Any] | None"
Values: TypeAlias = dict[str, Value]
READS = "reads."
"""Prefix of the paths of wires, whose values are names of nodes and inputs."""
MAX_LAYERS = 2**16
MAX_TEXT = 60
_LAYERS = re.compile(r"(?<![^.])\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*(?![^.])")


@dataclass(frozen=True)
class Semantics:
    """The semantic values of a model's inputs and nodes, by path inside each, in the order of the graph.

    `usual` holds the paths, with the node's name, of values and components that equal the defaults of their fields. A
    file that was written before such a field existed implies these values.
    """

    inputs: Mapping[str, Values]
    nodes: Mapping[str, Values]
    usual: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        """The values as JSON, which `parse_semantics` reads."""
        return json.dumps({"inputs": self.inputs, "graph": self.nodes}, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """A digest of all values, 32 hexadecimal digits. It does not depend on the names of nodes and inputs."""
        names = {name: str(index) for index, name in enumerate((*self.inputs, *self.nodes))}
        named = self.renamed(names)
        text = json.dumps([named.inputs, named.nodes], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def renamed(self, names: Mapping[str, str]) -> Semantics:
        """Rename nodes and inputs."""

        def value_of(path: str, value: Value) -> Value:
            reads = path.startswith(READS) and isinstance(value, list)
            return [names.get(item, item) for item in value] if reads else value  # type: ignore[union-attr]

        inputs = {names.get(name, name): values for name, values in self.inputs.items()}
        nodes = {
            names.get(name, name): {path: value_of(path, value) for path, value in values.items()}
            for name, values in self.nodes.items()
        }
        return Semantics(inputs, nodes)

    @property
    def flat(self) -> Values:
        """All values by path. The values of a range of layers are repeated for each layer."""
        parts = (*self.inputs.items(), *self.nodes.items())
        values = {f"{name}.{path.removeprefix(READS)}": value for name, part in parts for path, value in part.items()}
        return {expanded: value for path, value in values.items() for expanded in _by_layer(path)}


class ValueChange(NamedTuple):
    """A different value: its path, and the texts of the value in the file and in the model."""

    path: str
    there: str
    here: str

    def __str__(self) -> str:
        return f"{self.path}: {self.there} in the file, {self.here} here"


def semantics_of(graph: Graph) -> Semantics:
    """Return the semantic values of a model."""
    usual: set[str] = set()
    inputs = {name: _config_values(config, name, usual) for name, config in graph.spec.model.inputs.items()}
    nodes: dict[str, Values] = {}
    for node in graph.nodes:
        wires = {f"{READS}{field}": as_list(source) for field, source in node.wires.items()}
        nodes[node.name] = {**_config_values(node.config, node.name, usual), **wires}
    return Semantics(inputs, nodes, frozenset(expanded for path in usual for expanded in _by_layer(path)))


def parse_semantics(data: Mapping[str, Any]) -> Semantics:
    """Parse the JSON object that `Meaning.text` writes; raise ValueError if it is malformed."""
    mappings = [data.get("inputs"), data.get("graph")]
    for part in mappings:
        if not isinstance(part, dict) or not all(isinstance(values, dict) for values in part.values()):
            raise ValueError("`inputs` and `graph` must be objects of objects")
    inputs, nodes = mappings
    assert inputs is not None
    assert nodes is not None
    for path, value in [entry for values in nodes.values() for entry in values.items() if entry[0].startswith(READS)]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"`{path[:80]}` is not a list of names")
    semantics = Semantics(inputs, nodes)
    _ = semantics.flat  # raises ValueError for malformed ranges of layers
    return semantics


def value_changes(there: Semantics, here: Semantics) -> list[ValueChange]:
    """Return the differences between the semantic values of a file, `there`, and of a model, `here`."""
    names = {**_matched_names(there.inputs, here.inputs), **_matched_names(there.nodes, here.nodes)}
    old, new = _ValueTree(there.renamed(names).flat), _ValueTree(here.flat)
    pairs: dict[str, tuple[str, str]] = {}
    for path in {**old.values, **new.values}:
        if path not in old.values and _is_meant(path, old, here.usual):
            continue
        if path not in old.values or path not in new.values or not _is_same_value(old.values[path], new.values[path]):
            location = next((prefix for prefix in enclosing_paths(path) if old.kind(prefix) != new.kind(prefix)), path)
            pairs[location] = old.text(location), new.text(location)
    return _by_ranges(pairs, new.values)


class _ValueTree:
    """Values by path, and the paths of the components that contain them."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.parts = {part for path in values for part in enclosing_paths(path)}

    def kind(self, path: str) -> str | None:
        """Return the kind of the component at a path; `a part` for a config without a kind, None for an empty slot."""
        named = [str(self.values[key]) for key in (f"{path}.kind", f"{path}.block") if key in self.values]
        return named[0] if named else "a part" if path in self.parts else None

    def text(self, path: str) -> str:
        """Return a short description of the value at a path."""
        if path in self.values:
            value = self.values[path]
            return _short_text(value if isinstance(value, str) else json.dumps(value))
        if path not in self.parts:
            return "nothing"
        kind, start = self.kind(path), f"{path}."
        inside = {key.removeprefix(start): value for key, value in self.values.items() if key.startswith(start)}
        entries = ", ".join(f"{name}: {json.dumps(value)}" for name, value in inside.items())
        return _short_text(f"{{{entries}}}") if kind in (None, "a part") else str(kind)


def enclosing_paths(path: str) -> Iterator[str]:
    """Yield the paths of the components around a value, outermost first."""
    yield from accumulate(path.split(".")[:-1], lambda start, key: f"{start}.{key}")


def _is_meant(path: str, old: _ValueTree, usual: Set[str]) -> bool:
    """Return True if a file implies a missing value: it is the default of its field, or inside a default component."""
    while path in usual:
        path = path.rpartition(".")[0]
        if path in old.parts:
            return True
    return False


def _short_text(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 4]} ..."


def _config_values(config: Config, name: str, usual: set[str]) -> Values:
    """Return the values of an input or a node, and add the paths of defaults to `usual`."""
    start = f"{name}."
    return {path.removeprefix(start): value for path, value in _leaf_values(name, config, usual)}


def _leaf_values(path: str, value: Any, usual: set[str]) -> Iterator[tuple[str, Value]]:
    """Yield the path and the value of every leaf."""
    if isinstance(value, Config):
        fields = type(value).model_fields
        for name, inside in value.material().items():
            info = fields.get(name)
            if info is not None and _is_usual(info, inside):
                usual.add(f"{path}.{name}")
            if info is None or marker(info, WireMarker) is None or isinstance(inside, Mapping):
                yield from _leaf_values(f"{path}.{name}", inside, usual)
    elif isinstance(value, Mapping):
        for name, inside in value.items():
            yield from _leaf_values(f"{path}.{name}", inside, usual)
    elif isinstance(value, tuple | list) and any(isinstance(item, Config) for item in value):
        for index, inside in enumerate(value):
            yield from _leaf_values(f"{path}.{index}", inside, usual)
    else:
        plain = value is None or isinstance(value, str | int | float)
        yield path, list(value) if isinstance(value, tuple | list) else value if plain else str(value)


def _is_usual(field: FieldInfo, value: Any) -> bool:
    kind = slot_setting(field, "default_kind")
    if kind is not None:
        return isinstance(value, Component) and value.kind_name() == kind
    if field.is_required():
        return False
    default = field.get_default(call_default_factory=True)
    return type(default) is type(value) and default == value


def _by_layer(path: str) -> list[str]:
    """Repeat a path for each layer that it names: `decoder.layers.0-2.norm.eps` gives three paths."""
    match = _LAYERS.search(path)
    if match is None:
        return [path]
    numbers: list[int] = []
    for run in match[0].split(","):
        first, _, last = run.partition("-")
        if len(first) > 5 or len(last) > 5 or not int(first) <= int(last or first) < MAX_LAYERS:
            raise ValueError(f"`{path[:80]}` names no layers")
        numbers += range(int(first), int(last or first) + 1)
    return [f"{path[: match.start()]}{number}{path[match.end() :]}" for number in numbers]


def _matched_names(there: Iterable[str], here: Iterable[str]) -> dict[str, str]:
    """Match names in a file to names in the model: equal names first, the remaining ones in order."""
    old, new = list(there), list(here)
    rest = zip((name for name in old if name not in new), (name for name in new if name not in old), strict=False)
    return dict(rest)


def _is_same_value(a: Value, b: Value) -> bool:
    """Return True if two values are equal; real numbers may differ by the rounding of arithmetic."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_same_value, a, b))
    if isinstance(a, bool) or isinstance(b, bool) or not (isinstance(a, int | float) and isinstance(b, int | float)):
        return a == b and isinstance(a, bool) == isinstance(b, bool)
    try:
        return math.isclose(a, b, rel_tol=1e-9)
    except OverflowError:  # an integer too large for a float
        return False


def _by_ranges(pairs: Mapping[str, tuple[str, str]], values: Values) -> list[ValueChange]:
    """Merge equal changes of several layers. The layers are listed unless all layers of the stack changed."""
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for path, (old, new) in pairs.items():
        match = re.search(r"(?<=\.layers\.)\d+(?![^.])", path)
        start, end = (path[: match.start()], path[match.end() :]) if match else (path, "")
        groups.setdefault((start, end, old, new), []).extend([int(match[0])] if match else [])
    changes = []
    for (start, end, old, new), numbers in groups.items():
        layers = {path[len(start) :].partition(".")[0] for path in values if numbers and path.startswith(start)}
        if not numbers:
            path = start
        elif len(layers) == len(numbers):
            path = start.removesuffix("layers.").rstrip(".")
        else:
            path = f"{start}{number_ranges(sorted(numbers)).replace(' ', '')}"
        changes.append(ValueChange(path + end, old, new))
    return changes
