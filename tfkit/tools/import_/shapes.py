"""A draft of a config.json from the names and shapes of tensors: the family, and the fields that shapes decide.

A field is doubled in the config.json of the family's first spec. The sizes that change with it show which sizes of a
file decide the field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from tfkit.building.builder import build
from tfkit.checkpoint.config_json import read_fields, value_at, write_fields
from tfkit.checkpoint.files import TensorFiles
from tfkit.checkpoint.links import published_map
from tfkit.checkpoint.tensor_names import name_and_numbers, name_matcher, with_nameless_holes
from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.graph.expand import Graph, expand
from tfkit.plugin.manager import Plugins
from tfkit.spec import tree
from tfkit.spec.arithmetic import Expression
from tfkit.spec.families import FamilyConfig, expanded_names
from tfkit.spec.folder import CONFIG
from tfkit.spec.header import quoted_path
from tfkit.spec.load import resolve_spec, without_idle
from tfkit.spec.tree import node_of

MAX_CANDIDATES = 40
"""Maximum number of families whose tensors are compared by name and number of axes."""
MAX_FITTED = 4
"""Maximum number of families whose fields are fitted to the shapes."""
LAYERS = 2
"""Number of layers of the models that show the effect of a field."""
SUM = 2
"""The power of a field in a size that is a sum, as of queries and keys in one tensor."""
OPEN = "?"
"""The value of a field that a reader must complete."""
MISSING = re.compile("`([^`.]+)` is missing$")
Type = Callable[[], tuple[tree.Mapping, FamilyConfig]]
"""Returns the first spec of a model type, and its family."""


@dataclass(frozen=True)
class TensorOutline:
    """Tensors by name, with `{}` for numbers: the shape of the first one, and how many there are."""

    shapes: Mapping[str, tuple[int, ...]]
    counts: Mapping[str, int]

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[int, ...]]) -> TensorOutline:
        """Collapse the numbers in the names of tensors."""
        shapes: dict[str, tuple[int, ...]] = {}
        counts: dict[str, int] = {}
        for name, shape in tensors.items():
            pattern, _ = name_and_numbers(name)
            shapes.setdefault(pattern, shape)
            counts[pattern] = counts.get(pattern, 0) + 1
        return cls(shapes, counts)

    def with_prefix(self, family: FamilyConfig) -> TensorOutline:
        """Return the outline with the prefix of a family, which files of the model without its head omit."""
        if not family.prefix or any(name.startswith(family.prefix) for name in self.shapes):
            return self
        names = {name: f"{family.prefix}{name}" for name in self.shapes}
        shapes = {names[name]: shape for name, shape in self.shapes.items()}
        return TensorOutline(shapes, {names[name]: count for name, count in self.counts.items()})

    def sizes(self) -> Iterator[tuple[tuple[str, int], int]]:
        """Yield the sizes of all axes, and the counts of tensors as axis -1."""
        for name, shape in self.shapes.items():
            yield (name, -1), self.counts[name]
            yield from (((name, axis), size) for axis, size in enumerate(shape))


@dataclass
class FamilyCandidate:
    """A family, its first spec, and the fields of a config.json that fit tensors.

    Attributes:
        family: the family.
        root: the tree of its first spec.
        plugins: the plugins.
        config_json: the fields of the config.json of a model of the family.
        decided: the fields that the names and shapes decide.
        products: products of further fields that the shapes decide, as text.
        faults: the number of tensors that are missing or unknown, and of sizes that contradict each other.
    """

    family: FamilyConfig
    root: tree.Mapping
    plugins: Plugins
    config_json: dict[str, Any] = field(default_factory=dict)
    decided: dict[str, Any] = field(default_factory=dict)
    products: tuple[str, ...] = ()
    faults: int = 0

    def start(self, stored: TensorOutline) -> bool:
        """Set the fields to the first spec with few layers, and count the faults by name. Return False on failure."""
        try:
            graph = self._graph(self.root)
            self.config_json = write_fields(graph.spec, self.family, nearest=True)
        except SpecError:
            return False
        for name, rule in self.family.fields.items():
            for path in _paths(rule.expressions, self.family):
                value = value_at(graph.spec.model, path)
                if self.config_json.get(name) is None and type(value) is int and "." not in name:
                    self.config_json[name] = value
                if path.endswith("n_layers") and type(value) is int and name in self.config_json:
                    items = self.config_json.items()
                    reduced = {key: entry for key, entry in items if not _is_list_of(entry, value)} | {name: LAYERS}
                    self.config_json = reduced if self.outline(reduced) is not None else self.config_json
        outline = self.outline(self.config_json)
        if outline is not None:
            self.faults = self.faults_by_name(outline, stored)
        return outline is not None

    def outline(self, config_json: Mapping[str, Any]) -> TensorOutline | None:
        """Return the tensors of the model that a config.json describes; None if no model has these fields."""
        try:
            model = build(self._graph(read_fields(self._mapping(config_json), self.root, self.family)), device="meta")
            tensors = published_map(model, self.family).tensors(model.state_dict())
            return TensorOutline.of({name: tuple(tensor.shape) for name, tensor in tensors})
        except (SpecError, ValueError, RuntimeError):
            return None

    def _graph(self, root: tree.Mapping) -> Graph:
        items = {key: node for key, node in root.items.items() if key != "parameters"}
        root = tree.Mapping(items, root.keys, root.span)
        return expand(resolve_spec(without_idle(root, self.plugins), self.plugins, file=CONFIG))

    def _mapping(self, config_json: Mapping[str, Any]) -> tree.Mapping:
        node = node_of(dict(config_json), self.root.span)
        assert isinstance(node, tree.Mapping)
        return node

    def faults_by_name(self, outline: TensorOutline, stored: TensorOutline) -> int:
        """Return the number of tensors that only one side has, or with a different number of axes."""
        copies = self.family.copies
        extra = name_matcher(name for name in map(self.family.in_file, self.family.extra) if name not in copies)
        alone = stored.shapes.keys() ^ outline.shapes.keys()
        shared = stored.shapes.keys() & outline.shapes.keys()
        differing = [name for name in shared if len(stored.shapes[name]) != len(outline.shapes[name])]
        return len(differing) + sum(not extra.fullmatch(name.replace("{}", "0")) for name in alone)

    def fit(self, stored: TensorOutline) -> None:
        """Choose the values of fields by the names and shapes of stored tensors, and count the remaining faults."""
        for name, value in {**self.family.defaults, **self.config_json}.items():
            if isinstance(value, bool):
                self._fit_bool(name, value, stored)
        base = self.outline(self.config_json)
        assert base is not None
        numbers = [name for name, value in self.config_json.items() if type(value) is int and value > 0]
        effects = {name: effect for name in numbers if (effect := self._effect(name, base)) is not None}
        equations = list(_equations(base, stored, effects))
        self.faults = self.faults_by_name(base, stored)
        while solved := [(ratio, powers) for ratio, powers in equations if len(powers) == 1]:
            ratio, ((name, power),) = solved[0][0], solved[0][1].items()
            factor = ratio**power
            value = self.config_json[name] * factor
            self.decided[name] = int(value)
            left = [
                (ratio / factor ** powers.get(name, 0), {key: power for key, power in powers.items() if key != name})
                for ratio, powers in equations
            ]
            self.faults += (value.denominator != 1) + sum(ratio != 1 for ratio, powers in left if not powers)
            equations = [(ratio, powers) for ratio, powers in left if powers]
        self.products = tuple(dict.fromkeys(self._product(ratio, powers) for ratio, powers in equations))

    def _product(self, ratio: Fraction, powers: Mapping[str, int]) -> str:
        """Describe a product of fields, which determines a size."""
        for name, power in powers.items():
            ratio *= Fraction(self.config_json[name]) ** power
        words = [
            f"{'*' if power == 1 else '/'} {name}" for name, power in sorted(powers.items(), key=lambda item: -item[1])
        ]
        return f"{' '.join(words).removeprefix('* ')} = {ratio}"

    def _fit_bool(self, name: str, value: bool, stored: TensorOutline) -> None:
        """Decide a field that is true or false, if it determines which tensors exist."""
        outlines = {choice: self.outline({**self.config_json, name: choice}) for choice in (value, not value)}
        faults = {choice: self.faults_by_name(outline, stored) for choice, outline in outlines.items() if outline}
        if len(set(faults.values())) == 2:
            self.config_json[name] = self.decided[name] = min(faults, key=lambda choice: faults[choice])

    def _effect(self, name: str, base: TensorOutline) -> dict[tuple[str, int], int] | None:
        """Return the powers of a field in the sizes of tensors, or `SUM`; None if no other value is possible."""
        value = self.config_json[name]
        for other in (2 * value, value // 2):
            outline = self.outline({**self.config_json, name: other}) if other > 0 else None
            if outline is not None:
                sizes, factor = dict(outline.sizes()), Fraction(other, value)
                powers = {Fraction(1): 0, factor: 1, 1 / factor: -1}
                ratios = {key: Fraction(sizes[key], size) for key, size in base.sizes() if key in sizes and size}
                return {key: powers.get(ratio, SUM) for key, ratio in ratios.items()}
        return None

    def open_fields(self) -> list[str]:
        """Return the fields that a config.json must have, and that the tensors do not decide."""
        names: list[str] = []
        while True:
            try:
                config_json = {**self.decided, **{name: self.config_json.get(name) for name in names}}
                read_fields(self._mapping(config_json), self.root, self.family)
            except SpecError as error:
                matches = (MISSING.search(diagnostic.message) for diagnostic in error.diagnostics)
                missing = [match[1] for match in matches if match and match[1] not in names]
                if missing:
                    names += dict.fromkeys(missing)
                    continue
            return names


def _equations(
    base: TensorOutline, stored: TensorOutline, effects: Mapping[str, Mapping[tuple[str, int], int]]
) -> Iterator[tuple[Fraction, dict[str, int]]]:
    """Yield the ratios of stored sizes to the sizes of a model, and the powers of the fields that determine them."""
    sizes = dict(stored.sizes())
    for key, size in base.sizes():
        powers = {name: effect[key] for name, effect in effects.items() if effect.get(key, 0) != 0}
        if powers and key in sizes and size and SUM not in powers.values():
            yield Fraction(sizes[key], size), powers


def _paths(expressions: Collection[str], family: FamilyConfig) -> Iterator[str]:
    """Yield the paths of the spec that expressions set without arithmetic."""
    for text in expressions:
        expression = Expression.parse(text, family.fields)
        if expression.is_path:
            yield expression.path


def _is_list_of(value: object, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


@dataclass(frozen=True)
class DraftedConfig:
    """The draft of a config.json.

    Attributes:
        text: the file.
        types: the model types, the most similar first.
        n_equal: the number of model types that fit equally, the first ones of `types`.
        open: the fields that a reader must complete.
        note: a warning with the fields that names and shapes do not decide.
    """

    text: str
    types: tuple[str, ...]
    n_equal: int
    open: tuple[str, ...]
    note: Diagnostic


def draft_config(path: Path, types: Mapping[str, Type], plugins: Plugins) -> DraftedConfig:
    """Draft a config.json for weights without one.

    Args:
        path: the weights.
        types: the model types. Of types that fit equally, the first is chosen.
        plugins: the plugins.

    Raises:
        SpecError: the weights cannot be read, or no family has any of their tensors.
    """
    with TensorFiles.open(path) as opened:
        stored = TensorOutline.of({name: info.shape for name, info in opened.names.items()})
    order = {name: number for number, name in enumerate(types)}
    candidates: dict[str, FamilyCandidate] = {}
    for name in _similar_types(stored, types)[:MAX_CANDIDATES]:
        root, family = types[name]()
        candidate = FamilyCandidate(family, root, plugins)
        if candidate.start(stored.with_prefix(family)):
            candidates[name] = candidate
    if not candidates:
        raise SpecError(Diagnostic(f"no family has the tensors of {quoted_path(path)}"))
    names = sorted(candidates, key=lambda name: (candidates[name].faults, order[name]))
    for candidate in [candidates[name] for name in names[:MAX_FITTED]]:
        candidate.fit(stored.with_prefix(candidate.family))
    names.sort(key=lambda name: (candidates[name].faults, order[name]))
    best = candidates[names[0]]
    n_equal = sum(candidate.faults == best.faults for candidate in candidates.values())
    missing, rules = best.open_fields(), best.family.fields
    decided = {name: value for name, value in best.decided.items() if name in rules}
    head = {"architectures": [best.family.architecture], "model_type": best.family.model_type}
    text = json.dumps({**head, **decided, **dict.fromkeys(missing, OPEN)}, indent=2) + "\n"
    defaults = [name for name in best.family.defaults if rules[name].determines and name not in {*decided, *missing}]
    lines: dict[str, Collection[str]] = {
        "to complete": list(map(quoted, missing)),
        f"with the defaults of {best.family.architecture}": list(map(quoted, defaults)),
        "the shapes decide": best.products,
        "types with the same names and shapes": names[1:n_equal],
    }
    notes = tuple(f"{title}: {listing(list(values), 20)}" for title, values in lines.items() if values)
    note = Diagnostic(f"the tensors do not decide all fields of {quoted(best.family.model_type)}", notes=notes)
    return DraftedConfig(text, tuple(names), n_equal, tuple(missing), note)


def _similar_types(stored: TensorOutline, types: Mapping[str, Type]) -> list[str]:
    """Return the model types whose families have some of the modules of tensors, the most similar first."""
    similarity = {}
    for number, (name, read_type) in enumerate(types.items()):
        _, family = read_type()
        entries = [entry if isinstance(entry, str) else next(iter(entry)) for entry in family.tensors.values()]
        names = {family.in_file(module) for entry in entries for module in expanded_names(entry)}
        modules = {with_nameless_holes(module) for module in names}
        theirs = {pattern.rpartition(".")[0] for pattern in stored.with_prefix(family).shapes}
        if shared := len(theirs & modules):
            similarity[name] = len(theirs) - shared, len(modules) - shared, number
    return sorted(similarity, key=lambda name: similarity[name])
