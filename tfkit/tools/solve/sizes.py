"""The sizes of a spec's family: the numbers that grow together, and their steps.

A size is two integers: `depth` counts units of layers, and `width` counts steps of d_model. Every stack has the same
fraction of the layers at every depth. At every width, the ratios of d_model, heads, and heads of keys and values are
the ratios of the spec, so the width of a head is constant. All other values stay: vocabulary, experts, latent widths, a
single head of keys and values. Values that the spec writes as arithmetic are computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Self

from tfkit.component import AttentionConfig, parts
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph, expand
from tfkit.plugin.manager import Plugins
from tfkit.spec.extending import find_spec
from tfkit.spec.load import read_tree, resolve_spec
from tfkit.spec.merge import apply_set, without_keys
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.tree import Mapping as Tree
from tfkit.spec.tree import Node, Scalar

Path = tuple[str, ...]

HEADS = ("n_heads", "n_kv_heads")
MAX_LAYERS = MAX_HEADS = 4096
MAX_DIM = 2**26
ROUNDING = 256
"""A hidden width is a multiple of this power of two, or of the largest power of two that divides the spec's width."""
LOSS = 16
"""Minimum ratio of a hidden width to the unit of its rounding, so that rounding changes the width by at most 3%."""


@dataclass(frozen=True)
class Depth:
    """A number of layers that grows: its `path`, its value in the spec, and the length of its repeating pattern."""

    path: Path
    n_layers: int
    period: int
    minimum: int


@dataclass(frozen=True)
class HiddenWidth:
    """A hidden width that grows with d_model. Several paths may share it."""

    paths: tuple[Path, ...]
    d_ff: int

    @property
    def rounding(self) -> int:
        """The unit of rounding in the spec."""
        return min(ROUNDING, self.d_ff & -self.d_ff)

    def at(self, scale: Fraction) -> int:
        """Return the hidden width for a d_model of `scale` times the spec's, with the spec's ratio and rounding."""
        exact, step = self.d_ff * scale, self.rounding
        while step > 1 and exact < LOSS * step:
            step //= 2
        return max(1, int(exact / step + Fraction(1, 2))) * step


