"""The sizes of a spec's family that fit a budget: layers and d_model vary, everything else stays."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from tfkit.arguments import AnyPath, Limit, Sets, checked
from tfkit.building.builder import build
from tfkit.commands import bytes_text
from tfkit.component import AttentionConfig, FFNConfig, Layers
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph
from tfkit.plugin.known_specs import NamedSpecs
from tfkit.plugin.manager import AnyPlugins, Plugins, load_plugins
from tfkit.spec.extending import SUFFIXES, find_spec, is_folder
from tfkit.spec.load import read_tree
from tfkit.spec.merge import MODEL_KEYS, apply_set, as_changes, without_keys
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.render import render_tree, schema_line
from tfkit.spec.tree import Mapping as Tree
from tfkit.spec.tree import Node, Scalar, node_of
from tfkit.tools.params.count import active_of, count_params
from tfkit.tools.solve.search import Form, Grid, GridPoint, nearest_sizes
from tfkit.tools.solve.sizes import Family

Kept: TypeAlias = Literal["d_model", "n_layers"]
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")


@checked
@dataclass(frozen=True)
class Budget:
    """A number of parameters.

    Attributes:
        of: the quantity; `active` counts the parameters that one token uses.
        amount: the number of parameters.
    """

    of: Literal["params", "active"]
    amount: Annotated[float, Limit(above=0)]

    def count(self, graph: Graph) -> int:
        """Count the parameters of a model that the budget limits."""
        total, active = parameters_of(graph)
        return active if self.of == "active" else total

    def text(self, count: float) -> str:
        """Format a number of parameters."""
        return f"{round(count):,} {'active parameters' if self.of == 'active' else 'parameters'}"


@dataclass(frozen=True)
class Memory:
    """The memory of each process of a run.

    Attributes:
        amount: bytes.
        processes: the number of processes.
    """

    amount: float
    processes: int
    of: Literal["memory"] = "memory"

    def text(self, count: float) -> str:
        """Format a number of bytes."""
        return bytes_text(round(count))


def parameters_of(graph: Graph) -> tuple[int, int]:
    """Count all and active parameters of a model on the meta device."""
    model: Any = build(graph, device="meta")
    modules: dict[str, Any] = dict(model.named_modules())
    weights = dict(model.named_parameters()).items()
    active = sum(active_of(modules[path.rpartition(".")[0]], weight) for path, weight in weights)
    return sum(weight.numel() for _, weight in weights), active


@dataclass(frozen=True)
class Size:
    """A size of the family, counted from the model that it builds.

    Attributes:
        n_layers: the number of layers of each stack, by node.
        d_model: the width of the first stack.
        n_heads: query heads of the first stack; None without attention.
        n_kv_heads: heads of keys and values of the first stack.
        d_ff: hidden width of the first stack; None without an FFN.
        parameters: the exact number of parameters.
        value: the quantity that the budget limits.
        difference: `value` minus the budget.
        sets: the changes of the spec that give this size, as `--set` takes them.
    """

    n_layers: Mapping[str, int]
    d_model: int | None
    n_heads: int | None
    n_kv_heads: int | None
    d_ff: int | None
    parameters: int
    value: int
    difference: float
    sets: tuple[str, ...]


@dataclass(frozen=True)
class Solved:
    """The result of `solve`. The size with the spec's shape comes first."""

    name: str
    budget: Budget | Memory
    sizes: tuple[Size, ...]


