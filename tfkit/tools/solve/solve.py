"""The sizes of a spec's family that fit a budget: layers and d_model vary, everything else stays."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tfkit.arguments import AnyPath, Sets, checked
from tfkit.errors import Diagnostic, SpecError
from tfkit.plugin.known_specs import NamedSpecs
from tfkit.plugin.manager import AnyPlugins, Plugins, load_plugins
from tfkit.spec.extending import SUFFIXES, find_spec, is_folder
from tfkit.spec.load import read_tree
from tfkit.spec.merge import MODEL_KEYS, as_changes, without_keys
from tfkit.spec.render import render_tree, schema_line
from tfkit.spec.tree import Mapping as Tree
from tfkit.spec.tree import Node, Scalar, node_of
from tfkit.tools.params.count import count_params
from tfkit.tools.solve.budget import Budget, Memory, Size, Solved, size_of_graph
from tfkit.tools.solve.search import Form, Grid, GridPoint, nearest_sizes
from tfkit.tools.solve.sizes import Family, changed_tree
from tfkit.tools.solve.vary import vary_value

Kept: TypeAlias = Literal["d_model", "n_layers"]
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")


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
    fixed, loaded = (keep,) if isinstance(keep, str) else tuple(keep), plugins or load_plugins()
    if vary is None:
        return sizes_of(Family.of(os.fspath(spec), loaded, sets=as_changes(sets), keep=fixed), budget)
    if fixed:
        raise ValueError("`vary` cannot be combined with `keep`: it keeps all other values")
    file = str(find_spec(spec, loaded.specs))
    return vary_value(read_tree(spec, loaded.specs), file, loaded, vary, budget, as_changes(sets))


def sizes_of(family: Family, budget: Budget) -> Solved:
    """Find the sizes of a family nearest to a budget; raises SpecError, see `solve`."""
    grid = grid_of(family, Form(family, lambda *size: budget.count(family.load(family.changes(*size)))))
    smallest = grid.smallest()
    if smallest.value > budget.amount:
        raise _out_of_reach(family, budget, smallest, "small")
    points = nearest_sizes(grid, budget.amount)
    largest = max(points, key=lambda point: point.value)
    if 2 * largest.value < budget.amount:
        raise _out_of_reach(family, budget, largest, "large")
    return Solved(family.own.name, budget, tuple(size_of(family, point, budget) for point in points))


def grid_of(family: Family, form: Form) -> Grid:
    """Return the grid of a family's sizes."""
    scaled = family.width if family.scale is not None else None
    shape = 1 / float(family.step) / max(family.depth, 1)
    return Grid(family.depths, family.all_widths, scaled, shape, form)


def size_of(family: Family, point: GridPoint, budget: Budget | Memory, peak: int = 0) -> Size:
    """Describe a size whose processes need `peak` bytes."""
    changes = family.changes(point.depth, point.width)
    return size_of_graph(family.load(changes), budget, (*family.sets, *changes), peak)


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
    tree = _tree_difference(base, changed_tree(base, sets, plugins), ())
    return _spec_text(tree, path, {"extends": _base_reference(spec, path.parent, plugins.specs)}, values)


def standalone_spec(tree: Tree, sets: Iterable[str], path: Path, plugins: Plugins, **values: Any) -> str:
    """Write the YAML of a spec with changes, as `extending_spec` does, but include all values of `tree`."""
    changed = without_keys(changed_tree(tree, sets, plugins), {"tfkit", "name", *values})
    return _spec_text(changed, path, {}, values)


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