class Family:
    """The sizes of the family of the spec in a tree, read from `file`.

    `sets` are the changes that apply to all of them, as `--set` takes them. A `d_model` or `n_layers` among the changes
    is kept at that value; another number that would grow is fixed.
    Raises SpecError if the spec is invalid, or if nothing in it can grow.
    """

    def __init__(
        self, tree: Tree, file: str, plugins: Plugins, *, sets: Iterable[str] = (), keep: Iterable[str] = ()
    ) -> None:
        self.tree, self.file, self.plugins = tree, file, plugins
        self._fields = frozenset(ModelSpec.model_fields) | plugins.registry.shared_names()
        changes = list(sets)
        paths = {change: self._path(change) for change in changes}
        written = dict(written_numbers(self.tree, ()))
        self._kept = {path: change for change, path in paths.items() if path[-1] in ("d_model", "n_layers")}
        self._kept = {path: change for path, change in self._kept.items() if path in written}
        self.sets = tuple(change for change in changes if paths[change] not in self._kept)
        self.own = self.load(())
        self.tree = without_keys(self.tree, {"checkpoint"})  # long, and without effect on sizes
        fixed = [paths[change] for change in self.sets]
        changed = changed_tree(self.tree, self.sets, plugins)
        numbers = {
            path: n
            for path, n in written_numbers(changed, ())
            if not any(path[: len(change)] == change for change in fixed)
        }
        self.stacks = self._stacks(numbers) if "n_layers" not in keep else ()
        self.widths = self._widths(numbers)
        self.hidden = self._hidden(numbers)
        self.step = self._step()
        self.scale = Fraction(1) if "d_model" in keep else self._given_scale()
        self._check(keep)

    @classmethod
    def of(cls, spec: str, plugins: Plugins, *, sets: Iterable[str] = (), keep: Iterable[str] = ()) -> Self:
        """Return the family of a spec, given its path or name."""
        return cls(read_tree(spec, plugins.specs), str(find_spec(spec, plugins.specs)), plugins, sets=sets, keep=keep)

    def _path(self, change: str) -> Path:
        """Return the path that a `--set` argument changes."""
        path = tuple(change.partition("=")[0].strip().split("."))
        return path if path[0] in self._fields else ("graph", *path)

    def _set_size(self, path: Path) -> int:
        """Return the integer that a change sets for a size; raise SpecError if the value is not a positive integer."""
        change = self._kept[path]
        node = node_at(apply_set(self.tree, change, self._fields), path)
        value = node.value if isinstance(node, Scalar) else None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.load((change,))  # raises the error of an invalid value
            name = change.partition("=")[0]
            raise SpecError(Diagnostic(f"`{name}` must be a positive integer", help=f"write for instance `{name}=12`"))
        return value

    def _stacks(self, numbers: Mapping[Path, int]) -> tuple[Depth, ...]:
        """Return the depths that grow."""
        stacks = []
        for node in self.own.built_nodes:
            path = ("graph", node.name, "n_layers")
            if path in numbers and path not in self._kept and node.stack is not None and node.stack.period is not None:
                stacks.append(Depth(path, numbers[path], node.stack.period, node.stack.minimum))
        return tuple(stacks)

    def _widths(self, numbers: Mapping[Path, int]) -> dict[Path, int]:
        """Return the sizes that grow in proportion: d_model, heads, and inputs of features as wide as d_model."""
        heads = {path for path in numbers if path[-1] in HEADS}
        single = {path for path in heads if path[-1] == "n_kv_heads" and numbers[path] == 1}
        lonely = {path for path in heads if path[-1] == "n_kv_heads" and (*path[:-1], "n_heads") not in numbers}
        bound = {path for path in lonely if node_at(self.tree, (*path[:-1], "n_heads")) is not None}
        d_models = {path for path in numbers if path[-1] == "d_model"}
        values = {numbers[path] for path in d_models}
        features = {path for path, n in numbers.items() if path[0] == "inputs" and path[-1] == "width" and n in values}
        return {path: numbers[path] for path in numbers if path in d_models | features | (heads - single - bound)}

    def _hidden(self, numbers: Mapping[Path, int]) -> tuple[HiddenWidth, ...]:
        groups: dict[int, list[Path]] = {}
        for path, number in numbers.items():
            if path[-1] == "d_ff":
                groups.setdefault(number, []).append(path)
        return tuple(HiddenWidth(tuple(paths), number) for number, paths in groups.items())

    def _step(self) -> Fraction:
        """Return the smallest factor whose multiples keep all widths integers and all ratios unchanged."""
        ratios = [Fraction(number) for number in self.widths.values()]
        components = parts((), self.own.spec.model)
        for path, attention in (
            (path, component) for path, component in components if isinstance(component, AttentionConfig)
        ):
            grows, kv_grows = (self._grows((*path, name)) for name in HEADS)
            if grows and not kv_grows and 1 < attention.kv_heads < attention.n_heads:
                ratios.append(Fraction(attention.n_heads, attention.kv_heads))
            if not grows and attention.d_head is None:
                ratios.append(Fraction(attention.d_model, attention.n_heads))
        unit = Fraction(gcd(*(r.numerator for r in ratios)), lcm(*(r.denominator for r in ratios)))
        return 1 / unit if unit else Fraction(1)

    def _grows(self, path: Path) -> bool:
        """Return True if a size of the resolved spec grows; a layer variant follows its stack."""
        if path in self.widths or "variants" not in path:
            return path in self.widths
        location = path.index("variants")
        return node_at(self.tree, path) is None and (*path[: location - 1], *path[location + 2 :]) in self.widths

    def _given_scale(self) -> Fraction | None:
        """Return the d_model of the changes as a multiple of the spec's, or None if they do not set it."""
        scales = {path: Fraction(self._set_size(path), self.widths[path]) for path in self._kept if path in self.widths}
        for path, scale in scales.items():
            if scale / self.step % 1:
                unit = int(self.widths[path] * self.step)
                message = f"`{self._kept[path]}` cannot be a width of the family: its heads need a multiple of {unit}"
                raise SpecError(
                    Diagnostic(
                        message, help=f"also set n_heads, or use {_adjacent_multiples(self._set_size(path), unit)}"
                    )
                )
        if len(set(scales.values())) > 1:
            raise SpecError(Diagnostic(f"{' and '.join(self._kept.values())} must scale the family by the same factor"))
        return next(iter(scales.values()), None)

    def _check(self, keep: Iterable[str]) -> None:
        if not any(path[-1] == "d_model" for path in self.widths):
            self.scale = Fraction(1)
        if self.scale is not None and not self.stacks:
            help = "omit `--keep`, or one of the sizes set by `--set`"
            raise SpecError(Diagnostic("no size is left to solve for: layers and d_model are both fixed", help=help))

    @property
    def depth(self) -> int:
        """The depth of the spec."""
        return gcd(*(stack.n_layers for stack in self.stacks))

    @property
    def depths(self) -> range:
        """All depths at which layer patterns are repeated as completely as in the spec."""
        if not self.stacks:
            return range(1)
        units = [stack.n_layers // self.depth for stack in self.stacks]
        periods = [stack.period // gcd(stack.period, unit) for stack, unit in zip(self.stacks, units, strict=True)]
        stride = lcm(*periods)
        minimum = max(-(-stack.minimum // unit) for stack, unit in zip(self.stacks, units, strict=True))
        maximum = min(MAX_LAYERS // unit for unit in units)
        return range(minimum + (self.depth - minimum) % stride, maximum + 1, stride)

    @property
    def width(self) -> int:
        """The fixed width, else the width of the spec."""
        return int((self.scale or Fraction(1)) / self.step)

    @property
    def all_widths(self) -> range:
        """All widths that a spec can have."""
        counts = [Fraction(n, MAX_HEADS) for path, n in self.widths.items() if path[-1] in HEADS]
        dims = [Fraction(n, MAX_DIM) for n in (*self.widths.values(), *(hidden.d_ff for hidden in self.hidden))]
        return range(1, int(1 / (max((*counts, *dims), default=Fraction(1)) * self.step)) + 1)

    def changes(self, depth: int, width: int, hidden: Iterable[int] | None = None) -> tuple[str, ...]:
        """Return the changes for a size, in addition to `sets`, without changes that have no effect."""
        scale = width * self.step
        values = {item.path: item.n_layers // self.depth * depth for item in self.stacks}
        values |= {path: self._set_size(path) for path in self._kept if path[-1] == "n_layers"}
        values |= {path: int(number * scale) for path, number in self.widths.items()}
        d_ffs = self.hidden_at(width) if hidden is None else hidden
        values |= {path: d_ff for item, d_ff in zip(self.hidden, d_ffs, strict=True) for path in item.paths}
        numbers = dict(written_numbers(self.tree, ()))
        return tuple(f"{self._name(path)}={n}" for path, n in values.items() if numbers.get(path) != n)

    def hidden_at(self, width: int) -> list[int]:
        """Return the hidden widths for a width."""
        return [hidden.at(width * self.step) for hidden in self.hidden]

    def load(self, changes: Iterable[str]) -> Graph:
        """Load the spec with `sets` and additional changes; raise SpecError if it is invalid."""
        return expand(resolve_spec(self.tree, self.plugins, sets=(*self.sets, *changes), file=self.file))

    def _name(self, path: Path) -> str:
        """Format a path for `--set`."""
        return ".".join(path[1:] if path[0] == "graph" and path[1] not in self._fields else path)


def written_numbers(tree: Tree, path: Path) -> Iterator[tuple[Path, int]]:
    """Yield the integers that a spec writes by name, in its order."""
    for name, node in tree.items.items():
        here = (*path, name)
        if isinstance(node, Tree) and here != ("checkpoint",):
            yield from written_numbers(node, here)
        elif isinstance(node, Scalar) and isinstance(node.value, int) and not isinstance(node.value, bool):
            yield here, node.value


def node_at(tree: Node | None, path: Path) -> Node | None:
    """Return the node at a path of a tree; None if there is none."""
    for name in path:
        tree = tree.items.get(name) if isinstance(tree, Tree) else None
    return tree


def _adjacent_multiples(number: int, step: int) -> str:
    below = number // step * step
    return f"{below} or {below + step}" if below else str(step)


def changed_tree(tree: Tree, sets: Iterable[str], plugins: Plugins) -> Tree:
    """Return the tree of a spec with changes, as `--set` takes them."""
    fields = frozenset(ModelSpec.model_fields) | plugins.registry.shared_names()
    return functools.reduce(lambda changed, change: apply_set(changed, change, fields), sets, tree)