@checked
def solve(
    spec: AnyPath,
    budget: Budget,
    *,
    sets: Sets = (),
    keep: Kept | Iterable[Kept] = (),
    vary: str | None = None,
    plugins: AnyPlugins | None = None,
) -> Solved:
    """Find the sizes of a spec's family that are nearest to a budget.

    All stacks get deeper and all widths wider in the same proportion. The width of a head, the ratio of d_ff to d_model
    (rounded as the spec's is), the ratio of query heads to key-value heads, and everything else stay.

    Args:
        spec: the path or name of a spec.
        budget: the target.
        sets: changes, as `load` takes them, that apply to every size; a `d_model` or `n_layers` in them is fixed.
        keep: `d_model` or `n_layers`, or both, to keep as in the spec.
        vary: the path of the only value that varies, such as `decoder.ffn.d_ff`; cannot be combined with `keep`.
        plugins: the plugins; by default the installed plugins.

    Raises:
        SpecError: the spec is invalid, no size is left to solve for, or even the smallest size has too many parameters.
        ValueError: `vary` is combined with `keep`.
    """
    kept_sizes, loaded = (keep,) if isinstance(keep, str) else tuple(keep), plugins or load_plugins()
    if vary is None:
        return sizes_of(Family.of(os.fspath(spec), loaded, sets=as_changes(sets), keep=kept_sizes), budget)
    if kept_sizes:
        raise ValueError("`vary` cannot be combined with `keep`: it keeps all other values")
    from tfkit.tools.solve.vary import vary_value

    file = str(find_spec(spec, loaded.specs))
    return vary_value(read_tree(spec, loaded.specs), file, loaded, vary, budget, as_changes(sets))


def sizes_of(family: Family, budget: Budget) -> Solved:
    """Find the sizes of a family nearest to a budget; raises SpecError, see `solve`."""
    grid = grid_of(family, Form(family, lambda *size: budget.count(family.load(family.changes(*size)))))
    least = grid.least()
    if least.value > budget.amount:
        raise _out_of_reach(family, budget, least, "small")
    points = nearest_sizes(grid, budget.amount)
    most = max(points, key=lambda point: point.value)
    if 2 * most.value < budget.amount:
        raise _out_of_reach(family, budget, most, "large")
    return Solved(family.own.name, budget, tuple(size_of(family, point, budget) for point in points))


def grid_of(family: Family, form: Form) -> Grid:
    """Return the grid of a family's sizes."""
    kept = family.width if family.scale is not None else None
    shape = 1 / float(family.step) / max(family.depth, 1)
    return Grid(family.depths, family.all_widths, kept, shape, form)


def size_of(family: Family, point: GridPoint, budget: Budget | Memory, peak: int = 0) -> Size:
    """Describe a size whose processes need `peak` bytes."""
    changes = family.changes(point.depth, point.width)
    return size_of_graph(family.load(changes), budget, (*family.sets, *changes), peak)


def size_of_graph(graph: Graph, budget: Budget | Memory, sets: tuple[str, ...], peak: int = 0) -> Size:
    """Describe the size of a model, which the changes `sets` give, and whose processes need `peak` bytes."""
    parameters, active = parameters_of(graph)
    value = {"params": parameters, "active": active, "memory": peak}[budget.of]
    stacks = [(node, node.stack) for node in graph.nodes if node.stack is not None]
    attention, ffn = _usual_configs(stacks[0][1]) if stacks else (None, None)
    return Size(
        n_layers={node.name: stack.depth for node, stack in stacks},
        d_model=stacks[0][0].output.width if stacks else None,
        n_heads=attention.n_heads if attention else None,
        n_kv_heads=attention.kv_heads if attention else None,
        d_ff=ffn.hidden_width if ffn else None,
        parameters=parameters,
        value=value,
        difference=value - budget.amount,
        sets=sets,
    )


def _usual_configs(stack: Layers) -> tuple[AttentionConfig | None, FFNConfig | None]:
    """Return the self-attention and the FFN of most layers of a stack."""
    steps = stack.layers[max(stack.variants.values(), key=len)[0]].steps
    attention = (step.config for step in steps if isinstance(step.config, AttentionConfig) and not step.reads_memory)
    ffn = (step.config for step in steps if isinstance(step.config, FFNConfig))
    return next(attention, None), next(ffn, None)


def _out_of_reach(family: Family, budget: Budget, end: GridPoint, what: str) -> SpecError:
    """Return the error, with its reason, if even the smallest size is above the budget or the largest far below."""
    graph = family.load(family.changes(end.depth, end.width))
    stacks = [(node.output.width, node.stack.depth) for node in graph.nodes if node.stack is not None]
    layers = " + ".join(str(depth) for _, depth in stacks)
    end_name = "smallest" if what == "small" else "largest"
    value = budget.text(end.value)
    notes = [f"the {end_name} size has {value}, with n_layers {layers} and d_model {stacks[0][0]}"]
    help = None
    if what == "small" and budget.of == "params":
        counted = count_params(graph)
        notes.append(f"{counted.total - counted.non_embedding:,} of them are embedding tables")
        help = "make the tables smaller with a smaller vocabulary: `--set vocab_size=N`"
    message = f"no size of {family.own.name} is as {what} as {budget.text(budget.amount)}"
    return SpecError(Diagnostic(message, None, "", tuple(notes), help))


# ---- a size as a separate spec ----


def extending_spec(spec: str, sets: Iterable[str], path: Path, plugins: Plugins, **values: Any) -> str:
    """Write the YAML of a spec that extends `spec` with changes, as `--set` takes them, and is named after `path`.

    `values` are additional values at the top of the spec.
    """
    base = read_tree(spec, plugins.specs)
    tree = _tree_difference(base, _changed_tree(base, sets, plugins), ())
    return _spec_text(tree, path, {"extends": _base_reference(spec, path.parent, plugins.specs)}, values)


def standalone_spec(tree: Tree, sets: Iterable[str], path: Path, plugins: Plugins, **values: Any) -> str:
    """Write the YAML of a spec with changes, as `extending_spec` does, but include all values of `tree`."""
    changed = without_keys(_changed_tree(tree, sets, plugins), {"tfkit", "name", *values})
    return _spec_text(changed, path, {}, values)


def _changed_tree(tree: Tree, sets: Iterable[str], plugins: Plugins) -> Tree:
    fields = frozenset(ModelSpec.model_fields) | plugins.registry.shared_names()
    return functools.reduce(lambda changed, change: apply_set(changed, change, fields), sets, tree)


def _spec_text(tree: Tree, path: Path, base: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    name = _UNSAFE_CHARACTERS.sub("_", path.stem).strip("_.-") or "solved"
    head = node_of({"tfkit": 1, **base, "name": name, **values}, tree.span)
    assert isinstance(head, Tree)
    merged = Tree({**head.items, **tree.items}, {**head.keys, **tree.keys}, tree.span)
    return schema_line(path.parent) + render_tree(merged)


def _base_reference(spec: str, folder: Path, specs: NamedSpecs) -> str:
    """Return the name or path with which a spec in `folder` can refer to `spec`."""
    if not spec.endswith(SUFFIXES) and os.sep not in spec and not is_folder(spec, specs):
        return spec
    relative = os.path.relpath(find_spec(spec, specs).resolve(), folder.resolve())
    return relative if os.sep in relative else f".{os.sep}{relative}"


def _tree_difference(old: Tree, new: Tree, path: tuple[str, ...]) -> Tree:
    """Return the patch with which `extends` turns `old` into `new`. A component whose kind changes is replaced."""
    items: dict[str, Node] = {}
    for name, node in new.items.items():
        before = old.items.get(name)
        if before == node:
            continue
        here = (*path, name)
        if isinstance(before, Tree) and isinstance(node, Tree) and _kind_word(before, here) == _kind_word(node, here):
            items[name] = _tree_difference(before, node, here)
        else:
            items[name] = node
    gone = {name: Scalar(None, new.span) for name in old.items if name not in new.items}
    keys = {name: new.keys.get(name, new.span) for name in (*items, *gone)}
    return Tree({**items, **gone}, keys, new.span)


def _kind_word(node: Tree, path: tuple[str, ...]) -> object:
    word = node.items.get(MODEL_KEYS.word_key(path))
    return word.value if isinstance(word, Scalar) else None
